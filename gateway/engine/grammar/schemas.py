"""JSON Schemas as plain values: read, walk, rebuild, follow references.

Pure functions; nothing here changes the value it is given.
"""

import json
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from gateway.errors import BadRequest

Schema: TypeAlias = Any  # a JSON value: an object or, in the draft's own words, a boolean
Node: TypeAlias = dict[str, Any]

_ONE: Final = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_DEFINITIONS: Final = ("$defs", "definitions")
_MAP: Final = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
TYPES: Final = SCALARS | {"array", "object"}
_TO_READ: Final = frozenset({"title", "description", "default", "examples", "$comment"})
NOTES: Final = _TO_READ | {"$defs", "definitions", "deprecated", "readOnly", "writeOnly"}


def refusal(message: str) -> BadRequest:
    """Return the error for a schema that cannot be honoured."""
    return BadRequest(message, part="answer_form", code="invalid_json_schema")


def parse_schema(text: str, *, max_bytes: int, max_depth: int) -> Schema:
    """Read a schema within bounds: its size and depth decide what compiling it costs."""
    if len(text.encode(errors="surrogatepass")) > max_bytes:
        raise refusal(f"The JSON Schema is longer than {max_bytes} bytes.")
    try:
        schema = json.loads(text, parse_constant=_no_such_number)
    except (ValueError, RecursionError) as error:
        raise refusal(f"The JSON Schema is not JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise refusal("A JSON Schema is an object or a boolean.")
    check_depth(schema, max_depth)
    return schema


def check_depth(schema: Schema, most: int) -> None:
    """Raise BadRequest for a schema whose values are nested more than `most` levels deep."""
    if _is_deeper(schema, most):
        raise refusal(f"The JSON Schema is nested more than {most} levels deep.")


def _no_such_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for node in level
            for child in (
                node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            )
        ]
        if not level:
            return False
    return True


def walk(schema: Schema, place: str = "#") -> Iterator[tuple[str, Node]]:
    """Yield every subschema that is an object, with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _ONE and isinstance(value, dict):
            yield from walk(value, f"{place}/{key}")
        elif key in _LIST and isinstance(value, list):
            for i, child in enumerate(value):
                yield from walk(child, f"{place}/{key}/{i}")
        elif key in _MAP and isinstance(value, dict):
            for name, child in value.items():
                yield from walk(child, f"{place}/{key}/{escape(name)}")


def escape(name: str) -> str:
    """Return a name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def children(node: Node) -> Iterator[Node]:
    """Yield the direct subschemas of one. Definitions are left out: only references enter them."""
    for key, value in node.items():
        if key in _ONE and isinstance(value, dict):
            yield value
        elif key in _LIST and isinstance(value, list):
            yield from (child for child in value if isinstance(child, dict))
        elif key in _MAP and key not in _DEFINITIONS and isinstance(value, dict):
            yield from (child for child in value.values() if isinstance(child, dict))


def rebuild(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Copy a schema, each subschema replaced, innermost first. `change` may alter its argument."""
    if not isinstance(schema, dict):
        return change(schema)
    copy: Node = {}
    for key, value in schema.items():
        if key in _ONE and isinstance(value, (dict, bool)):
            copy[key] = rebuild(value, change)
        elif key in _LIST and isinstance(value, list):
            copy[key] = [rebuild(child, change) for child in value]
        elif key in _MAP and isinstance(value, dict):
            copy[key] = {name: rebuild(child, change) for name, child in value.items()}
        else:
            copy[key] = value
    return change(copy)


def bare(schema: Schema) -> Schema:
    """Return a schema without its notes for readers, which may be most of a function's schema."""
    return rebuild(schema, _bare)


def _bare(node: Schema) -> Schema:
    if not isinstance(node, dict):
        return node
    return {key: value for key, value in node.items() if key not in _TO_READ}


def types(node: Node) -> frozenset[str]:
    """Return the JSON types that a subschema names; all of them if it names none."""
    named = node.get("type")
    if named is None:
        return TYPES
    return frozenset([named] if isinstance(named, str) else named)


def resolve(root: Schema, ref: str) -> Schema | None:
    """Follow a JSON pointer within the schema; None for what is not one, or leads nowhere.

    As in any URI, `%24` stands for `$` (RFC 6901, section 6).
    """
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = root
    for part in urllib.parse.unquote(ref[1:]).split("/")[1:] if ref != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def can_end(root: Schema) -> bool:
    """Return True if some finite value fits, that is, if no subschema always requires itself.

    The least fixed point: a reference ends once its target does. References that are not pointers
    are taken to end.
    """
    refs = {
        node["$ref"]: resolve(root, node["$ref"])
        for _, node in walk(root)
        if isinstance(node.get("$ref"), str)
    }
    ending = {ref for ref, target in refs.items() if target is None}
    while more := {
        ref for ref, target in refs.items() if ref not in ending and _ends(target, ending)
    }:
        ending |= more
    return _ends(root, ending)


def _ends(schema: Schema, ending: set[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if not enough(_ends(child, ending) for child in schema.get(key, (True,))):
            return False
    if types(schema) & SCALARS or "const" in schema or "enum" in schema:
        return True
    ways = []
    if "array" in types(schema):
        prefix = schema.get("prefixItems", [])
        needed = schema.get("minItems", 0)
        needs = [*prefix, schema.get("items", True)] if needed > len(prefix) else prefix[:needed]
        ways.append(all(_ends(child, ending) for child in needs))
    if "object" in types(schema):
        own, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        needs = [own.get(name, rest) for name in schema.get("required", ())]
        ways.append(all(_ends(child, ending) for child in needs))
    return any(ways)
