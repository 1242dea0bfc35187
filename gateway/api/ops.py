"""GET /health, /ready and /metrics: what supervisors ask."""

from collections.abc import Callable

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response


class Health:
    """200 while the lane's thread lives: a server whose engine has died must not say it is well."""

    def __init__(self, is_alive: Callable[[], bool]) -> None:
        self._is_alive = is_alive

    async def answer(self, request: Request) -> Response:
        """Answer at once, from the event loop alone."""
        alive = self._is_alive()
        return _json({"status": "ok" if alive else "dead"}, 200 if alive else 503)


class Ready:
    """200 once what is to be preloaded is, until shutdown begins."""

    def __init__(self, status: Callable[[], str], states: Callable[[], dict[str, str]]) -> None:
        self._status = status
        self._states = states

    async def answer(self, request: Request) -> Response:
        """Answer with the models' states."""
        status = self._status()
        body = {"status": status, "models": self._states()}
        return _json(body, 200 if status == "ready" else 503)


async def metrics(request: Request) -> Response:
    """Answer in Prometheus' text format."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _json(value: object, status: int) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
