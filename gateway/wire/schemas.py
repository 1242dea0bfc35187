"""JSON Schemas of what is taken and given, made from the shapes that read it, for /openapi.json."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.wire import answers
from gateway.wire.bounds import NAME_CHARS
from gateway.wire.reading import Fields
from gateway.wire.table import ENDPOINTS

Schema = dict[str, Any]
Schemas = dict[str, Schema]
_NULL: Schema = {"type": "null"}
GIVEN: tuple[type[BaseModel], ...] = (
    answers.Error,
    answers.Embeddings,
    answers.ChatCompletion,
    answers.ChatCompletionChunk,
    answers.Completion,
    answers.Response,
    answers.ResponseEvent,
    answers.InputItems,
    answers.InputTokens,
    answers.Deleted,
    answers.Models,
    answers.Reload,
    answers.Health,
    answers.Ready,
)


def schemas(names: Mapping[str, Sequence[str]], *, strict: bool) -> Schemas:
    """Give every schema by name. `names` are those of the models there are, by kind; `strict` tells
    that fields nobody knows are refused.
    """
    taken = _made([endpoint.shape for endpoint in ENDPOINTS])
    for schema in taken.values():
        _allow_nulls(schema)
    for endpoint in ENDPOINTS:
        schema = taken[endpoint.shape.__name__]
        schema["properties"] |= dict(_unserved(endpoint.fields))
        schema["properties"]["model"]["examples"] = list(names[endpoint.kind])
        schema["additionalProperties"] = _NULL if strict else True
    return taken | _made(GIVEN)


def _made(shapes: Sequence[type[BaseModel]]) -> Schemas:
    _, made = models_json_schema(
        [(shape, "validation") for shape in shapes], ref_template="#/components/schemas/{model}"
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


def _unserved(fields: Fields) -> Iterator[tuple[str, Schema]]:
    """Describe what an endpoint knows beyond its shape."""
    for name in sorted(fields.harmless):
        yield name, {"description": "Accepted, without effect.", "maxLength": NAME_CHARS}
    for name, reason in fields.refused.items():
        allowed = [None, *fields.neutral.get(name, ())]
        yield name, {"enum": allowed, "description": f"Refused. {reason}"}


def reference(shape: type[BaseModel]) -> Schema:
    """Point to a shape's schema."""
    return {"$ref": f"#/components/schemas/{shape.__name__}"}
