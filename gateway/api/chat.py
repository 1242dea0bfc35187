"""POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import metrics
from gateway.api import timing
from gateway.api.service import Service, noted
from gateway.api.streams import ACCEPTED, DONE, EventStream, frame, while_connected
from gateway.jobs import Delta, GenerateJob, Sampling, Stage, Usage
from gateway.registry import ChatSpec, Resolved
from gateway.wire import chat as wire
from gateway.wire.chat_answers import Choice, Heading
from gateway.wire.sampling import tier


class ChatCompletions:
    """Read, lease, ask, answer: whole or as a stream, from the same deltas."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        service, rules = self._service, self._service.rules
        read = await service.read(request, wire.ChatRequest, wire.FIELDS)
        asked = read.request
        resolved, spec = service.chat_spec(asked.model)
        job = wire.to_job(
            asked,
            service.caller(request, tier(asked.service_tier)),
            defaults(spec),
            max_tokens=spec.sampling.max_tokens,
            template_args=template_args(resolved, spec),
            max_chars=rules.max_input_chars,
            schema_in_prompt=spec.structured.schema_in_prompt,
        )
        heading = Heading(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=asked.model,
            fingerprint=service.fingerprint(spec),
            is_legacy=asked.is_legacy,
        )
        headers = noted(read.ignored)
        if not asked.stream:
            body = await while_connected(request.receive, self._whole(spec, job, heading))
            return Response(body, media_type="application/json", headers=headers)
        events = self._events(spec, job, heading, with_usage=asked.stream_options.include_usage)
        stream = EventStream(events, headers, request.receive)
        return await stream.primed(rules.stream_open_after_s)

    async def _whole(self, spec: ChatSpec, job: GenerateJob, heading: Heading) -> bytes:
        has_logprobs, is_legacy = job.logprobs is not None, heading.is_legacy
        choices = [
            Choice(index, has_logprobs=has_logprobs, is_legacy=is_legacy) for index in range(job.n)
        ]
        async with (
            self._service.writer(spec, job.caller) as batcher,
            batcher.generate(job) as generation,
            aclosing(generation.deltas) as deltas,
        ):
            usage = generation.usage
            async for delta in deltas:
                choices[delta.index].add(delta)
                usage = counted(usage, delta)
        started = metrics.now()
        body = heading.completion(choices, usage)
        job.caller.timings.add(Stage.SERIALISE, metrics.now() - started)
        return body

    async def _events(
        self,
        spec: ChatSpec,
        job: GenerateJob,
        heading: Heading,
        *,
        with_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        async with (
            self._service.writer(spec, job.caller) as batcher,
            batcher.generate(job) as generation,
            aclosing(generation.deltas) as deltas,
        ):
            yield ACCEPTED
            usage = generation.usage
            is_first = True
            async for delta in deltas:
                if is_first:  # every choice is introduced, in order, before any has text
                    is_first = False
                    for index in range(job.n):
                        yield frame(heading.role(index))
                usage = counted(usage, delta)
                for chunk in heading.chunks(delta):
                    yield frame(chunk)
        if with_usage:
            yield frame(heading.usage(usage, timing.field(job.caller.timings)))
        yield DONE


def counted(usage: Usage, delta: Delta) -> Usage:
    """Add what a delta cost."""
    return replace(
        usage,
        completion_tokens=usage.completion_tokens + delta.tokens,
        reasoning_tokens=usage.reasoning_tokens + delta.reasoning_tokens,
        cached_tokens=usage.cached_tokens + delta.cached_tokens,
    )


def defaults(spec: ChatSpec) -> Sampling:
    """Give the model's sampling defaults, and OpenAI's where it has none."""
    given = spec.sampling.model_dump(exclude_none=True, exclude={"max_tokens"})
    return Sampling(**given)


def template_args(resolved: Resolved, spec: ChatSpec) -> dict[str, Any]:
    """Give what the template is told: thinking by alias, else by model, else its own default."""
    asked = resolved.alias.thinking if resolved.alias else None
    thinking = spec.thinking if asked is None else asked
    args: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return {**args, **spec.chat_template_kwargs}
