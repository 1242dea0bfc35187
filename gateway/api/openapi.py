"""The document of /openapi.json, made from the table of endpoints."""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from gateway import __version__
from gateway.api.endpoint import MODELS, Endpoint, is_anthropic
from gateway.errors import ErrorBody
from gateway.registry import Catalog
from gateway.wire.anthropic_stream import OVERLOADED, AnthropicErrorBody, error_status
from gateway.wire.rerank import TEXTS_ERROR_STATUSES
from gateway.wire.schemas import Schema, reference, schemas

SERVERS = [{"url": "/v1"}, {"url": "/", "description": "The same, for base URLs without /v1."}]
ROOT = [{"url": "/"}]
PATH_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
PATH_TYPES = {":number": "integer"}  # by Starlette's converter; others are texts
TIMEOUT = {
    "name": "x-gateway-timeout-s",
    "in": "header",
    "description": "Seconds the answer may take, where that is less than the gateway's own limit.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
Names = Mapping[str, Sequence[str]]


def document(
    catalog: Catalog,
    endpoints: Sequence[Endpoint],
    *,
    strict: bool,
    has_keys: bool,
    has_admin: bool,
    has_dashboard: bool,
) -> Schema:
    """Return the OpenAPI document for these settings, with the catalog's models as examples."""
    names = {
        kind: [entry.name for entry in catalog if entry.spec.kind == kind]
        for kind in ("chat", "embedding", "rerank")
    }
    names["rerank"] += names["embedding"]  # which score by cosine
    schemes = {
        "key": {"type": "http", "scheme": "bearer"},
        "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    if has_admin:
        schemes["admin_key"] = {"type": "http", "scheme": "bearer"}
    paths: dict[str, Schema] = {}
    for endpoint in endpoints:
        if endpoint.is_served(has_admin=has_admin, has_dashboard=has_dashboard):
            servers = {"servers": ROOT} if endpoint.is_admin or endpoint.is_page else {}
            path = paths.setdefault(template(endpoint.bare_path), servers)
            path[endpoint.method.lower()] = _operation(endpoint, endpoint.bare_path, names)
            if endpoint.also is not None:
                path = paths.setdefault(template(endpoint.also), {"servers": ROOT})
                path[endpoint.method.lower()] = _operation(endpoint, endpoint.also, names)
    forms = [endpoint.form for endpoint in endpoints if endpoint.form]
    requests = list(dict.fromkeys(endpoint.request for endpoint in endpoints if endpoint.request))
    requests += [form.request for form in forms]
    shapes = [
        shape for endpoint in endpoints for shape in (endpoint.answer, endpoint.events) if shape
    ]
    shapes += [shape for form in forms for shape in (form.item, form.error)]
    shapes += [endpoint.texts_error for endpoint in endpoints if endpoint.texts_error]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-gateway",
            "version": __version__,
            "description": "The OpenAI-compatible gateway for MLX models.",
        },
        "servers": SERVERS,
        "security": [*([] if has_keys else [{}]), {"key": []}, {"anthropic_key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas(requests, [ErrorBody, *shapes], names, strict=strict),
            "securitySchemes": schemes,
        },
    }


def template(path: str) -> str:
    """Return a path as OpenAPI writes it, without Starlette's converters."""
    return PATH_PARAMETER.sub(r"{\1}", path)


def _operation(endpoint: Endpoint, path: str, names: Names) -> Schema:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": PATH_TYPES.get(converter, "string")},
        }
        for name, converter in PATH_PARAMETER.findall(path)
    ]
    words = PATH_PARAMETER.sub("one", path).replace(".", "/").split("/")
    operation: Schema = {
        "operationId": "_".join([endpoint.method.lower(), *words[1:]]),
        "summary": endpoint.summary,
        "responses": {**_error_responses(endpoint), **_success_responses(endpoint)},
    }
    if endpoint.details:
        operation["description"] = endpoint.details
    if endpoint.is_open:
        operation["security"] = []
    if parameters:
        operation["parameters"] = parameters
    request = endpoint.request
    if request is not None:
        models = names[request.kind]
        example = {**({"model": models[0]} if models else {}), **request.example}
        schema = reference(request)
        if endpoint.form is not None:
            schema = {"anyOf": [schema, reference(endpoint.form.request)]}
        content = {"schema": schema, "example": example}
        operation["parameters"] = [TIMEOUT]
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if endpoint.is_admin:
        operation["security"] = [{"admin_key": []}]
    return operation


def _success_responses(endpoint: Endpoint) -> Schema:
    content: Schema = {endpoint.content_type: {}}
    if endpoint.answer is not None:
        schema = reference(endpoint.answer)
        if endpoint.form is not None:
            items = {"type": "array", "items": reference(endpoint.form.item)}
            schema = {"anyOf": [schema, items]}
        content[endpoint.content_type] = {"schema": schema}
    if endpoint.events is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "x-event-schema": reference(endpoint.events),
        }
    return {str(status): _response(status, content) for status in endpoint.statuses}


def _error_responses(endpoint: Endpoint) -> Schema:
    shapes: dict[int, list[type]] = {
        int(error.status): [ErrorBody] for error in endpoint.all_errors
    }
    if is_anthropic(endpoint.path):
        shapes = {error_status(error): [AnthropicErrorBody] for error in endpoint.all_errors}
    if endpoint.bare_path.startswith(MODELS):
        shapes = {status: [*bodies, AnthropicErrorBody] for status, bodies in shapes.items()}
    form_error = endpoint.form.error if endpoint.form is not None else endpoint.texts_error
    if form_error is not None:
        for status in TEXTS_ERROR_STATUSES:
            shapes[status] = [*shapes.get(status, ()), form_error]
    responses: Schema = {}
    for status, bodies in shapes.items():
        schema = (
            reference(bodies[0]) if len(bodies) == 1 else {"anyOf": list(map(reference, bodies))}
        )
        responses[str(status)] = _response(status, {"application/json": {"schema": schema}})
    return responses


def _response(status: int, content: Schema) -> Schema:
    phrase = "Overloaded" if status == OVERLOADED else HTTPStatus(status).phrase
    return {"description": phrase, "content": content}
