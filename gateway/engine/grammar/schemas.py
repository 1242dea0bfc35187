"""Reads JSON Schemas of limited size, checks them against their draft, walks and rebuilds them."""

import json
import math
import re
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeGuard

import jsonschema_rs
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from gateway.errors import BadRequest

Schema: TypeAlias = Any  # a JSON object or a boolean
Node: TypeAlias = dict[str, Any]

ROOT: Final = "#"
_IDENTIFIERS: Final = ("$id", "id")
_DEFINITION: Final = re.compile(r"#(?:/(?:\$defs|definitions)/[^/]+)?")
_ONE: Final = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# Definitions, and keywords that no grammar enforces.
_ASIDE: Final = frozenset(
    {
        *("$defs", "definitions"),
        *("not", "if", "then", "else", "contains", "propertyNames", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
TYPES: Final = SCALARS | {"array", "object"}
_NOTES: Final = frozenset({"title", "description", "default", "examples", "$comment"})
_BESIDE_REF: Final = frozenset({"$ref", "$schema", "$defs", "definitions"})
_PROBLEMS: Final = {
    "minimum": "must be at least {}",
    "exclusiveMinimum": "must be above {}",
    "minItems": "must have at least {} item",
    "uniqueItems": "must have no item twice",
}


class Draft(Enum):
    """A draft of JSON Schema; the value identifies its meta-schema."""

    D4 = "http://json-schema.org/draft-04/schema"
    D6 = "http://json-schema.org/draft-06/schema"
    D7 = "http://json-schema.org/draft-07/schema"
    D201909 = "https://json-schema.org/draft/2019-09/schema"
    D202012 = "https://json-schema.org/draft/2020-12/schema"


_DRAFTS: Final = {draft.value.partition("://")[2]: draft for draft in Draft}


def refusal(message: str) -> BadRequest:
    """Return the error for a schema that is invalid or cannot be enforced."""
    return BadRequest(message, part="answer_form", code="invalid_json_schema")


# ── Reading and checking ──────────────────────────────────────────────────────────────────────


def parse_schema(text: str, *, max_bytes: int, max_depth: int) -> Schema:
    """Read a schema. Raises BadRequest if it is malformed, too large or too deep."""
    if len(text.encode(errors="surrogatepass")) > max_bytes:
        raise refusal(f"The JSON Schema is longer than {max_bytes} bytes.")
    try:
        schema = json.loads(text, parse_constant=_no_such_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise refusal(f"The JSON Schema is not JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise refusal("The JSON Schema must be an object or a boolean.")
    level = [schema]
    for _ in range(max_depth + 1):
        level = [child for node in level for child in _children(node)]
    if level:
        raise refusal(f"The JSON Schema is nested more than {max_depth} levels deep.")
    return schema


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


def _no_such_number(name: str) -> float:
    raise ValueError(f"{name[:64]} is not a JSON number, or is too large for a double")


def _number(text: str) -> float:
    """Read a number, with whole numbers as integers, as in JSON Schema."""
    number = float(text)
    if math.isinf(number):
        return _no_such_number(text)
    return int(number) if number.is_integer() else number


def draft_of(schema: Schema) -> Draft:
    """Return the draft that `$schema` names, or else the newest draft."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(name, str):
        return Draft.D202012
    return _DRAFTS.get(name.partition("://")[2].rstrip("#"), Draft.D202012)


def check_draft(schema: Schema) -> None:
    """Check a schema against its draft's meta-schema. Raises BadRequest."""
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
    if kind.name == "type":
        nouns = [f"an {name}" if name[0] in "aio" else f"a {name}" for name in kind.types]
        return f"must be {' or '.join(nouns)}"
    if kind.name in _PROBLEMS:
        return _PROBLEMS[kind.name].format(kind.value)
    if keyword == "type":
        return "must be the name of a type, or an array of such names,"
    return "is not allowed"


@cache
def _own_schema(draft: Draft) -> Any:
    # Patterns have the format "regex", in ECMA's dialect, which few libraries can check.
    return jsonschema_rs.validator_for(REGISTRY.contents(draft.value), validate_formats=False)


# ── Walking and rebuilding ────────────────────────────────────────────────────────────────────


def steps(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield a node's direct subschemas that are objects, each after its steps in a JSON pointer."""
    for key, value in node.items():
        if key in _ONE and isinstance(value, dict):
            yield key, value
        elif key in _LIST and isinstance(value, list):
            yield from (
                (f"{key}/{i}", child) for i, child in enumerate(value) if isinstance(child, dict)
            )
        elif key in _MAP and isinstance(value, dict):
            yield from (
                (f"{key}/{escape(name)}", child)
                for name, child in value.items()
                if isinstance(child, dict)
            )


def walk(schema: Schema) -> Iterator[tuple[str, Node]]:
    """Yield every subschema that is an object, including definitions, with its JSON pointer."""
    todo = [(ROOT, schema)] if isinstance(schema, dict) else []
    while todo:
        place, node = todo.pop()
        yield place, node
        todo += [(f"{place}/{step}", child) for step, child in reversed([*steps(node)])]


def escape(name: str) -> str:
    """Return a name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def rebuild(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy of a schema with each subschema changed, the innermost first."""
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
    """Return a schema without annotations such as `description`."""
    return rebuild(schema, _bare)


def _bare(node: Schema) -> Schema:
    if not isinstance(node, dict):
        return node
    return {key: value for key, value in node.items() if key not in _NOTES}


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def types(node: Node) -> frozenset[str]:
    """Return the JSON types that a subschema names, or all types if it names none."""
    named = node.get("type")
    if named is None:
        return TYPES
    return frozenset([named] if isinstance(named, str) else named)


# ── References ────────────────────────────────────────────────────────────────────────────────


def resolve(root: Schema, ref: str) -> Schema | None:
    """Return the subschema that a JSON pointer leads to, or None."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    target = root
    for part in urllib.parse.unquote(ref[1:]).split("/")[1:]:  # RFC 6901, section 6
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdigit() and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target


def settle_refs(root: Node) -> tuple[Collection[int], Mapping[str, str]]:
    """Rewrite a schema's references, in place, as pointers to definitions.

    References to other documents are removed. If subschemas have addresses (`$id`), all references
    are removed, because they may be relative to these addresses. Return the Python ids of
    subschemas that lost a reference, and a map from rewritten references to the caller's.
    """
    nodes = list(walk(root))
    base = next(iter(_identifiers(root)), "").partition("#")[0]
    inner = [name for _, node in nodes[1:] for name in _identifiers(node)]
    is_plain = all(name.startswith("#") for name in inner)
    anchors = {f"#{name}": node for _, node in nodes for name in _anchors(node)}
    lost = set[int]()
    callers: dict[str, str] = {}
    moved: Node = {}
    referring = [node for _, node in nodes if isinstance(node.get("$ref"), str)]
    for node in referring:
        address, _, fragment = node["$ref"].partition("#")
        if not is_plain or (address and urllib.parse.urljoin(base, address) != base):
            del node["$ref"]
            lost.add(id(node))
            continue
        ref = node["$ref"] = f"#{fragment}"
        target = resolve(root, ref)
        if target is None:
            target = anchors.get(ref)
        # Every target becomes a definition, because a pointer may lead through keywords that are
        # rewritten later, or that llguidance doesn't know, such as OpenAPI's `components`.
        if target is not None and not _DEFINITION.fullmatch(ref):
            moved[ref] = target
            node["$ref"] = f"#/$defs/{urllib.parse.quote(escape(ref), safe='~')}"
            callers[node["$ref"]] = ref
    # Older drafts ignore the keywords beside a reference.
    if draft_of(root) not in (Draft.D201909, Draft.D202012):
        for node in referring:
            for key in node.keys() - _BESIDE_REF:
                del node[key]
    if moved:
        root["$defs"] = {**root.get("$defs", {}), **moved}
    for _, node in nodes:
        for key in _IDENTIFIERS:
            if isinstance(node.get(key), str):
                del node[key]
    return lost, callers


def _identifiers(node: Node) -> list[str]:
    return [node[key] for key in _IDENTIFIERS if isinstance(node.get(key), str)]


def _anchors(node: Node) -> list[str]:
    names = [node.get(key) for key in ("$anchor", "$dynamicAnchor")]
    ids = [name[1:] for name in _identifiers(node) if name.startswith("#")]
    return [*ids, *(name for name in names if isinstance(name, str))]


def reachable(
    root: Node, max_path: int, callers: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[str, Node]]:
    """Return the subschemas that a grammar may enforce, each with its JSON pointer.

    `callers` maps rewritten references to the caller's. Raises BadRequest for a reference that
    leads nowhere, and for a chain of more than `max_path` subschemas.
    """
    nodes: list[tuple[str, Node]] = []
    seen = set[int]()
    todo: list[tuple[str, Schema, int]] = [(ROOT, root, 0)]
    while todo:
        place, node, depth = todo.pop()
        if id(node) in seen or not isinstance(node, dict):
            continue
        if depth > max_path:  # llguidance follows `$ref` by recursion in native code
            raise refusal(
                f"The JSON Schema leads through more than {max_path} subschemas, one inside the "
                "other or by `$ref`."
            )
        seen.add(id(node))
        nodes.append((place, node))
        if "$ref" in node:
            target = resolve(root, node["$ref"])
            if target is None:
                raise refusal(
                    f"The JSON Schema keyword `$ref` at {place} leads nowhere: `{node['$ref']}`."
                )
            ref = callers.get(node["$ref"], node["$ref"])
            todo.append((urllib.parse.unquote(ref), target, depth + 1))
        todo += [
            (f"{place}/{step}", child, depth + 1)
            for step, child in reversed([*steps(node)])
            if step.partition("/")[0] not in _ASIDE
        ]
    return nodes


def can_end(root: Schema) -> bool:
    """Return True if some finite value fits a schema."""
    # The loop removes references whose targets can end, until no more can be removed.
    refs = {node["$ref"]: True for _, node in walk(root) if "$ref" in node}
    targets = {ref: resolve(root, ref) for ref in refs}
    endless = {ref for ref, target in targets.items() if target is not None}
    count = -1
    while len(endless) != count:
        count = len(endless)
        endless = {ref for ref in endless if not _ends(targets[ref], endless)}
    return _ends(root, endless)


def _ends(schema: Schema, endless: Collection[str]) -> bool:
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
        prefix, rest = tuple_items(schema)
        items = [*prefix, rest][: schema.get("minItems", 0)]
        ways.append(all(_ends(child, endless) for child in items))
    if "object" in types(schema):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        if "patternProperties" in schema:
            rest = True  # a pattern may allow a required name
        needed = [properties.get(name, rest) for name in schema.get("required", ())]
        ways.append(all(_ends(child, endless) for child in needed))
    return any(ways)


def tuple_items(node: Node) -> tuple[list[Schema], Schema]:
    """Return the schemas of an array's first items, and the schema of the other items."""
    items = node.get("items", True)
    if isinstance(items, list):  # drafts up to 2019-09
        return items, node.get("additionalItems", True)
    return node.get("prefixItems", []), items
