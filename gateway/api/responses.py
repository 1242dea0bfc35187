"""/v1/responses: answers that are kept for a while, so that a client may go on from them."""

import contextlib
import secrets
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
from gateway.api.requests import Service, noted, reply
from gateway.api.streams import ACCEPTED, EventStream, frame, while_connected
from gateway.errors import BadRequest, GatewayError, ResponseNotFound, shorten
from gateway.jobs import Caller, Delta, GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.serving.response_store import StoredItem, StoredResponse
from gateway.wire import responses as wire
from gateway.wire import responses_items
from gateway.wire.generation import read_tier
from gateway.wire.responses_items import Item
from gateway.wire.responses_stream import ResponseEvent, ResponseWriter
from gateway.wire.responses_tools import unpack
from gateway.wire.validation import Parsed

log = logs.get("responses")

MOST_JSON_BYTES = 6  # that one character takes, escaped


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request as understood: its job, the answer to be written, and, where that is to be kept,
    the conversation it answers.
    """

    service: Service
    asked: wire.ResponsesRequest
    spec: ChatSpec
    job: GenerateJob
    writer: ResponseWriter
    context: Sequence[StoredItem] | None


async def answer(service: Service, request: Request) -> ASGIApp:
    """Answer a conversation: whole or as a stream, from the same events."""
    read, exchange = await _read(service, request)
    headers = noted(read.ignored)
    if not read.request.stream:
        body = await while_connected(request.receive, _whole(exchange, headers))
        return Response(body, media_type="application/json", headers=headers)
    writer = exchange.writer
    stream = EventStream(
        _framed(exchange, headers),
        headers,
        request.receive,
        write_error=lambda error: b"".join(map(named, [*writer.begin(), *writer.fail(error)])),
    )
    return await stream.primed(service.rules.stream_open_after_s)


async def count_tokens(service: Service, request: Request) -> Response:
    """Answer how many tokens a request's prompt has, without running it."""
    read, exchange = await _read(service, request)
    tokens = await while_connected(request.receive, _counted(exchange))
    body: wire.InputTokens = {"object": "response.input_tokens", "input_tokens": tokens}
    return reply(body, headers=noted(read.ignored))


async def show(service: Service, request: Request) -> Response:
    """Answer with a kept response."""
    if request.query_params.get("stream", "false") == "true":
        raise BadRequest(
            "A response that has ended is not streamed again: leave 'stream' out.",
            param="stream",
        )
    return Response(_kept(service, request).body, media_type="application/json")


async def delete(service: Service, request: Request) -> Response:
    """Forget a kept response."""
    kept = _kept(service, request)
    service.responses.delete(_owner(request), kept.id)
    body: wire.DeletedResponse = {"id": kept.id, "object": "response", "deleted": True}
    return reply(body)


async def list_items(service: Service, request: Request) -> Response:
    """Answer with a page of the conversation that a kept response answers."""
    context = [(item.id, item.body) for item in _kept(service, request).context]
    return reply(responses_items.page(context, request.query_params))


async def cancel(service: Service, request: Request) -> Response:
    """Refuse: what is kept has ended, and what has not ends when its client leaves."""
    _kept(service, request)
    raise BadRequest(
        "Only responses created with 'background' can be cancelled, and this gateway has none.",
        param="response_id",
    )


def _kept(service: Service, request: Request) -> StoredResponse:
    return _find(service, _owner(request), request.path_params["name"], "response_id")


def _find(service: Service, owner: str | None, response_id: str, param: str) -> StoredResponse:
    """Find a response of an owner's; another's is as good as none."""
    if (kept := service.responses.find(owner, response_id)) is not None:
        return kept
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
        lambda asked: _exchange(service, asked, request),
        is_large=lambda asked: asked.has_references,
    )


def _exchange(service: Service, asked: wire.ResponsesRequest, request: Request) -> _Exchange:
    resolved, spec = service.chat_spec(asked.model)
    caller = service.caller(request, read_tier(asked.service_tier))
    earlier, items = _conversation(service, asked, caller)
    job = wire.to_job(
        asked,
        caller,
        defaults(spec),
        items=[*map(responses_items.read_item, (item.body for item in earlier)), *items],
        max_tokens=spec.sampling.max_tokens,
        template_args=template_args(resolved, spec),
        max_chars=service.rules.max_input_chars,
    )
    context: Sequence[StoredItem] | None = None
    if is_kept := asked.store and service.responses.is_on:
        written = responses_items.dump_items(items, (item.id for item in earlier))
        context = (*earlier, *(StoredItem(*pair) for pair in written))
    response = wire.new_response(
        asked,
        job,
        response_id=f"resp_{secrets.token_hex(24)}",
        created=int(time.time()),
        is_kept=is_kept,
    )
    writer = ResponseWriter(response, unpack(asked.tools).qualified_names)
    return _Exchange(service, asked, spec, job, writer, context)


def _conversation(
    service: Service, asked: wire.ResponsesRequest, caller: Caller
) -> tuple[Sequence[StoredItem], Sequence[Item]]:
    """Return the items of the response that this one follows, and its own, each whole."""

    most = service.rules.max_input_chars * MOST_JSON_BYTES
    found = 0

    def find(item_id: str) -> bytes | None:
        nonlocal found
        if (item := service.responses.item(caller.key_id, item_id)) is None:
            return None
        found += len(item.body)
        if found > most:  # of one item that is meant a thousand times, say
            raise BadRequest("The items that 'input' refers to are too long.", param="input")
        return item.body

    earlier: Sequence[StoredItem] = ()
    if (name := asked.previous_response_id) is not None:
        earlier = _find(service, caller.key_id, name, "previous_response_id").items
    return earlier, responses_items.resolve_references(asked.input, find)


def _keep(exchange: _Exchange) -> None:
    if exchange.context is None:
        return
    whole = exchange.writer.to_dict()
    output = [StoredItem(item["id"], orjson.dumps(item)) for item in whole["output"]]
    response = StoredResponse(whole["id"], orjson.dumps(whole), exchange.context, output)
    if not exchange.service.responses.keep(exchange.job.caller.key_id, response):
        log.warning("response_not_kept", response=response.id, bytes=response.nbytes)


async def _counted(exchange: _Exchange) -> int:
    async with exchange.service.writer(
        exchange.spec, exchange.job.caller, exchange.asked
    ) as batcher:
        return await batcher.count_tokens(exchange.job)


async def _whole(exchange: _Exchange, headers: dict[str, str]) -> bytes:
    job, writer = exchange.job, exchange.writer
    deltas, usage = await _gathered(exchange, headers)
    if headers.get("x-gateway-schema-valid") == "false" and may_write_again(job):
        with contextlib.suppress(GatewayError):  # no time, no room: the first stands
            deltas, more = await _gathered(exchange, headers)
            usage = added(usage, more)
    writer.begin()
    for delta in deltas:
        writer.add(delta)
    writer.end(usage, int(time.time()))
    _keep(exchange)
    started = clock.now()
    body = orjson.dumps(exchange.writer.to_dict())
    exchange.job.caller.timings.add(Stage.SERIALISE, clock.now() - started)
    return body


async def _gathered(exchange: _Exchange, headers: dict[str, str]) -> tuple[list[Delta], Usage]:
    """Have the answer written once, and judged where its grammar could not hold all of it."""
    async with (
        exchange.service.writer(exchange.spec, exchange.job.caller, exchange.asked) as batcher,
        batcher.generate(exchange.job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        headers |= unread(generation) | unenforced(generation)
        exchange.writer.set_sampling(generation.sampling)
        usage, made = generation.usage, []
        async for delta in deltas:
            usage = counted(usage, delta)
            made.append(delta)
    if (verdict := await verdict_json(generation.verdicts, 0)) is not None:
        headers |= judged([verdict["schema_valid"]])
        exchange.writer.set_verdict(verdict)
    return made, usage


async def _framed(exchange: _Exchange, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    """Frame the events. A failure after the first of them is an event too."""
    has_begun = False
    try:
        async with aclosing(_events(exchange, headers)) as events:
            async for event in events:
                has_begun = has_begun or event is not None
                yield ACCEPTED if event is None else named(event)
    except GatewayError as error:
        if not has_begun:
            raise
        for event in exchange.writer.fail(error):
            yield named(event)


async def _events(
    exchange: _Exchange, headers: dict[str, str]
) -> AsyncGenerator[ResponseEvent | None, None]:
    """Give None when the request is accepted, then the events: the first of them with the
    first delta. The answer is kept before the last of them is sent.
    """
    job, writer = exchange.job, exchange.writer
    async with (
        exchange.service.writer(exchange.spec, job.caller, exchange.asked) as batcher,
        batcher.generate(job) as generation,
        aclosing(generation.deltas) as deltas,
    ):
        headers |= unread(generation) | unenforced(generation)  # not sent yet
        yield None
        writer.set_sampling(generation.sampling)
        usage = generation.usage
        is_first = True
        async for delta in deltas:
            if is_first:
                is_first = False
                for event in writer.begin():
                    yield event
            usage = counted(usage, delta)
            for event in writer.add(delta):
                yield event
    if (verdict := await verdict_json(generation.verdicts, 0)) is not None:
        writer.set_verdict(verdict)
    closing = writer.end(usage, int(time.time()))
    _keep(exchange)
    for event in closing:
        yield event


def _owner(request: Request) -> str | None:
    key_id: str | None = request.scope.get("gateway.key_id")
    return key_id


def named(event: ResponseEvent) -> bytes:
    """Write an event with its type as the frame's name."""
    return b"event: " + event["type"].encode() + b"\n" + frame(orjson.dumps(event))
