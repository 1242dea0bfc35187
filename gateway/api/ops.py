"""GET /health, /ready and /metrics: what supervisors ask."""

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.replies import reply


class Health:
    """200 while the lane's thread moves: a server whose engine is stuck or has died must not say
    that it is well.
    """

    def __init__(self, status: Callable[[], str]) -> None:
        self._status = status

    async def answer(self, request: Request) -> Response:
        """Answer at once, from the event loop alone."""
        status = self._status()
        return reply({"status": status}, 200 if status == "ok" else 503)


class Ready:
    """200 once what is to be preloaded is, until shutdown begins, while the lane is well."""

    def __init__(self, status: Callable[[], str], states: Callable[[], dict[str, str]]) -> None:
        self._status = status
        self._states = states

    async def answer(self, request: Request) -> Response:
        """Answer with the status, and with the models' states to those who may list models."""
        status = self._status()
        body: dict[str, object] = {"status": status}
        if request.scope.get("gateway.is_known", False):
            body["models"] = self._states()
        return reply(body, 200 if status == "ready" else 503)


async def metrics(request: Request) -> Response:
    """Answer in Prometheus' text format."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
