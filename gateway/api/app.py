"""The ASGI application that serves the endpoints."""

import contextlib
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import dashboard
from gateway.api.access import ADMIN, AccessRules, protect
from gateway.api.bodies import Bodies
from gateway.api.endpoints import ENDPOINTS
from gateway.api.in_flight import InFlight, context_of
from gateway.api.paths import METERED_PATHS, OPEN_PATHS, PATHS, UNSERVED
from gateway.api.requests import Service
from gateway.errors import GatewayError, MethodNotAllowed, UnknownUrl, shorten

if TYPE_CHECKING:
    from gateway.api.traces import Tracer


def create_app(
    service: Service,
    rules: AccessRules,
    *,
    in_flight: InFlight,
    bodies: Bodies,
    tracer: "Tracer | None",
    lifespan: Callable[[], contextlib.AbstractAsyncContextManager[None]],
) -> ASGIApp:
    exposure = service.exposure._replace(has_admin=True)  # `route` hides /admin
    router = Router(
        [
            Route(path, partial(endpoint.handler, service), methods=[endpoint.method])
            for endpoint in ENDPOINTS
            if endpoint.is_served(exposure)
            for path in endpoint.paths
        ],
        redirect_slashes=False,
        lifespan=lambda _: lifespan(),
    )

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        # With an `app` in the scope, Starlette's router raises an error for an unknown route
        # instead of answering.
        scope["app"] = router
        try:
            is_admin = scope["type"] == "http" and scope["path"].startswith(ADMIN)
            if is_admin and not context_of(scope).is_admin:
                raise HTTPException(HTTPStatus.NOT_FOUND)
            await router(scope, receive, send)
        except HTTPException as error:
            raise _refusal(error, scope["method"], scope["path"]) from None

    # A browser that opens the dashboard cannot send a key, so the page needs none.
    open_paths = OPEN_PATHS | dashboard.PATHS if rules.keys else OPEN_PATHS
    return protect(
        route,
        rules,
        in_flight,
        bodies,
        open_paths=open_paths,
        metered_paths=METERED_PATHS,
        tracer=tracer,
    )


def _refusal(error: HTTPException, method: str, path: str) -> GatewayError:
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"Not allowed to {method} on {shorten(path)}.", allow)
    return UnknownUrl(f"Invalid URL ({method} {shorten(path)}){_hint(path)}")


def _hint(path: str) -> str:
    steps = [step for step in path.split("/") if step]
    while steps[:2] == ["v1", "v1"]:
        del steps[0]
    nearest = "/" + "/".join(steps)
    bare_steps = steps[1:] if steps[:1] == ["v1"] else steps
    if bare_steps[:1] == ["batches"] or bare_steps[:2] == ["messages", "batches"]:
        return ". Batches are not served: send each of their requests by itself."
    if not UNSERVED.isdisjoint(bare_steps[:1]):
        return f". `/{bare_steps[0]}` is not served here; /openapi.json lists the paths that are."
    is_known = nearest.removeprefix("/v1") in PATHS
    return f". Did you mean {nearest}?" if is_known and nearest != path else ""
