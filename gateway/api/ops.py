"""GET /health, /ready and /metrics: what supervisors ask."""

from collections.abc import Mapping
from typing import NotRequired

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.api.replies import reply
from gateway.api.service import Service


class Health(TypedDict):
    """Whether the gateway's engine moves."""

    status: str


class Ready(TypedDict):
    """Whether requests are accepted, and each model's state, for callers who may list them."""

    status: str
    models: NotRequired[Mapping[str, str]]


async def health(service: Service, request: Request) -> Response:
    """Answer 200 while the lane's thread moves: a server whose engine is stuck, or has died, must
    not say that it is well.
    """
    status = service.health()
    body: Health = {"status": status}
    return reply(body, 200 if status == "ok" else 503)


async def ready(service: Service, request: Request) -> Response:
    """Answer 200 once what is to be preloaded is, until shutdown begins, while the lane is well.

    The models' states are for those who may list models.
    """
    status = service.readiness()
    body: Ready = {"status": status}
    if request.scope.get("gateway.is_known", False):
        body["models"] = service.models.states()
    return reply(body, 200 if status == "ready" else 503)


async def metrics(service: Service, request: Request) -> Response:
    """Answer in Prometheus' text format."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
