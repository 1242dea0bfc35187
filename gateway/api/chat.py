"""POST /v1/chat/completions."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import clock
from gateway.api.generation import (
    added,
    counted,
    defaults,
    judged,
    may_write_again,
    template_args,
    unenforced,
    unread,
    verdict_json,
)
from gateway.api.middleware import timings_field
from gateway.api.requests import Service, noted, written
from gateway.api.streams import ACCEPTED, DONE, EventStream, frame, while_connected
from gateway.errors import GatewayError
from gateway.jobs import GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.wire import chat as wire
from gateway.wire.chat import ChatChoiceWriter, ChatCompletionWriter
from gateway.wire.generation import read_tier


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request as understood, and what its answer is headed with."""

    service: Service
    asked: wire.ChatRequest
    spec: ChatSpec
    job: GenerateJob
    writer: ChatCompletionWriter
    headers: dict[str, str]


async def answer(service: Service, request: Request) -> ASGIApp:
    """Answer a conversation: whole or as a stream, from the same deltas."""
    rules = service.rules

    def translate(asked: wire.ChatRequest) -> tuple[ChatSpec, GenerateJob]:
        resolved, spec = service.chat_spec(asked.model)
        return spec, wire.to_job(
            asked,
            service.caller(request, read_tier(asked.service_tier)),
            defaults(spec),
            max_tokens=spec.sampling.max_tokens,
            template_args=template_args(resolved, spec),
            max_chars=rules.max_input_chars,
            schema_in_prompt=spec.structured.schema_in_prompt,
        )

    read, (spec, job) = await service.read(request, wire.ChatRequest, translate)
    asked = read.request
    writer = ChatCompletionWriter(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=asked.model,
        fingerprint=service.fingerprint(spec),
        is_legacy=asked.is_legacy,
    )
    headers = noted(read.ignored)
    exchange = _Exchange(service, asked, spec, job, writer, headers)
    if not asked.stream:
        body = await while_connected(request.receive, _whole(exchange))
        return Response(body, media_type="application/json", headers=headers)
    events = _events(exchange, with_usage=asked.stream_options.include_usage)
    stream = EventStream(events, headers, request.receive)
    return await stream.primed(rules.stream_open_after_s)


async def _whole(exchange: _Exchange) -> bytes:
    job, writer, headers = exchange.job, exchange.writer, exchange.headers
    choices = [_choice(index, exchange) for index in range(job.n)]
    usage, verdicts = await _generate(exchange, job, choices)
    broken = [place for place, verdict in enumerate(verdicts) if verdict is False]
    if broken and may_write_again(job):
        others = [_choice(place, exchange) for place in broken]
        with contextlib.suppress(GatewayError):  # no time, no room: the first stands
            more, again = await _generate(exchange, replace(job, n=len(broken)), others)
            usage = added(usage, more)
            for place, choice, verdict in zip(broken, others, again, strict=True):
                choices[place], verdicts[place] = choice, verdict
    if "x-gateway-unenforced" in headers:
        headers |= judged(verdicts)
    started = clock.now()
    logprobs = 0 if job.logprobs is None else usage.completion_tokens * (1 + job.logprobs)
    body = await written(lambda: orjson.dumps(writer.completion(choices, usage)), logprobs)
    job.caller.timings.add(Stage.SERIALISE, clock.now() - started)
    return body


def _choice(index: int, exchange: _Exchange) -> ChatChoiceWriter:
    has_logprobs = exchange.job.logprobs is not None
    return ChatChoiceWriter(index, has_logprobs=has_logprobs, is_legacy=exchange.writer.is_legacy)


async def _generate(
    exchange: _Exchange, job: GenerateJob, choices: Sequence[ChatChoiceWriter]
) -> tuple[Usage, list[bool | None]]:
    """Write every choice; return what that took, and which fit their schema."""
    async with (
        exchange.service.writer(exchange.spec, job.caller, exchange.asked) as batcher,
        batcher.generate(job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        usage = generation.usage
        exchange.headers.update(unread(generation) | unenforced(generation))
        async for delta in deltas:
            choices[delta.index].add(delta)
            usage = counted(usage, delta)
    return usage, [await generation.verdicts.of(index) for index in range(job.n)]


async def _events(exchange: _Exchange, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    job, writer = exchange.job, exchange.writer
    async with (
        exchange.service.writer(exchange.spec, job.caller, exchange.asked) as batcher,
        batcher.generate(job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        exchange.headers.update(unread(generation) | unenforced(generation))  # not sent yet
        yield ACCEPTED
        usage = generation.usage
        is_first = True
        async for delta in deltas:
            if is_first:  # every choice is introduced, in order, before any has text
                is_first = False
                for index in range(job.n):
                    yield frame(orjson.dumps(writer.role(index)))
            usage = counted(usage, delta)
            verdict = None
            if delta.finish_reason is not None:
                verdict = await verdict_json(generation.verdicts, delta.index)
            for chunk in writer.chunks(delta, verdict):
                yield frame(orjson.dumps(chunk))
    if with_usage:
        last = writer.usage(usage, timings_field(job.caller.timings))
        yield frame(orjson.dumps(last))
    yield DONE
