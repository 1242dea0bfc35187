"""/v1/responses: answers that are stored for a while, so that a client can continue from them."""

import time
from collections.abc import Sequence
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import logs
from gateway.api.exchange import (
    Exchange,
    default_sampling,
    read_exchange,
    template_args,
    thinking_budgets,
    without_images,
)
from gateway.api.in_flight import context_of
from gateway.api.requests import Service, reply
from gateway.errors import BadRequest, ResponseNotFound, shorten
from gateway.ids import new_id
from gateway.jobs import Caller
from gateway.serving.response_store import StoredImage, StoredItem, StoredResponse
from gateway.wire import responses as wire
from gateway.wire import responses_items
from gateway.wire.generation import read_tier
from gateway.wire.responses_items import AnyItem, DumpedItem
from gateway.wire.responses_stream import ResponseWriter
from gateway.wire.tools import unpack

log = logs.get("responses")

MAX_JSON_BYTES = 6  # the longest JSON escape of one character


async def answer(service: Service, request: Request) -> ASGIApp:
    exchange = await _read(service, request)
    return await exchange.respond(request)


async def count_tokens(service: Service, request: Request) -> Response:
    exchange = await _read(service, request)
    tokens = await exchange.count_tokens(request)
    body: wire.InputTokens = {"object": "response.input_tokens", "input_tokens": tokens}
    return reply(body, headers=exchange.headers)


async def show(service: Service, request: Request) -> Response:
    if request.query_params.get("stream", "false") == "true":
        raise BadRequest(
            "A response that has ended is not streamed again: leave 'stream' out.",
            param="stream",
        )
    return Response(_find_stored(service, request).body, media_type="application/json")


async def delete(service: Service, request: Request) -> Response:
    stored = _find_stored(service, request)
    service.responses.delete(context_of(request).key_id, stored.id)
    body: wire.DeletedResponse = {"id": stored.id, "object": "response", "deleted": True}
    return reply(body)


async def list_items(service: Service, request: Request) -> Response:
    context = [
        DumpedItem(item.id, item.body, [image.text for image in item.images])
        for item in _find_stored(service, request).context
    ]
    return reply(responses_items.page(context, request.query_params))


async def cancel(service: Service, request: Request) -> Response:
    """Refuse, since no response is made in the background."""
    _find_stored(service, request)
    raise BadRequest(
        "Only responses created with 'background' can be cancelled, and this gateway has none.",
        param="response_id",
    )


def _find_stored(service: Service, request: Request) -> StoredResponse:
    owner = context_of(request).key_id
    return _find(service, owner, request.path_params["name"], "response_id")


def _find(service: Service, owner: str | None, response_id: str, param: str) -> StoredResponse:
    stored = service.responses.find(owner, response_id)
    if stored is not None:
        return stored
    raise ResponseNotFound(
        f"Response with id '{shorten(response_id)}' not found.",
        param=param,
        code="previous_response_not_found" if param == "previous_response_id" else None,
    )


async def _read(service: Service, request: Request) -> Exchange:
    return await read_exchange(
        service,
        request,
        wire.ResponsesRequest,
        partial(_exchange, service, request),
        is_large=lambda wire_request: wire_request.has_references,
    )


def _exchange(service: Service, request: Request, wire_request: wire.ResponsesRequest) -> Exchange:
    resolved, spec = service.chat_spec(wire_request.model)
    caller = service.caller(request, read_tier(wire_request.service_tier))
    earlier, items = _conversation(service, wire_request, caller)
    whole = [*map(_read_item, earlier), *items]
    seen, headers = without_images(service, request, spec, whole)
    job = wire.to_job(
        wire_request,
        caller,
        default_sampling(spec),
        items=seen,
        max_tokens=spec.sampling.max_tokens,
        template_args=template_args(resolved, spec),
        max_chars=service.rules.max_input_chars,
        budgets=thinking_budgets(spec),
        images=service.image_reader(spec),
    )
    is_kept = wire_request.store and service.responses.is_on
    response = wire.new_response(
        wire_request,
        job,
        response_id=new_id("resp", 24),
        created=int(time.time()),
        is_kept=is_kept,
    )
    writer = ResponseWriter(response, unpack(wire_request.tools).qualified_names)
    context: list[StoredItem] = []
    if is_kept:
        new_items = responses_items.dump_items(items, (item.id for item in earlier))
        # Many references may name one image, so it is stored once.
        texts = {id(text): text for item in new_items for text in item.images}
        images = {key: StoredImage.of(text) for key, text in texts.items()}
        context = [
            *earlier,
            *(
                StoredItem(item.id, item.body, [images[id(text)] for text in item.images])
                for item in new_items
            ),
        ]

    def keep() -> None:
        if is_kept:
            _store(service, caller, writer, context)

    return Exchange(
        service=service,
        request=wire_request,
        spec=spec,
        jobs=[job],
        writer=writer,
        is_streamed=wire_request.stream,
        keep=keep,
        headers=headers,
    )


def _conversation(
    service: Service, wire_request: wire.ResponsesRequest, caller: Caller
) -> tuple[Sequence[StoredItem], Sequence[AnyItem]]:
    max_bytes = service.rules.max_input_chars * MAX_JSON_BYTES
    nbytes = 0

    # References to one item may repeat, so a small body could stand for gigabytes.
    def find(item_id: str) -> AnyItem | None:
        nonlocal nbytes
        item = service.responses.item(caller.key_id, item_id)
        if item is None:
            return None
        nbytes += len(item.body)
        if nbytes > max_bytes:
            raise BadRequest("The items that 'input' refers to are too long.", param="input")
        return _read_item(item)

    earlier: Sequence[StoredItem] = ()
    name = wire_request.previous_response_id
    if name is not None:
        earlier = _find(service, caller.key_id, name, "previous_response_id").items
    return earlier, responses_items.resolve_references(wire_request.input, find)


def _read_item(item: StoredItem) -> AnyItem:
    return responses_items.read_item(item.body, [image.text for image in item.images])


def _store(
    service: Service, caller: Caller, writer: ResponseWriter, context: Sequence[StoredItem]
) -> None:
    whole = writer.to_dict()
    output = [StoredItem(item["id"], orjson.dumps(item)) for item in whole["output"]]
    response = StoredResponse(whole["id"], orjson.dumps(whole), context, output)
    if not service.responses.keep(caller.key_id, response):
        log.warning("response_not_kept", response=response.id, bytes=response.nbytes)
