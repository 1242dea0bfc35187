"""GET /health, /ready and /metrics: what supervisors ask."""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.replies import reply
from gateway.api.service import Service


async def health(service: Service, request: Request) -> Response:
    """Answer 200 while the lane's thread moves: a server whose engine is stuck, or has died, must
    not say that it is well.
    """
    status = service.health()
    return reply({"status": status}, 200 if status == "ok" else 503)


async def ready(service: Service, request: Request) -> Response:
    """Answer 200 once what is to be preloaded is, until shutdown begins, while the lane is well.

    The models' states are for those who may list models.
    """
    status = service.readiness()
    body: dict[str, object] = {"status": status}
    if request.scope.get("gateway.is_known", False):
        body["models"] = service.models.states()
    return reply(body, 200 if status == "ready" else 503)


async def metrics(service: Service, request: Request) -> Response:
    """Answer in Prometheus' text format."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
