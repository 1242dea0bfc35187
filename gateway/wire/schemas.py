"""JSON Schemas of requests and answers for /openapi.json, made from their models and TypedDicts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from gateway.wire.bounds import NAME_CHARS
from gateway.wire.validation import Request

Schema = dict[str, Any]
Schemas = dict[str, Schema]
_NULL: Schema = {"type": "null"}


def schemas(
    requests: Sequence[type[Request]],
    answers: Sequence[Any],
    names: Mapping[str, Sequence[str]],
    *,
    strict: bool,
) -> Schemas:
    """Return the schemas of requests and answers, and of the types inside them, by name.

    `answers` are TypedDicts and unions of them. `names` are the models' names by kind. If `strict`,
    unknown fields are refused.
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
    """Mark every optional field nullable, and unknown ones where they are refused."""
    # The API treats null as absent.
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = _NULL
    for name, field in schema.get("properties", {}).items():
        if field.get("default") in (None, []):
            field.pop("default", None)  # it only marks the field as optional
        if name not in schema.get("required", ()):
            options = field.pop("anyOf", None) or [_pop_constraints(field)]
            field["anyOf"] = options if _NULL in options else [*options, _NULL]


def _pop_constraints(field: Schema) -> Schema:
    """Remove and return a field's constraints; its annotations stay."""
    annotations = ("title", "description", "default")
    return {key: field.pop(key) for key in list(field) if key not in annotations}


def _unserved(request: type[Request]) -> Iterator[tuple[str, Schema]]:
    """Yield the fields that are known and not served, each with its schema."""
    for name in sorted(request.harmless):
        yield name, {"description": "Accepted, without effect.", "maxLength": NAME_CHARS}
    for name, reason in request.refused.items():
        allowed = [None, *request.neutral.get(name, ())]
        yield name, {"enum": allowed, "description": f"Refused. {reason}"}


def reference(shape: Any) -> Schema:
    """Return a pointer to the schema of a request or an answer."""
    return {"$ref": f"#/components/schemas/{shape.__name__}"}
