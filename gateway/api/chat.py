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
    add_usage,
    answer_headers,
    can_retry,
    count_delta,
    default_sampling,
    is_violated,
    last_verdict,
    require_fit,
    schema_valid_header,
    template_args,
)
from gateway.api.middleware import timings_field
from gateway.api.requests import Service, ignored_header, serialise
from gateway.api.streams import ACCEPTED, DONE, EventStream, frame, while_connected
from gateway.errors import GatewayError
from gateway.jobs import GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.serving.generation.answer_checks import Fit
from gateway.wire import chat as wire
from gateway.wire.chat import ChatChoiceWriter, ChatCompletionWriter
from gateway.wire.generation import read_tier


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request with its job, and the writer and headers of its answer."""

    service: Service
    request: wire.ChatRequest
    spec: ChatSpec
    job: GenerateJob
    writer: ChatCompletionWriter
    headers: dict[str, str]


async def answer(service: Service, request: Request) -> ASGIApp:
    """Answer a chat completion request, whole or as a stream."""
    rules = service.rules

    def translate(wire_request: wire.ChatRequest) -> tuple[ChatSpec, GenerateJob]:
        resolved, spec = service.chat_spec(wire_request.model)
        return spec, wire.to_job(
            wire_request,
            service.caller(request, read_tier(wire_request.service_tier)),
            default_sampling(spec),
            max_tokens=spec.sampling.max_tokens,
            template_args=template_args(resolved, spec),
            max_chars=rules.max_input_chars,
            schema_in_prompt=spec.structured.schema_in_prompt,
        )

    parsed, (spec, job) = await service.read(request, wire.ChatRequest, translate)
    wire_request = parsed.request
    writer = ChatCompletionWriter(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=wire_request.model,
        fingerprint=service.fingerprint(spec),
        is_legacy=wire_request.is_legacy,
    )
    headers = ignored_header(parsed.ignored)
    exchange = _Exchange(service, wire_request, spec, job, writer, headers)
    if not wire_request.stream:
        body = await while_connected(request.receive, _answer_whole(exchange))
        return Response(body, media_type="application/json", headers=headers)
    events = _events(exchange, with_usage=wire_request.stream_options.include_usage)
    stream = EventStream(events, headers, request)
    return await stream.prime(rules.stream_open_after_s)


async def _answer_whole(exchange: _Exchange) -> bytes:
    job, writer, headers = exchange.job, exchange.writer, exchange.headers
    choices = [_choice(index, exchange) for index in range(job.n)]
    usage, fits, unenforced = await _generate(exchange, job, choices)
    invalid = [index for index, fit in enumerate(fits) if is_violated(fit)]
    if invalid and can_retry(job):
        retries = [_choice(index, exchange) for index in invalid]
        with contextlib.suppress(GatewayError):  # no time or no room: keep the first answers
            retry_usage, retry_fits, _ = await _generate(
                exchange, replace(job, n=len(invalid)), retries
            )
            usage = add_usage(usage, retry_usage)
            for index, choice, fit in zip(invalid, retries, retry_fits, strict=True):
                choices[index], fits[index] = choice, fit
    require_fit(*fits)
    headers |= schema_valid_header(unenforced, fits)
    started = clock.now()
    logprobs = 0 if job.logprobs is None else usage.completion_tokens * (1 + job.logprobs)
    body = await serialise(lambda: orjson.dumps(writer.completion(choices, usage)), logprobs)
    job.caller.timings.add(Stage.SERIALISE, started)
    return body


def _choice(index: int, exchange: _Exchange) -> ChatChoiceWriter:
    has_logprobs = exchange.job.logprobs is not None
    return ChatChoiceWriter(index, has_logprobs=has_logprobs, is_legacy=exchange.writer.is_legacy)


async def _generate(
    exchange: _Exchange, job: GenerateJob, choices: Sequence[ChatChoiceWriter]
) -> tuple[Usage, list[Fit | None], Sequence[str]]:
    """Generate every choice; return the usage, of each choice whether it fits its schema, and what
    of that no grammar enforced.
    """
    async with (
        exchange.service.lease_chat(exchange.spec, job.caller, exchange.request) as batcher,
        batcher.generate(job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        usage = generation.usage
        exchange.headers.update(answer_headers(generation))
        async for delta in deltas:
            choices[delta.index].add(delta)
            usage = count_delta(usage, delta)
    checker = generation.checker
    fits = [await checker.check(index) for index in range(job.n)]
    return usage, fits, checker.unenforced


async def _events(exchange: _Exchange, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    job, writer = exchange.job, exchange.writer
    async with (
        exchange.service.lease_chat(exchange.spec, job.caller, exchange.request) as batcher,
        batcher.generate(job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        exchange.headers.update(answer_headers(generation))  # before they are sent
        yield ACCEPTED
        usage = generation.usage
        is_first = True
        async for delta in deltas:
            if is_first:  # the role of every choice, in order, before any text
                is_first = False
                for index in range(job.n):
                    yield frame(orjson.dumps(writer.role(index)))
            usage = count_delta(usage, delta)
            verdict = None
            if delta.finish_reason is not None:
                verdict = await last_verdict(generation.checker, delta.index)
            for chunk in writer.chunks(delta, verdict):
                yield frame(orjson.dumps(chunk))
    if with_usage:
        last = writer.usage(usage, timings_field(job.caller.timings))
        yield frame(orjson.dumps(last))
    yield DONE
