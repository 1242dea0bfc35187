"""GET /openapi.json: every operation, with what it takes and gives from wire's shapes."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway import __version__
from gateway.api.operations import ADMIN, OPERATIONS, Operation
from gateway.api.service import Service
from gateway.errors import GatewayError
from gateway.registry import Catalog
from gateway.wire import answers
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.schemas import Schema, reference, schemas

SERVERS = [{"url": "/v1"}, {"url": "/", "description": "The same, for base URLs without /v1."}]
ROOT = [{"url": "/"}]
NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
TIMEOUT = {
    "name": "x-gateway-timeout-s",
    "in": "header",
    "description": "Seconds the answer may take, where that is less than the gateway's own limit.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
Names = Mapping[str, Sequence[str]]


class OpenApi:
    """The document, made anew when the catalog is."""

    def __init__(self, service: Service, *, has_keys: bool, has_admin: bool) -> None:
        self._service = service
        self._has_keys = has_keys
        self._has_admin = has_admin

    async def answer(self, request: Request) -> Response:
        """Answer with the document."""
        written = _written(
            self._service.catalog(),
            strict=self._service.rules.strict_fields,
            has_keys=self._has_keys,
            has_admin=self._has_admin,
        )
        return Response(written, media_type="application/json")


@lru_cache(maxsize=1)
def _written(catalog: Catalog, *, strict: bool, has_keys: bool, has_admin: bool) -> bytes:
    return orjson.dumps(document(catalog, strict=strict, has_keys=has_keys, has_admin=has_admin))


def document(catalog: Catalog, *, strict: bool, has_keys: bool, has_admin: bool) -> Schema:
    """Describe the gateway as it is set, with the catalog's models for examples."""
    names = {
        kind: [each.name for each in catalog if each.spec.kind == kind]
        for kind in ("chat", "embedding")
    }
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Schema] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _described(method, path, operation, names)
    if has_admin:
        schemes["admin_key"] = {"type": "http", "scheme": "bearer"}
        for (method, path), operation in ADMIN.items():
            described = _described(method, path, operation, names)
            paths[path] = {"servers": ROOT, method: described | {"security": [{"admin_key": []}]}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-gateway",
            "version": __version__,
            "description": "The OpenAI-compatible gateway for MLX models.",
        },
        "servers": SERVERS,
        "security": [{"key": []}] if has_keys else [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas(names, strict=strict),
            "securitySchemes": schemes,
        },
    }


def _described(method: str, path: str, operation: Operation, names: Names) -> Schema:
    words = path.replace("{name}", "one").replace(".", "/").split("/")
    described: Schema = {
        "operationId": "_".join([method, *words[1:]]),
        "summary": operation.summary,
        "responses": {**_refusals(operation.errors), **_answers(operation)},
    }
    if operation.is_open:
        described["security"] = []
    if "{name}" in path:
        described["parameters"] = [NAME]
    if operation.taken is not None:
        models = names["embedding" if operation.taken is EmbeddingsRequest else "chat"]
        example = {**({"model": models[0]} if models else {}), **operation.example}
        content = {"schema": reference(operation.taken), "example": example}
        described["parameters"] = [TIMEOUT]
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _answers(operation: Operation) -> Schema:
    content: Schema = {operation.content: {}}
    if operation.given is not None:
        content[operation.content] = {"schema": reference(operation.given)}
    if operation.events is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "x-event-schema": reference(operation.events),
        }
    return {str(status): _response(status, content) for status in operation.statuses}


def _refusals(errors: Iterable[type[GatewayError]]) -> Schema:
    envelope = {"application/json": {"schema": reference(answers.Error)}}
    return {str(int(error.status)): _response(error.status, envelope) for error in errors}


def _response(status: int, content: Schema) -> Schema:
    return {"description": HTTPStatus(status).phrase, "content": content}
