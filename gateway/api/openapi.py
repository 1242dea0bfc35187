"""The class `Endpoint`, and the document /openapi.json, which describes all endpoints."""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway import __version__
from gateway.api.middleware import MODELS, is_anthropic
from gateway.api.requests import Exposure, Service
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    EncodingNotSupported,
    ErrorBody,
    Forbidden,
    GatewayError,
    HeadTooLarge,
    InsufficientMemory,
    ModelNotFound,
    RateLimited,
    ResponseNotFound,
    SlowBody,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from gateway.registry import Catalog
from gateway.wire.anthropic import OVERLOADED, AnthropicErrorBody, error_status
from gateway.wire.bounds import NAME_CHARS
from gateway.wire.rerank import TEXTS_ERROR_STATUSES
from gateway.wire.validation import Request as WireRequest

Schema = dict[str, Any]
Schemas = dict[str, Schema]
_NULL: Schema = {"type": "null"}
Errors = tuple[type[GatewayError], ...]
Handler = Callable[[Service, Request], Awaitable[ASGIApp]]
COMMON_ERRORS: Errors = (HeadTooLarge, GatewayError)
ACCESS_ERRORS: Errors = (Unauthorized, Forbidden, Unavailable)
MODEL_ERRORS: Errors = (ModelNotFound, InsufficientMemory)
REQUEST_ERRORS: Errors = (
    *MODEL_ERRORS,
    BadRequest,
    SlowBody,
    TooLarge,
    EncodingNotSupported,
    RateLimited,
    DeadlineExceeded,
)
STORED_ERRORS: Errors = (BadRequest, ResponseNotFound)


class _Number(IntegerConvertor):
    """A path parameter for `int`, which raises ValueError for thousands of digits."""

    regex = "[0-9]{1,18}"


register_url_convertor("number", _Number())


class Form(NamedTuple):
    """A second request format that an endpoint accepts, with its answer."""

    name: str  # how to recognize such a body, for the docs
    request: type[WireRequest]
    answer: Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path: its handler, access and description."""

    route: str  # method and path; most are served with and without /v1
    handler: Handler
    _: KW_ONLY
    summary: str
    details: str = ""
    also: str | None = None  # a second path, served only as written here
    request: type[WireRequest] | None = None
    form: Form | None = None
    answer: Any = None  # type of the answer, if /openapi.json describes it
    texts_error: Any = None  # type of the errors in TEI's format, if there are any
    cohere_error: Any = None  # type of the errors in Cohere's format, if there are any
    events: Any = None
    content_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)
    # Errors beside the usual ones, which `all_errors` adds.
    errors: Errors = ()
    is_open: bool = False  # no key is needed
    is_admin: bool = False
    is_page: bool = False  # True: part of the dashboard
    operation: str | None = None  # `gen_ai.operation.name` in traces
    is_traced: bool = True  # False: monitors poll the endpoint, and traces would be noise

    def is_served(self, exposure: Exposure) -> bool:
        is_allowed = exposure.has_admin or not self.is_admin
        return is_allowed and (exposure.has_dashboard or not self.is_page)

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @property
    def is_metered(self) -> bool:
        return RateLimited in self.all_errors and not self.is_admin

    @property
    def is_bare(self) -> bool:
        return self.is_admin or self.is_page

    @property
    def bare_path(self) -> str:
        return self.path.removeprefix("/v1")

    @property
    def paths(self) -> tuple[str, ...]:
        versions = (self.path,) if self.is_bare else (self.bare_path, f"/v1{self.bare_path}")
        return versions if self.also is None else (*versions, self.also)

    @property
    def all_errors(self) -> Errors:
        errors = [*COMMON_ERRORS]
        if not self.is_open:
            errors += ACCESS_ERRORS
        if self.request is not None:
            errors += REQUEST_ERRORS
        return (*errors, *self.errors)

    @property
    def requests(self) -> Sequence[type[WireRequest]]:
        requests = (self.request, self.form and self.form.request)
        return [request for request in requests if request is not None]

    @property
    def shapes(self) -> Sequence[Any]:
        shapes = [self.answer, self.events, self.texts_error, self.cohere_error]
        if self.form is not None:
            shapes.append(self.form.answer)
        return [shape for shape in shapes if shape is not None]


SERVERS = [{"url": "/v1"}, {"url": "/", "description": "The same, for base URLs without /v1."}]
ROOT = [{"url": "/"}]
PATH_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
PATH_TYPES = {":number": "integer"}  # JSON types by Starlette's converter; the default is string
TIMEOUT = {
    "name": "x-gateway-timeout-s",
    "in": "header",
    "description": "Seconds that the answer may take; the gateway's own limit also applies.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
Names = Mapping[str, Sequence[str]]


def document(
    catalog: Catalog, endpoints: Sequence[Endpoint], exposure: Exposure, *, strict: bool
) -> Schema:
    """Return the OpenAPI document for these settings, with the catalog's models as examples."""
    names = {
        kind: [entry.name for entry in catalog if entry.spec.kind == kind]
        for kind in ("chat", "embedding", "rerank")
    }
    names["rerank"] += names["embedding"]  # embedding models score by cosine
    schemes = {
        "key": {"type": "http", "scheme": "bearer"},
        "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    if exposure.has_admin:
        schemes["admin_key"] = {"type": "http", "scheme": "bearer"}
    paths: dict[str, Schema] = {}
    served = [endpoint for endpoint in endpoints if endpoint.is_served(exposure)]
    for endpoint in served:
        for path in filter(None, (endpoint.bare_path, endpoint.also)):
            is_bare = endpoint.is_bare or path in ("/", endpoint.also)
            operations = paths.setdefault(template(path), {})
            if is_bare:
                operations["servers"] = ROOT
            operations[endpoint.method.lower()] = _operation(endpoint, path, names)
    requests = list(dict.fromkeys(chain.from_iterable(endpoint.requests for endpoint in endpoints)))
    shapes = [ErrorBody, *chain.from_iterable(endpoint.shapes for endpoint in endpoints)]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-gateway",
            "version": __version__,
            "description": "The OpenAI-compatible gateway for MLX models.",
        },
        "servers": SERVERS,
        "security": [*([] if exposure.has_keys else [{}]), {"key": []}, {"anthropic_key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas(requests, shapes, names, strict=strict),
            "securitySchemes": schemes,
        },
    }


def template(path: str) -> str:
    """Return a path in OpenAPI's syntax, without Starlette's converters."""
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
        if not endpoint.is_admin:
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
            schema = {"anyOf": [schema, reference(endpoint.form.answer)]}
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
    if endpoint.cohere_error is not None:
        shapes = {status: [*bodies, endpoint.cohere_error] for status, bodies in shapes.items()}
    if endpoint.texts_error is not None:
        for status in TEXTS_ERROR_STATUSES:
            shapes[status] = [*shapes.get(status, ()), endpoint.texts_error]
    responses: Schema = {}
    for status, bodies in shapes.items():
        schema = reference(bodies[0])
        if len(bodies) > 1:
            schema = {"anyOf": list(map(reference, bodies))}
        responses[str(status)] = _response(status, {"application/json": {"schema": schema}})
    return responses


def _response(status: int, content: Schema) -> Schema:
    phrase = "Overloaded" if status == OVERLOADED else HTTPStatus(status).phrase
    return {"description": phrase, "content": content}


def schemas(
    requests: Sequence[type[WireRequest]],
    answers: Sequence[Any],
    names: Mapping[str, Sequence[str]],
    *,
    strict: bool,
) -> Schemas:
    """Return the schemas of requests, answers and the types inside them, by type name.

    `names` are the models' names by kind.
    """
    request_schemas = _schemas_of(requests)
    for schema in request_schemas.values():
        _allow_nulls(schema)
    for request in requests:
        schema = request_schemas[request.__name__]
        schema["properties"] |= dict(_unserved(request))
        schema["properties"]["model"]["examples"] = list(names[request.kind])
        schema["additionalProperties"] = _NULL if strict else True
    return request_schemas | _schemas_of(answers)


def _schemas_of(shapes: Sequence[Any]) -> Schemas:
    _, document = TypeAdapter.json_schemas(
        [(index, "validation", TypeAdapter(shape)) for index, shape in enumerate(shapes)],
        ref_template="#/components/schemas/{model}",
    )
    definitions: Schemas = document["$defs"]
    return definitions


def _allow_nulls(schema: Schema) -> None:
    """Allow null for every optional field, because the API treats null like an absent field."""
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = _NULL
    for name, field in schema.get("properties", {}).items():
        if field.get("default") in (None, []):
            field.pop("default", None)  # the default only marks the field as optional
        if name not in schema.get("required", ()):
            options = field.pop("anyOf", None) or [_pop_constraints(field)]
            field["anyOf"] = options if _NULL in options else [*options, _NULL]


def _pop_constraints(field: Schema) -> Schema:
    annotations = ("title", "description", "default")
    return {key: field.pop(key) for key in list(field) if key not in annotations}


def _unserved(request: type[WireRequest]) -> Iterator[tuple[str, Schema]]:
    for name in sorted(request.harmless):
        yield name, {"description": "Accepted, without effect.", "maxLength": NAME_CHARS}
    for name, reason in request.refused.items():
        allowed = [None, *request.neutral.get(name, ())]
        yield name, {"enum": allowed, "description": f"Refused. {reason}"}


def reference(shape: Any) -> Schema:
    return {"$ref": f"#/components/schemas/{shape.__name__}"}
