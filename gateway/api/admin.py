"""POST /admin/models/{id}/load, …/unload and /admin/reload, for who holds the admin key."""

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.models import Models
from gateway.api.replies import reply
from gateway.api.service import Service
from gateway.api.streams import while_connected
from gateway.registry import Changes

_PATH = "/admin/"
Reload = Callable[[], Coroutine[Any, Any, Changes]]


class Admin:
    """What may be done to the models from outside."""

    def __init__(self, service: Service, reload: Reload) -> None:
        self._service = service
        self._models = Models(service)
        self._reload = reload

    def routes(self) -> list[Route]:
        """List the paths; an id may have slashes."""
        return [
            Route(f"{_PATH}models/{{name:path}}/load", self.load, methods=["POST"]),
            Route(f"{_PATH}models/{{name:path}}/unload", self.unload, methods=["POST"]),
            Route(f"{_PATH}reload", self.reload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Load a model, as a request for it would, and answer with its entry.

        What failed a moment ago is tried at once.
        """
        resolved = self._service.catalog().resolve(request.path_params["name"])
        await self._service.models.load(resolved.spec)
        return reply(self._models.entry(resolved))

    async def unload(self, request: Request) -> Response:
        """Let a model go, a pinned one too: 200 when it has, 202 while requests still use it."""
        resolved = self._service.catalog().resolve(request.path_params["name"])
        is_gone = await self._service.models.unload(resolved.spec)
        status = HTTPStatus.OK if is_gone else HTTPStatus.ACCEPTED
        return reply(self._models.entry(resolved), status)

    async def reload(self, request: Request) -> Response:
        """Read models.yaml again, and answer with what changed; 400 names what is wrong in it."""
        changes = await while_connected(request.receive, self._reload())
        return reply({"object": "reload", **changes.by_kind()})


def parted(admin: ASGIApp, others: ASGIApp) -> ASGIApp:
    """Have one app serve what is under /admin/, and the other everything else."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_admin = scope["type"] == "http" and scope["path"].startswith(_PATH)
        await (admin if is_admin else others)(scope, receive, send)

    return app
