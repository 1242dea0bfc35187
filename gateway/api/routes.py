"""Which path is served by what, with and without /v1; one place for every error's JSON."""

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from gateway import metrics
from gateway.api import ops
from gateway.api.admin import Admin, Reload, parted
from gateway.api.chat import ChatCompletions
from gateway.api.completions import Completions
from gateway.api.door import Door
from gateway.api.embeddings import Embeddings
from gateway.api.limits import Bodies
from gateway.api.middleware import Context, Guard, answer, translate
from gateway.api.models import Models
from gateway.api.openapi import OpenApi
from gateway.api.rates import Rates
from gateway.api.responses import Responses
from gateway.api.service import Service
from gateway.errors import GatewayError, Overloaded
from gateway.serving.rates import KINDS, Accounts, Allowance
from gateway.serving.response_store import ResponseStore

EXPOSED = [
    *("x-request-id", "x-gateway-ignored", "x-gateway-truncated", "x-gateway-tool-format"),
    *("server-timing", "retry-after"),
    *(f"x-ratelimit-{name}-{kind}" for name in ("limit", "remaining", "reset") for kind in KINDS),
]


def serve(
    service: Service,
    response_store: ResponseStore,
    *,
    door: Door,
    bodies: Bodies,
    health: ops.Health,
    ready: ops.Ready,
    reload: Reload,
    admin_key: str | None,
    keys: list[str],
    hosts: list[str],
    origins: list[str],
    max_header_bytes: int,
    allowance: Allowance,
    lifespan: Lifespan[Starlette],
) -> ASGIApp:
    """Build the ASGI application; without an admin key, nothing is under /admin."""
    models = Models(service)
    responses = Responses(service, response_store)
    openapi = OpenApi(service, has_keys=bool(keys), has_admin=bool(admin_key))
    app = Starlette(
        routes=[
            *_both("/embeddings", Embeddings(service).answer, "POST"),
            *_both("/chat/completions", ChatCompletions(service).answer, "POST"),
            *_both("/completions", Completions(service).answer, "POST"),
            *_both("/responses", responses.answer, "POST"),
            *_both("/responses/input_tokens", responses.count, "POST"),
            *_both("/responses/{name}", responses.show, "GET"),
            *_both("/responses/{name}", responses.forget, "DELETE"),
            *_both("/responses/{name}/cancel", responses.cancel, "POST"),
            *_both("/responses/{name}/input_items", responses.items, "GET"),
            *_both("/models", models.answer, "GET"),
            *_both("/models/{name:path}", models.answer, "GET"),
            *_both("/health", health.answer, "GET"),
            *_both("/ready", ready.answer, "GET"),
            *_both("/metrics", ops.metrics, "GET"),
            *_both("/openapi.json", openapi.answer, "GET"),
            *(Admin(service, reload).routes() if admin_key else ()),
        ],
        exception_handlers={
            GatewayError: _told,
            HTTPException: _translated,
            Exception: _unforeseen,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    metered = app if allowance.is_unlimited else Rates(app, Accounts(allowance))
    guarded: ASGIApp = Guard(metered, door, keys=keys, hosts=hosts, origins=origins)
    if admin_key:
        administered = Guard(app, door, keys=[admin_key], hosts=hosts, origins=origins)
        guarded = parted(administered, guarded)
    if origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    return Context(
        guarded,
        door,
        bodies,
        max_header_bytes=max_header_bytes,
        send_timeout_s=service.rules.send_timeout_s,
    )


def _both(path: str, endpoint: Callable[..., Any], method: str) -> list[Route]:
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("/v1", "")]


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    model = request.scope["gateway.timings"].model
    if isinstance(error, Overloaded) and model is not None:
        metrics.of(metrics.REJECTED, model).inc()
    return answer(error)


async def _translated(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer(translate(error, request.method, request.url.path))


async def _unforeseen(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer; Context logs it."""
    return answer(GatewayError("The server had an error while processing your request."))
