"""The ASGI application that serves the endpoints."""

from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from gateway import metrics
from gateway.api import dashboard
from gateway.api.access import protect
from gateway.api.bodies import Bodies
from gateway.api.endpoints import ENDPOINTS, METERED_PATHS, OPEN_PATHS, PATHS
from gateway.api.in_flight import InFlight
from gateway.api.middleware import ErrorResponse
from gateway.api.requests import Service
from gateway.errors import (
    GatewayError,
    MethodNotAllowed,
    Overloaded,
    UnknownUrl,
    shorten,
)
from gateway.serving.admission import Allowance

if TYPE_CHECKING:
    from gateway.api.traces import Tracer


def create_app(
    service: Service,
    *,
    in_flight: InFlight,
    bodies: Bodies,
    admin_key: str | None,
    keys: list[str],
    hosts: list[str],
    origins: list[str],
    max_header_bytes: int,
    allowance: Allowance,
    tracer: "Tracer | None",
    lifespan: Lifespan[Starlette],
) -> ASGIApp:
    """Return the ASGI application; without an admin key, it has nothing under /admin."""
    router = Starlette(
        routes=[
            Route(path, partial(endpoint.handler, service), methods=[endpoint.method])
            for endpoint in ENDPOINTS
            if endpoint.is_served(has_admin=bool(admin_key), has_dashboard=service.has_dashboard)
            for path in endpoint.paths
        ],
        exception_handlers={
            GatewayError: _answer_error,
            HTTPException: _answer_http_exception,
            Exception: _answer_exception,
        },
        lifespan=lifespan,
    )
    router.router.redirect_slashes = False
    # A browser that opens the page can send no key. Without keys the page has its host checked.
    open_paths = OPEN_PATHS | dashboard.PATHS if keys else OPEN_PATHS
    return protect(
        router,
        in_flight,
        bodies,
        admin_key=admin_key,
        keys=keys,
        hosts=hosts,
        origins=origins,
        open_paths=open_paths,
        metered_paths=METERED_PATHS,
        allowance=allowance,
        max_header_bytes=max_header_bytes,
        send_timeout_s=service.rules.send_timeout_s,
        tracer=tracer,
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    model = request.scope["gateway.timings"].model
    if error.status == Overloaded.status and model is not None:
        metrics.of(metrics.REJECTED, model).inc()
    return ErrorResponse(error, request.scope)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors, such as an unknown path, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    refusal = GatewayError(error.detail)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = (error.headers or {}).get("Allow", "")
        refusal = MethodNotAllowed(f"Not allowed to {method} on {shorten(path)}.", allow)
    elif error.status_code == HTTPStatus.NOT_FOUND:
        refusal = UnknownUrl(f"Invalid URL ({method} {shorten(path)}){_hint(path)}")
    return ErrorResponse(refusal, request.scope)


def _hint(path: str) -> str:
    """Return a hint if a path without extra slashes or /v1 is an endpoint, or one of batches."""
    steps = [step for step in path.split("/") if step]
    while steps[:2] == ["v1", "v1"]:
        del steps[0]
    nearest = "/" + "/".join(steps)
    if nearest.removeprefix("/v1").startswith(("/batches", "/messages/batches")):
        return ". Batches are not served: send each of their requests by itself."
    is_known = nearest.removeprefix("/v1") in PATHS
    if is_known and nearest != path:
        return f". Did you mean {nearest}?"
    return ""


async def _answer_exception(request: Request, error: Exception) -> Response:
    """Answer 500. Starlette raises the error again after it; Context logs it."""
    if isinstance(error, ClientDisconnect):
        return _NoAnswer()
    failure = GatewayError("The server had an error while processing your request.")
    return ErrorResponse(failure, request.scope)


class _NoAnswer(Response):
    """What a client that has left gets. One that only shuts its sending side looks the same, until
    it is written to: its connection is closed, and says no other status than the log's.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass
