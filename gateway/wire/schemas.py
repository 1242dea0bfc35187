"""JSON Schemas of what is taken and given, made from the shapes that read it, for /openapi.json."""

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
    """Return the schemas of requests and answers, and of what they hold, by name.

    `answers` are TypedDicts and unions of them. `names` are those of the models there are, by kind;
    `strict` is whether fields that are not known are refused.
    """
    taken = _made(requests)
    for schema in taken.values():
        _allow_nulls(schema)
    for request in requests:
        schema = taken[request.__name__]
        schema["properties"] |= dict(_unserved(request))
        schema["properties"]["model"]["examples"] = list(names[request.kind])
        schema["additionalProperties"] = _NULL if strict else True
    return taken | _made(answers)


def _made(shapes: Sequence[Any]) -> Schemas:
    _, made = TypeAdapter.json_schemas(
        [(place, "validation", TypeAdapter(shape)) for place, shape in enumerate(shapes)],
        ref_template="#/components/schemas/{model}",
    )
    found: Schemas = made["$defs"]
    return found


def _allow_nulls(schema: Schema) -> None:
    """Say of every field that may be left out that it may be null: it is the same. So it is of
    one that nobody knows, where those are refused.
    """
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = _NULL
    for name, field in schema.get("properties", {}).items():
        if field.get("default") in (None, []):
            field.pop("default", None)  # which only says that it may be left out
        if name not in schema.get("required", ()):
            options = field.pop("anyOf", None) or [_taken(field)]
            field["anyOf"] = options if _NULL in options else [*options, _NULL]


def _taken(field: Schema) -> Schema:
    """Take out of a field's schema what says which values it has; what tells of it stays."""
    telling = ("title", "description", "default")
    return {key: field.pop(key) for key in list(field) if key not in telling}


def _unserved(request: type[Request]) -> Iterator[tuple[str, Schema]]:
    """Describe the fields that are known and not served."""
    for name in sorted(request.harmless):
        yield name, {"description": "Accepted, without effect.", "maxLength": NAME_CHARS}
    for name, reason in request.refused.items():
        allowed = [None, *request.neutral.get(name, ())]
        yield name, {"enum": allowed, "description": f"Refused. {reason}"}


def reference(shape: Any) -> Schema:
    """Return a pointer to the schema of a request or an answer."""
    return {"$ref": f"#/components/schemas/{shape.__name__}"}
