"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.middleware import unknown_url
from gateway.api.replies import reply
from gateway.api.service import Service
from gateway.registry import Resolved
from gateway.serving.generation.batcher import GenerationBatcher


class Models:
    """The list: ids and aliases; `root` names the id behind an alias."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> Response:
        """Answer with every name, or with one."""
        catalog = self._service.catalog()
        name = request.path_params.get("name")
        if name == "":
            raise unknown_url(request.method, request.url.path)
        if name is not None:
            return reply(self.entry(catalog.resolve(name)))
        return reply({"object": "list", "data": [self.entry(each) for each in catalog]})

    def entry(self, resolved: Resolved) -> dict[str, Any]:
        """Tell of one name, beyond OpenAI's fields, how its model is.

        `state` is unloaded, loading, loaded or failed (`error` says why); `bytes` is what it
        holds of the memory budget; `last_used` is a Unix time. `batching` tells whether
        a loaded chat model's rows run together, and what its self-test has found. They are
        null where unknown.
        """
        spec = resolved.spec
        status = self._service.models.status(spec)
        return {
            "id": resolved.name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "mlx-gateway",
            "root": spec.id,
            "kind": spec.kind,
            "state": status.state,
            "bytes": status.nbytes,
            "last_used": status.last_used,
            "error": status.failure,
            "batching": _batching(self._service.models.model(spec)),
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
