"""/v1/messages: Anthropic's Messages API, on the same models as chat completions."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

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
    verdict_json,
)
from gateway.api.requests import Service, ignored_header, reply
from gateway.api.streams import ACCEPTED, EventStream, frame, while_connected
from gateway.errors import GatewayError
from gateway.jobs import GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.serving.generation.answer_checks import AnswerChecker, Fit
from gateway.serving.generation.batcher import Generation
from gateway.wire import anthropic as wire
from gateway.wire.anthropic_errors import AnthropicErrorBody, error_body
from gateway.wire.anthropic_stream import PING, MessageEvent, MessageWriter
from gateway.wire.validation import Parsed

R = TypeVar("R", bound=wire.CountMessageTokensRequest)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request with its job, and the headers of its answer."""

    service: Service
    request: wire.MessagesRequest
    spec: ChatSpec
    job: GenerateJob
    headers: dict[str, str]

    def writer(self) -> MessageWriter:
        """Return a writer of an answer."""
        request = self.request
        return MessageWriter(
            request.model, max_tokens=request.max_tokens, thoughts=request.thoughts
        )

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[Generation]:
        """Begin the answer, and set the headers that are known by then."""
        async with (
            self.service.lease_chat(self.spec, self.job.caller, self.request) as batcher,
            batcher.generate(self.job) as generation,
            contextlib.aclosing(generation.deltas),
        ):
            self.headers.update(answer_headers(generation))
            yield generation


async def answer(service: Service, request: Request) -> ASGIApp:
    """Answer a Messages request, whole or as a stream."""
    parsed, (spec, job) = await _read(service, request, wire.MessagesRequest)
    headers = ignored_header(parsed.ignored)
    exchange = _Exchange(service, parsed.request, spec, job, headers)
    if not parsed.request.stream:
        body = await while_connected(request.receive, _answer_whole(exchange))
        return Response(body, media_type="application/json", headers=headers)
    stream = EventStream(
        _events(exchange),
        headers,
        request,
        write_error=lambda error: frame_event(error_body(error, job.caller.request_id)),
        keep_alive=frame_event(PING),
    )
    return await stream.prime(service.rules.stream_open_after_s)


async def count_tokens(service: Service, request: Request) -> Response:
    """Answer with the number of tokens of a request's prompt."""
    parsed, (spec, job) = await _read(service, request, wire.CountMessageTokensRequest)

    async def count() -> int:
        async with service.lease_chat(spec, job.caller, parsed.request) as batcher:
            return await batcher.count_tokens(job)

    tokens = await while_connected(request.receive, count())
    body: wire.MessageTokensCount = {"input_tokens": tokens}
    return reply(body, headers=ignored_header(parsed.ignored))


async def _read(
    service: Service, request: Request, shape: type[R]
) -> tuple[Parsed[R], tuple[ChatSpec, GenerateJob]]:
    def translate(wire_request: R) -> tuple[ChatSpec, GenerateJob]:
        resolved, spec = service.chat_spec(wire_request.model, "messages")
        return spec, wire.to_job(
            wire_request,
            service.caller(request),
            default_sampling(spec),
            template_args=template_args(resolved, spec),
            max_chars=service.rules.max_input_chars,
        )

    return await service.read(request, shape, translate)


async def _answer_whole(exchange: _Exchange) -> bytes:
    job, headers = exchange.job, exchange.headers
    writer, usage, checker, fit = await _generate(exchange)
    if is_violated(fit) and can_retry(job):
        with contextlib.suppress(GatewayError):  # no time or no room: keep the first answer
            writer, more, checker, fit = await _generate(exchange)
            usage = add_usage(usage, more)
    require_fit(fit)
    headers |= schema_valid_header(checker.unenforced, [fit])
    if (verdict := verdict_json(checker, fit)) is not None:
        writer.set_verdict(verdict)
    started = clock.now()
    body = orjson.dumps(writer.to_dict(usage))
    job.caller.timings.add(Stage.SERIALISE, started)
    return body


async def _generate(
    exchange: _Exchange,
) -> tuple[MessageWriter, Usage, AnswerChecker, Fit | None]:
    """Generate the answer once, and check it."""
    writer = exchange.writer()
    async with exchange.generating() as generation:
        usage = generation.usage
        async for delta in generation.deltas:
            usage = count_delta(usage, delta)
            writer.add(delta)
    writer.end(usage)
    return writer, usage, generation.checker, await generation.checker.check(0)


async def _events(exchange: _Exchange) -> AsyncGenerator[bytes, None]:
    """Yield the events as frames, the first of them when the first delta has come: only then is it
    known how much of the prompt was in the cache.
    """
    writer = exchange.writer()
    async with exchange.generating() as generation:
        yield ACCEPTED
        usage = generation.usage
        is_first = True
        async for delta in generation.deltas:
            usage = count_delta(usage, delta)
            events = writer.begin(usage) if is_first else []
            is_first = False
            for event in (*events, *writer.add(delta)):
                yield frame_event(event)
    if (verdict := await last_verdict(generation.checker, 0)) is not None:
        writer.set_verdict(verdict)
    for event in writer.end(usage):
        yield frame_event(event)


def frame_event(event: MessageEvent | AnthropicErrorBody) -> bytes:
    """Return an event as a frame with the event's type as its name."""
    return b"event: " + event["type"].encode() + b"\n" + frame(orjson.dumps(event))
