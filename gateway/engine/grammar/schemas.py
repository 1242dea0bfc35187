"""JSON Schemas as plain values: read within bounds, checked by their draft, walked, rebuilt.

Nothing here changes the value it is given.
"""

import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Any, Final, TypeAlias, TypeGuard

import jsonschema_rs
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

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
# Keywords that no grammar holds: their subschemas apply to no part of an answer by themselves.
_ASIDE: Final = frozenset(
    {
        *("not", "if", "then", "else", "contains", "propertyNames", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
TYPES: Final = SCALARS | {"array", "object"}
_TO_READ: Final = frozenset({"title", "description", "default", "examples", "$comment"})
NOTES: Final = _TO_READ | {"$defs", "definitions", "deprecated", "readOnly", "writeOnly"}
_NOUNS: Final = {
    **{name: f"a {name}" for name in ("string", "number", "boolean")},
    **{name: f"an {name}" for name in ("integer", "object", "array")},
    "null": "null",
}
_PROBLEMS: Final = {
    "minimum": "must be at least {}",
    "exclusiveMinimum": "must be above {}",
    "minItems": "must have at least {} item",
    "uniqueItems": "must have no item twice",
}


class Draft(Enum):
    """A version of JSON Schema, by the identifier of its own schema."""

    D4 = "http://json-schema.org/draft-04/schema"
    D6 = "http://json-schema.org/draft-06/schema"
    D7 = "http://json-schema.org/draft-07/schema"
    D2019 = "https://json-schema.org/draft/2019-09/schema"
    D2020 = "https://json-schema.org/draft/2020-12/schema"


_DRAFTS: Final = {draft.value.partition("://")[2]: draft for draft in Draft}


def refusal(message: str) -> BadRequest:
    """Return the error for a schema that cannot be honoured."""
    return BadRequest(message, part="answer_form", code="invalid_json_schema")


# ── Read and checked ──────────────────────────────────────────────────────────────────────────


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


def check_depth(schema: Schema, max_depth: int) -> None:
    """Raise BadRequest for a schema whose values are nested more than `max_depth` levels deep."""
    level = [schema]
    for _ in range(max_depth + 1):
        level = [
            child
            for node in level
            for child in (
                node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            )
        ]
        if not level:
            return
    raise refusal(f"The JSON Schema is nested more than {max_depth} levels deep.")


def _no_such_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def draft_of(schema: Schema) -> Draft:
    """Return the draft that `$schema` names; the newest if it names no known one."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(name, str):
        return Draft.D2020
    return _DRAFTS.get(_address(name), Draft.D2020)


def is_draft(name: str) -> bool:
    """Return True for a `$schema` that names a known draft."""
    return _address(name) in _DRAFTS


def _address(name: str) -> str:
    return name.partition("://")[2].rstrip("#")


def check_draft(schema: Schema) -> None:
    """Check a schema against its draft's own schema. Raises BadRequest naming keyword and place."""
    draft = draft_of(schema)
    error = next(_own_schema(draft).iter_errors(schema), None)
    if error is not None:
        path = [escape(str(part)) for part in error.instance_path] or [""]
        name = draft.value.split("/")[-2].removeprefix("draft-").lstrip("0")
        raise refusal(
            f"The JSON Schema is not valid: `{path[-1]}` at {'/'.join(['#', *path])} "
            f"{_problem(path[-1], error.kind)} in draft {name}."
        )


def _problem(keyword: str, kind: Any) -> str:
    """Return what a keyword's value must be; `kind` is the error's, of jsonschema_rs."""
    if kind.name == "type":
        return f"must be {' or '.join(_NOUNS[name] for name in kind.types)}"
    if kind.name in _PROBLEMS:
        return _PROBLEMS[kind.name].format(kind.value)
    if keyword == "type":
        return "must be the name of a type, or an array of some,"
    return "is not allowed"


@cache
def _own_schema(draft: Draft) -> Any:
    # Formats are not looked at: `pattern` is ECMA's, which few libraries' own dialect is.
    return jsonschema_rs.validator_for(REGISTRY.contents(draft.value), validate_formats=False)


# ── Walked and rebuilt ────────────────────────────────────────────────────────────────────────


def steps(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the direct subschemas of one that are objects, with the way to each.

    Definitions are left out: only references enter them.
    """
    for key, value in node.items():
        if key in _ONE and isinstance(value, dict):
            yield key, value
        elif key in _LIST and isinstance(value, list):
            yield from (
                (f"{key}/{i}", child) for i, child in enumerate(value) if isinstance(child, dict)
            )
        elif key in _MAP and key not in _DEFINITIONS and isinstance(value, dict):
            yield from _named(key, value)


def definitions(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the definitions of a subschema, with the way to each."""
    for key in _DEFINITIONS:
        if isinstance(node.get(key), dict):
            yield from _named(key, node[key])


def _named(key: str, schemas: Node) -> Iterator[tuple[str, Node]]:
    for name, child in schemas.items():
        if isinstance(child, dict):
            yield f"{key}/{escape(name)}", child


def walk(schema: Schema) -> Iterator[tuple[str, Node]]:
    """Yield every subschema that is an object, definitions too, with its JSON pointer."""
    todo = [("#", schema)] if isinstance(schema, dict) else []
    while todo:
        place, node = todo.pop()
        yield place, node
        inner = [*steps(node), *definitions(node)]
        todo += [(f"{place}/{step}", child) for step, child in reversed(inner)]


def escape(name: str) -> str:
    """Return a name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


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


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for a JSON number, which a boolean is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def types(node: Node) -> frozenset[str]:
    """Return the JSON types that a subschema names; all of them if it names none."""
    named = node.get("type")
    if named is None:
        return TYPES
    return frozenset([named] if isinstance(named, str) else named)


# ── References ────────────────────────────────────────────────────────────────────────────────


def resolve(root: Schema, ref: str) -> Schema | None:
    """Follow a JSON pointer within the schema; None for what is not one, or leads nowhere.

    As in any URI, `%24` stands for `$` (RFC 6901, section 6).
    """
    if ref != "#" and not ref.startswith("#/"):
        return None
    target = root
    for part in urllib.parse.unquote(ref[1:]).split("/")[1:] if ref != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdigit() and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target


def reachable(root: Node, max_path: int) -> list[tuple[str, Node]]:
    """List the subschemas that a grammar may hold an answer to, each with its JSON pointer.

    Definitions are among them where something refers to them; all of them, where a reference is
    no pointer from the root. Raises BadRequest for one that leads nowhere, and for a way through
    more than `max_path` subschemas: compilers follow `$ref` by native recursion.
    """
    is_plain = has_plain_refs(root)
    # Addresses may lead anywhere: then each reference counts as one on the longest way.
    is_long = not is_plain and sum("$ref" in node for _, node in walk(root)) > max_path
    todo: list[tuple[str, Schema, int]] = [("#", root, max_path + 1 if is_long else 1)]
    nodes, seen = list[tuple[str, Node]](), set[int]()
    while todo:
        place, node, depth = todo.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        if depth > max_path:
            raise refusal(
                f"The JSON Schema leads through more than {max_path} subschemas, one inside the "
                "other or by `$ref`."
            )
        seen.add(id(node))
        nodes.append((place, node))
        ref = node.get("$ref")
        if is_plain and isinstance(ref, str) and ref.startswith("#"):
            target = resolve(root, ref)
            if target is None:
                raise refusal(f"The JSON Schema keyword `$ref` at {place} leads nowhere: `{ref}`.")
            todo.append((urllib.parse.unquote(ref), target, depth + 1))
        inner = steps(node) if is_plain else (*steps(node), *definitions(node))
        todo += [
            (f"{place}/{step}", child, depth + 1)
            for step, child in reversed([*inner])
            if step.partition("/")[0] not in _ASIDE
        ]
    return nodes


def has_plain_refs(root: Node) -> bool:
    """Return True if every reference within the schema is a JSON pointer from its root."""
    return not any(
        (place != "#" and isinstance(node.get("$id", node.get("id")), str))
        or (isinstance(ref := node.get("$ref"), str) and re.match("#[^/]", ref))
        for place, node in walk(root)
    )


def endless_refs(root: Node, nodes: Iterable[Node]) -> frozenset[str]:
    """Return the references that no finite value fits, since they always require themselves.

    The least fixed point: a reference ends once its target does. References that are not pointers
    are taken to end.
    """
    refs = {node["$ref"]: resolve(root, node["$ref"]) for node in nodes if "$ref" in node}
    endless = frozenset(ref for ref, target in refs.items() if target is not None)
    while ending := {ref for ref in endless if _ends(refs[ref], endless)}:
        endless -= ending
    return endless


def can_end(root: Schema) -> bool:
    """Return True if some finite value fits, that is, if no subschema always requires itself."""
    return _ends(root, endless_refs(root, (node for _, node in walk(root))))


def _ends(schema: Schema, endless: frozenset[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    if schema.get("$ref") in endless or schema.get("not") in ({}, True):
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if not enough(_ends(child, endless) for child in schema.get(key, (True,))):
            return False
    if types(schema) & SCALARS or "const" in schema or "enum" in schema:
        return True
    ways = []
    if "array" in types(schema):
        prefix, others = tuple_items(schema)
        count = schema.get("minItems", 0)
        items = [*prefix, others] if count > len(prefix) else prefix[:count]
        ways.append(all(_ends(child, endless) for child in items))
    if "object" in types(schema):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        others = "patternProperties" in schema or others  # which may allow what is required
        needed = [properties.get(name, others) for name in schema.get("required", ())]
        ways.append(all(_ends(child, endless) for child in needed))
    return any(ways)


def tuple_items(node: Node) -> tuple[list[Schema], Schema]:
    """Return the schemas of an array's first items, and of the rest, as any draft writes them."""
    items = node.get("items", True)
    if isinstance(items, list):  # before draft 2020-12
        return items, node.get("additionalItems", True)
    return node.get("prefixItems", []), items
