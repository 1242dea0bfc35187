"""/v1/responses: answers that are stored for a while, so that a client can continue from them."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import clock, logs
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
from gateway.errors import BadRequest, GatewayError, ResponseNotFound, shorten
from gateway.ids import new_id
from gateway.jobs import Caller, Delta, GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.serving.generation.answer_checks import AnswerChecker, Fit
from gateway.serving.response_store import StoredItem, StoredResponse
from gateway.wire import responses as wire
from gateway.wire import responses_items
from gateway.wire.generation import read_tier
from gateway.wire.responses_items import Item
from gateway.wire.responses_stream import ResponseEvent, ResponseWriter
from gateway.wire.responses_tools import unpack
from gateway.wire.validation import Parsed

log = logs.get("responses")

MAX_JSON_BYTES = 6  # of one character, escaped


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request with its job and the writer of its answer.

    `context` is the conversation to store with the answer, None if that is not stored.
    """

    service: Service
    request: wire.ResponsesRequest
    spec: ChatSpec
    job: GenerateJob
    writer: ResponseWriter
    context: Sequence[StoredItem] | None


async def answer(service: Service, request: Request) -> ASGIApp:
    """Answer a Responses request, whole or as a stream."""
    parsed, exchange = await _read(service, request)
    headers = ignored_header(parsed.ignored)
    if not parsed.request.stream:
        body = await while_connected(request.receive, _answer_whole(exchange, headers))
        return Response(body, media_type="application/json", headers=headers)
    writer = exchange.writer
    stream = EventStream(
        _frames(exchange, headers),
        headers,
        request,
        write_error=lambda error: b"".join(
            map(frame_event, [*writer.begin(), *writer.fail(error)])
        ),
    )
    return await stream.prime(service.rules.stream_open_after_s)


async def count_tokens(service: Service, request: Request) -> Response:
    """Answer with the number of tokens of a request's prompt."""
    parsed, exchange = await _read(service, request)
    tokens = await while_connected(request.receive, _count_tokens(exchange))
    body: wire.InputTokens = {"object": "response.input_tokens", "input_tokens": tokens}
    return reply(body, headers=ignored_header(parsed.ignored))


async def show(service: Service, request: Request) -> Response:
    if request.query_params.get("stream", "false") == "true":
        raise BadRequest(
            "A response that has ended is not streamed again: leave 'stream' out.",
            param="stream",
        )
    return Response(_find_stored(service, request).body, media_type="application/json")


async def delete(service: Service, request: Request) -> Response:
    stored = _find_stored(service, request)
    service.responses.delete(_owner(request), stored.id)
    body: wire.DeletedResponse = {"id": stored.id, "object": "response", "deleted": True}
    return reply(body)


async def list_items(service: Service, request: Request) -> Response:
    """Answer with a page of the conversation that a stored response answers."""
    context = [(item.id, item.body) for item in _find_stored(service, request).context]
    return reply(responses_items.page(context, request.query_params))


async def cancel(service: Service, request: Request) -> Response:
    """Refuse: stored responses have ended, and others end when their client disconnects."""
    _find_stored(service, request)
    raise BadRequest(
        "Only responses created with 'background' can be cancelled, and this gateway has none.",
        param="response_id",
    )


def _find_stored(service: Service, request: Request) -> StoredResponse:
    return _find(service, _owner(request), request.path_params["name"], "response_id")


def _find(service: Service, owner: str | None, response_id: str, param: str) -> StoredResponse:
    """Return an owner's response. Raises ResponseNotFound, also for one of another owner."""
    if (stored := service.responses.find(owner, response_id)) is not None:
        return stored
    raise ResponseNotFound(
        f"Response with id '{shorten(response_id)}' not found.",
        param=param,
        code="previous_response_not_found" if param == "previous_response_id" else None,
    )


async def _read(
    service: Service, request: Request
) -> tuple[Parsed[wire.ResponsesRequest], _Exchange]:
    return await service.read(
        request,
        wire.ResponsesRequest,
        lambda wire_request: _exchange(service, wire_request, request),
        is_large=lambda wire_request: wire_request.has_references,
    )


def _exchange(service: Service, wire_request: wire.ResponsesRequest, request: Request) -> _Exchange:
    resolved, spec = service.chat_spec(wire_request.model)
    caller = service.caller(request, read_tier(wire_request.service_tier))
    earlier, items = _conversation(service, wire_request, caller)
    job = wire.to_job(
        wire_request,
        caller,
        default_sampling(spec),
        items=[*map(responses_items.read_item, (item.body for item in earlier)), *items],
        max_tokens=spec.sampling.max_tokens,
        template_args=template_args(resolved, spec),
        max_chars=service.rules.max_input_chars,
    )
    context: Sequence[StoredItem] | None = None
    if is_kept := wire_request.store and service.responses.is_on:
        new_items = responses_items.dump_items(items, (item.id for item in earlier))
        context = (*earlier, *(StoredItem(*pair) for pair in new_items))
    response = wire.new_response(
        wire_request,
        job,
        response_id=new_id("resp", 24),
        created=int(time.time()),
        is_kept=is_kept,
    )
    writer = ResponseWriter(response, unpack(wire_request.tools).qualified_names)
    return _Exchange(service, wire_request, spec, job, writer, context)


def _conversation(
    service: Service, wire_request: wire.ResponsesRequest, caller: Caller
) -> tuple[Sequence[StoredItem], Sequence[Item]]:
    """Return the items of the previous response, and the request's own, references resolved."""

    max_bytes = service.rules.max_input_chars * MAX_JSON_BYTES
    nbytes = 0

    def find(item_id: str) -> bytes | None:
        nonlocal nbytes
        if (item := service.responses.item(caller.key_id, item_id)) is None:
            return None
        nbytes += len(item.body)
        if nbytes > max_bytes:  # one item may be referred to a thousand times
            raise BadRequest("The items that 'input' refers to are too long.", param="input")
        return item.body

    earlier: Sequence[StoredItem] = ()
    if (name := wire_request.previous_response_id) is not None:
        earlier = _find(service, caller.key_id, name, "previous_response_id").items
    return earlier, responses_items.resolve_references(wire_request.input, find)


def _store(exchange: _Exchange) -> None:
    if exchange.context is None:
        return
    whole = exchange.writer.to_dict()
    output = [StoredItem(item["id"], orjson.dumps(item)) for item in whole["output"]]
    response = StoredResponse(whole["id"], orjson.dumps(whole), exchange.context, output)
    if not exchange.service.responses.keep(exchange.job.caller.key_id, response):
        log.warning("response_not_kept", response=response.id, bytes=response.nbytes)


async def _count_tokens(exchange: _Exchange) -> int:
    async with exchange.service.lease_chat(
        exchange.spec, exchange.job.caller, exchange.request
    ) as batcher:
        return await batcher.count_tokens(exchange.job)


async def _answer_whole(exchange: _Exchange, headers: dict[str, str]) -> bytes:
    job, writer = exchange.job, exchange.writer
    deltas, usage, checker, fit = await _generate(exchange, headers)
    if is_violated(fit) and can_retry(job):
        with contextlib.suppress(GatewayError):  # no time or no room: keep the first answer
            deltas, more, checker, fit = await _generate(exchange, headers)
            usage = add_usage(usage, more)
    require_fit(fit)
    headers |= schema_valid_header(checker.unenforced, [fit])
    if (verdict := verdict_json(checker, fit)) is not None:
        writer.set_verdict(verdict)
    writer.begin()
    for delta in deltas:
        writer.add(delta)
    writer.end(usage, int(time.time()))
    _store(exchange)
    started = clock.now()
    body = orjson.dumps(exchange.writer.to_dict())
    exchange.job.caller.timings.add(Stage.SERIALISE, started)
    return body


async def _generate(
    exchange: _Exchange, headers: dict[str, str]
) -> tuple[list[Delta], Usage, AnswerChecker, Fit | None]:
    """Generate the answer once, and check it."""
    async with (
        exchange.service.lease_chat(
            exchange.spec, exchange.job.caller, exchange.request
        ) as batcher,
        batcher.generate(exchange.job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        headers |= answer_headers(generation)
        exchange.writer.set_sampling(generation.sampling)
        usage, all_deltas = generation.usage, []
        async for delta in deltas:
            usage = count_delta(usage, delta)
            all_deltas.append(delta)
    return all_deltas, usage, generation.checker, await generation.checker.check(0)


async def _frames(exchange: _Exchange, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    """Yield the events as frames. An error after the first of them becomes an event."""
    has_begun = False
    try:
        async with aclosing(_events(exchange, headers)) as events:
            async for event in events:
                has_begun = has_begun or event is not None
                yield ACCEPTED if event is None else frame_event(event)
    except GatewayError as error:
        if not has_begun:
            raise
        for event in exchange.writer.fail(error):
            yield frame_event(event)


async def _events(
    exchange: _Exchange, headers: dict[str, str]
) -> AsyncGenerator[ResponseEvent | None, None]:
    """Yield None when the request is accepted, then the events, the first of them when the first
    delta has come. The answer is stored before the last event is yielded.
    """
    job, writer = exchange.job, exchange.writer
    async with (
        exchange.service.lease_chat(exchange.spec, job.caller, exchange.request) as batcher,
        batcher.generate(job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        headers |= answer_headers(generation)  # before they are sent
        yield None
        writer.set_sampling(generation.sampling)
        usage = generation.usage
        is_first = True
        async for delta in deltas:
            if is_first:
                is_first = False
                for event in writer.begin():
                    yield event
            usage = count_delta(usage, delta)
            for event in writer.add(delta):
                yield event
    if (verdict := await last_verdict(generation.checker, 0)) is not None:
        writer.set_verdict(verdict)
    end_events = writer.end(usage, int(time.time()))
    _store(exchange)
    for event in end_events:
        yield event


def _owner(request: Request) -> str | None:
    key_id: str | None = request.scope.get("gateway.key_id")
    return key_id


def frame_event(event: ResponseEvent) -> bytes:
    """Return an event as a frame with the event's type as its name."""
    return b"event: " + event["type"].encode() + b"\n" + frame(orjson.dumps(event))
