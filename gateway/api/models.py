"""GET /v1/models and /v1/models/{id}."""

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.replies import reply
from gateway.api.service import Service
from gateway.registry import Resolved
from gateway.serving.generation.batcher import GenerationBatcher


async def list_models(service: Service, request: Request) -> Response:
    """Answer with every id and alias; `root` names the id behind an alias."""
    return reply({"object": "list", "data": [entry(service, each) for each in service.catalog()]})


async def show(service: Service, request: Request) -> Response:
    """Answer with one model."""
    if not (name := request.path_params["name"]):
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return reply(entry(service, service.catalog().resolve(name)))


def entry(service: Service, resolved: Resolved) -> dict[str, Any]:
    """Describe a model by one of its names, with more than OpenAI's fields.

    `state` is unloaded, loading, loaded or failed (`error` says why); `bytes` is what it holds of
    the memory budget; `last_used` is a Unix time. `batching` says whether a loaded chat model's
    rows run together, and what its self-test has found. They are null where unknown.
    """
    spec = resolved.spec
    status = service.models.status(spec)
    return {
        "id": resolved.name,
        "object": "model",
        "created": service.started,
        "owned_by": "mlx-gateway",
        "root": spec.id,
        "kind": spec.kind,
        "state": status.state,
        "bytes": status.nbytes,
        "last_used": status.last_used,
        "error": status.failure,
        "batching": _batching(service.models.model(spec)),
    }


def _batching(batcher: object) -> dict[str, Any] | None:
    """Tell how a chat model that is loaded runs its answers, and why."""
    if not isinstance(batcher, GenerationBatcher):
        return None
    verdict = batcher.verdict
    if verdict is None:
        outcome = "off"
    elif verdict.problem:
        outcome = "failed"
    else:
        outcome = "passed" if verdict.is_whole else "unfinished"
    return {
        "rows": "together" if batcher.is_batched else "one at a time",
        "self_test": outcome,
        "problem": (verdict.problem or None) if verdict is not None else None,
    }
