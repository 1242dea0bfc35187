"""POST /admin/models/{id}/load, …/unload and /admin/reload, for holders of the admin key."""

from http import HTTPStatus
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.api.models import entry
from gateway.api.replies import reply
from gateway.api.service import Service
from gateway.api.streams import while_connected


class Reload(TypedDict):
    """What another reading of models.yaml changed, by id."""

    object: Literal["reload"]
    added: list[str]
    changed: list[str]
    removed: list[str]


async def load(service: Service, request: Request) -> Response:
    """Load a model, as a request for it would, and answer with its entry.

    What failed a moment ago is tried at once.
    """
    resolved = service.catalog().resolve(request.path_params["name"])
    await service.models.load(resolved.spec)
    return reply(entry(service, resolved))


async def unload(service: Service, request: Request) -> Response:
    """Unload a model, a pinned one too: 200 when it has gone, 202 while requests still use it."""
    resolved = service.catalog().resolve(request.path_params["name"])
    is_gone = await service.models.unload(resolved.spec)
    status = HTTPStatus.OK if is_gone else HTTPStatus.ACCEPTED
    return reply(entry(service, resolved), status)


async def reload(service: Service, request: Request) -> Response:
    """Read models.yaml again, and answer with what changed; 400 names what is wrong in it."""
    changes = await while_connected(request.receive, service.reload())
    body: Reload = {
        "object": "reload",
        "added": list(changes.added),
        "changed": list(changes.changed),
        "removed": list(changes.removed),
    }
    return reply(body)
