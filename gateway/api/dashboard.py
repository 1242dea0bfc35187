"""GET /dashboard and /docs: pages, their files, and a stream of samples of the gateway's state."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import TypedDict

from gateway import __version__, clock, metrics
from gateway.api.in_flight import RequestContext, context_of, count_cancelled, while_connected
from gateway.api.models import describe_model, describe_pull
from gateway.api.requests import Service, reply
from gateway.clock import Timings
from gateway.errors import RequestCancelled, RequestNotFound
from gateway.registry import Resolved

# The pages contain no data, so they need no key; samples and the OpenAPI document need a key.
PAGE, DOCS = "dashboard.html", "docs.html"
FILES = {
    PAGE: "text/html",
    DOCS: "text/html",
    "dashboard.css": "text/css",
    "chat.js": "text/javascript",
    "dashboard.js": "text/javascript",
    "docs.js": "text/javascript",
    "elements.js": "text/javascript",
    "gateway.js": "text/javascript",
    "markdown.js": "text/javascript",
    "pictures.js": "text/javascript",
    "readings.js": "text/javascript",
    "try_it.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
PATHS = frozenset({"/dashboard", "/docs", *(f"/dashboard/{name}" for name in FILES)})
PERIOD_S = 1.0
_HEADERS = {
    # The page may load only its own files, show files that the user chose, and call only this
    # gateway. Inline scripts, HTML made from strings and frames are forbidden.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_SAMPLES_HEADERS = {
    "content-type": "application/x-ndjson",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "x-accel-buffering": "no",  # stops nginx from buffering the samples
    "x-content-type-options": "nosniff",
}


async def page(service: Service, request: Request, *, name: str = PAGE) -> Response:
    name = request.path_params.get("file", name)
    if name not in FILES:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return Response(_read(name), headers=_HEADERS, media_type=FILES[name])


@cache
def _read(name: str) -> bytes:
    return (Path(__file__).with_name("static") / name).read_bytes()


async def samples(service: Service, request: Request, *, is_admin: bool) -> ASGIApp:
    """Stream a line of JSON each second until the client disconnects."""
    # The last place is kept for admins, so that other watchers cannot lock them out.
    is_reserved = is_admin or not service.exposure.has_admin

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        context_of(scope).is_watch = True
        if scope["method"] == "HEAD":
            await Response(headers=_SAMPLES_HEADERS)(scope, receive, send)
            return
        with service.watchers.place(is_reserved=is_reserved), contextlib.suppress(ClientDisconnect):
            async with while_connected(receive):
                await _send_samples(service, send, is_admin=is_admin)

    return app


async def _send_samples(service: Service, send: Send, *, is_admin: bool) -> None:
    headers = [(name.encode(), value.encode()) for name, value in _SAMPLES_HEADERS.items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await service.inputs.look()
    is_over = False
    # A sample is made after the previous one was sent, so none are buffered for a slow watcher.
    while not is_over:
        second = math.floor(clock.now() / PERIOD_S)
        is_over = service.in_flight.is_draining  # a watcher must not delay shutdown
        sample = service.watchers.sample(second, partial(_sample, service), is_admin=is_admin)
        await send({"type": "http.response.body", "body": sample, "more_body": not is_over})
        if not is_over:
            await asyncio.sleep((second + 1) * PERIOD_S - clock.now())


def _sample(service: Service, is_admin: bool) -> bytes:
    readings = metrics.snapshot()
    sample: dict[str, Any] = {
        "at": time.time(),
        "started": service.started,
        "version": __version__,
        "status": service.readiness(),
        "has_admin": service.exposure.has_admin,
        "max_image_bytes": service.rules.max_image_bytes,
        "watchers": service.watchers.count,
        "models": _models(service),
        "pulls": [describe_pull(service, pull) for pull in service.named.pulls.under_way],
        "values": readings.values,
        "histograms": readings.histograms,
    }
    if is_admin:
        requests = service.in_flight.requests.items()
        sample["requests"] = [
            _describe(number, context) for number, context in requests if not context.is_watch
        ]
        sample["errors"] = service.in_flight.errors
    return orjson.dumps(sample) + b"\n"


def _models(service: Service) -> list[dict[str, Any]]:
    return [
        {
            **describe_model(service, Resolved(spec)),
            "aliases": [alias.name for alias in spec.aliases],
        }
        for spec in service.served.catalog.specs
    ]


def _describe(number: int, context: RequestContext) -> dict[str, Any]:
    """Return a request's state without its content; its path is a template."""
    scope, timings = context.scope, context.timings
    jobs: Sequence[Timings] = (timings, *timings.parallel)
    return {
        "number": number,
        "request_id": context.request_id,
        "method": scope["method"],
        "route": scope["route"].path if "route" in scope else None,
        "key": context.key_id,
        "model": timings.model,
        "stage": next((job.stage for job in jobs if job.stage is not None), None),
        "age_s": round(clock.now() - timings.started, 3),
        "tokens_in": sum(job.tokens_in for job in jobs),
        "tokens_out": sum(job.tokens_out for job in jobs),
        "is_cancelled": context.cancellation is not None,
    }


class Cancelled(TypedDict):
    """A request that was cancelled."""

    object: Literal["request.cancelled"]
    number: int


async def cancel(service: Service, request: Request) -> Response:
    number = request.path_params["number"]
    cancelled = service.in_flight.requests.get(number)
    if cancelled is None:
        raise RequestNotFound(number)
    if cancelled.cancellation is None:
        count_cancelled(cancelled.timings)
        cancelled.cancel(RequestCancelled())
    body: Cancelled = {"object": "request.cancelled", "number": number}
    return reply(body)
