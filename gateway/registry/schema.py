"""The JSON Schema of models.yaml, for editors."""

import ast
import inspect
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from gateway.registry.sources import Source
from gateway.registry.specs import SPECS, ChatSpec, ModelSpec, Overrides, Section
from gateway.settings import Settings, variable

_EXPANSION = {
    "type": "string",
    "pattern": r"\$\{[A-Za-z_]\w*(:-[^{}]*)?\}",
    "description": "A variable: ${VAR} or ${VAR:-default}.",
}
_REF = {"$ref": "#/$defs/Expansion"}
_NULL = {"type": "null"}
_TEXT = {"type": "string"}


def describe_fields(model: type[BaseModel]) -> dict[str, str]:
    # Python drops the docstrings of attributes, so they are read from the source. pydantic would
    # read them at every start (`use_attribute_docstrings`), which is slower.
    words: dict[str, str] = {}
    settings = describe_fields(Settings) if issubclass(model, Section) else {}
    for kind in reversed(model.__mro__):
        if kind.__module__.startswith("gateway."):
            [tree] = ast.parse(inspect.getsource(kind)).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in pairwise(tree.body):
                match field, below:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        words[name] = inspect.cleandoc(text).replace("\n", " ")
    for name, declared in model.model_fields.items():
        for mark in declared.metadata:
            if isinstance(mark, Overrides):
                words[name] = f"{settings[mark.setting]} If absent, {variable(mark.setting)}."
    return words


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of models.yaml, in which any value may be `${VAR:-default}`."""
    _, schema = TypeAdapter.json_schemas(
        [(ModelSpec, "validation", TypeAdapter(ModelSpec))], ref_template="#/$defs/{model}"
    )
    definitions = schema["$defs"]
    for source in get_args(Source):  # sources are written as text
        definitions.pop(source.__name__, None)
    for name in (spec.__name__ for spec in SPECS.values()):
        del definitions[name]["properties"]["id"]  # the id is the key of the entry
        definitions[name]["required"].remove("id")
    chat = definitions[ChatSpec.__name__]
    chat["required"].remove("source")
    chat["anyOf"] = [{"required": ["source"]}, {"required": ["base", "adapter"]}]
    models = {model.__name__: model for model in (*SPECS.values(), *Section.__subclasses__())}
    for name, definition in definitions.items():
        definition.pop("title", None)
        needed = definition.get("required", ())
        words = describe_fields(models[name])
        definition["properties"] = {
            key: {"description": words[key], **_value(value, required=key in needed)}
            for key, value in definition["properties"].items()
        }
    kinds = [{"$ref": f"#/$defs/{spec.__name__}"} for spec in SPECS.values()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mlx-gateway's models.yaml",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "models"],
        "properties": {
            "version": {"anyOf": [{"const": 1}, _REF], "description": "The version of this form."},
            "models": {
                "type": "object",
                "description": "Each model by its id.",
                "propertyNames": {"pattern": r"^[^\s,]+$"},
                "additionalProperties": {"anyOf": kinds},
            },
        },
        "$defs": {**definitions, "Expansion": _EXPANSION},
    }


def _value(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """Return a value's schema that also allows variables and, unless `required`, null."""
    bare = {key: value for key, value in schema.items() if key not in ("title", "default")}
    about = {key: schema[key] for key in ("default",) if schema.get(key) is not None}
    # A schema that allows any text allows `${VAR}` already.
    options = [_inner(option) for option in bare.pop("anyOf", [bare]) if option != _NULL]
    if any(_is_plain(option) for option in options) and _TEXT not in options:
        options.append(_REF)
    if not required:
        options.append(_NULL)
    return {**about, "anyOf": options}


def _is_plain(schema: dict[str, Any]) -> bool:
    return schema.get("type") not in (None, "object", "array")


def _inner(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows variables in a list's items and a mapping's values."""
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            return {**schema, key: _value(schema[key])}
    return schema
