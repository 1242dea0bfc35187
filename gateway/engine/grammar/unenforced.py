"""Leaves out the keywords of a JSON Schema that no grammar enforces, and lists them.

The rules are for keywords that llguidance 1.9.1 refuses, or misreads without a warning.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any, Final

from llguidance import LLMatcher, grammar_from

from gateway.engine.grammar.patterns import OWN_FORMATS, as_ecma, is_holdable
from gateway.engine.grammar.schemas import (
    ROOT,
    Node,
    Schema,
    can_end,
    draft_of,
    is_number,
    reachable,
    rebuild,
    refusal,
    resolve,
    settle_refs,
    types,
)

_SMALLEST: Final = 1e-50  # smaller bounds have too many zeros for llguidance 1.9.1
_LARGEST: Final = 2**53  # doubles, which llguidance uses, hold larger integers inexactly
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_COUNTS: Final = ("minProperties", "maxProperties")
_COUNTED: Final = {"minLength", "maxLength", "minItems", "maxItems", *_COUNTS}
_MOST_COUNTED: Final = 2**32 - 1  # llguidance refuses larger counts
_MOST_OPTIONAL: Final = 8  # optional properties that become alternatives
_MOST_COMPARED: Final = 64  # alternatives of a `oneOf`, compared pair by pair
_FAULT: Final = re.compile(r"^regex parse error:.*^error: (.+)$", re.MULTILINE | re.DOTALL)
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: (\[.*\])")
# Keywords that constrain nothing without another keyword.
_ASK_NOTHING: Final = frozenset(
    {"$dynamicAnchor", "$recursiveAnchor", "then", "else", "minContains", "maxContains"}
)
_CONSTRAINTS: Final = frozenset({"$ref", "allOf", "properties", "patternProperties", "required"})
_OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
)
_RANGES: Final = (
    *(("minLength", "maxLength"), ("minItems", "maxItems"), _COUNTS),
    *(("minimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")),
)
_REASONS: Final[Mapping[str, str]] = {  # by words of llguidance's message
    "nsatisfiable": "allows no answer: its requirements contradict each other",
    "no answer": "allows no answer: its requirements contradict each other",
    "circular": "cannot be enforced by a grammar: it has keywords beside a `$ref` that leads in a "
    "circle",
    "not disjoint": "cannot be enforced by a grammar: a name may fit two of its "
    "`patternProperties`",
    **dict.fromkeys(
        ("max is", "too ", "limit", "level exceeded", "Unable"),
        "is too wide or too deep to enforce: it has too many properties, alternatives or "
        "repetitions in one place",
    ),
}


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a schema that a grammar may enforce."""

    schema: Node
    nodes: Sequence[tuple[str, Node]]  # subschemas after their JSON pointers
    unenforced: tuple[str, ...]  # JSON pointers to keywords that were left out

    def naming(self, pointers: Iterable[str]) -> "Held":
        return replace(self, unenforced=tuple(dict.fromkeys((*self.unenforced, *pointers))))

    def warned(self, warnings: Iterable[str]) -> "Held":
        """Return a copy whose `unenforced` also has the keywords in llguidance's warnings."""
        keys, pointers = set[str](), list[str]()
        for warning in warnings:
            match = _UNIMPLEMENTED.match(warning)
            if match:
                keys |= frozenset(json.loads(match[1])) - _ASK_NOTHING
            elif warning.startswith("min/maxProperties"):
                keys |= {*_COUNTS}
            elif not warning.startswith("Unknown format"):  # an unknown format is an annotation
                pointers.append(ROOT)
        for place, node in self.nodes:
            pointers += [f"{place}/{key}" for key in node if key in keys]
        return self.naming(pointers)


def hold(root: Schema, max_path: int) -> Held:
    """Leave out, in place, the keywords that llguidance is known not to enforce.

    Raises BadRequest for a schema that no finite value fits, or whose references lead nowhere.
    """
    if root is False:
        raise refusal("The JSON Schema `false` allows no answer.")
    schema: Node = {} if root is True else root
    lost, callers = settle_refs(schema)
    nodes = reachable(schema, max_path, callers)
    if not can_end(schema):
        raise refusal("The JSON Schema allows no finite answer: something required is impossible.")
    unenforced: list[str] = []
    for place, node in nodes:
        if id(node) in lost:
            unenforced.append(f"{place}/$ref")
        if "$schema" in node:
            # llguidance would try to retrieve an unknown URL.
            node["$schema"] = draft_of(node).value
        for rule in _RULES:
            unenforced += [f"{place}/{key}" for key in rule(node)]
    # Alternatives are compared after the rules have been applied to all of them.
    for place, node in nodes:
        if "oneOf" in node and not _hold_one_of(node, schema):
            unenforced.append(f"{place}/oneOf")
    return Held(schema, nodes, tuple(dict.fromkeys(unenforced)))


# ── Rules: each changes a subschema, and yields the keywords that it leaves out ───────────────


def _items(node: Node) -> Iterator[str]:
    """Leave out `uniqueItems` if it constrains nothing."""
    if "uniqueItems" in node and (not node["uniqueItems"] or node.get("maxItems", 2) <= 1):
        del node["uniqueItems"]
    yield from ()


def _large_numbers(node: Node) -> Iterator[str]:
    """Reduce or leave out numbers that llguidance refuses or computes inexactly."""
    for key in _COUNTED & node.keys():
        node[key] = min(node[key], _MOST_COUNTED)
    for key in (*_LOWER, *_UPPER, "multipleOf"):
        bound = node.get(key)
        is_tiny = is_number(bound) and 0 < abs(bound) < _SMALLEST and key != "multipleOf"
        if not is_number(bound) or (abs(bound) <= _LARGEST and not is_tiny):
            continue
        if is_tiny:
            del node[key]
            yield key
        elif key in _LOWER and bound < 0:
            node[key] = -_LARGEST
        elif key in _UPPER and bound > 0:
            node[key] = _LARGEST
        else:
            del node[key]
            yield key


def _near_bounds(node: Node) -> Iterator[str]:
    """Make bounds that are less than 1 apart inclusive, because llguidance treats them so."""
    lowest = [node[key] for key in _LOWER if is_number(node.get(key))]
    highest = [node[key] for key in _UPPER if is_number(node.get(key))]
    if "number" not in types(node) or not lowest or not highest:
        return
    if min(highest) - max(lowest) >= 1:
        return
    for inclusive, exclusive in (_LOWER, _UPPER):
        bound = node.get(exclusive, False)
        if bound is not False:
            del node[exclusive]
            if is_number(bound):  # in draft 4 it is a boolean instead
                node.setdefault(inclusive, bound)
            yield exclusive


def _literals(node: Node) -> Iterator[str]:
    """Leave out constants that llguidance writes wrongly."""
    for key in ("const", "enum"):
        if key in node and any(map(_is_miswritten, _scalars(node[key]))):
            del node[key]
            yield key


def _is_miswritten(value: Any) -> bool:
    if isinstance(value, str):
        return "\x7f" in value
    return is_number(value) and abs(value) > _LARGEST


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from _scalars(child)
    else:
        yield value


def _counts(node: Node) -> Iterator[str]:
    """Leave out counts of properties that may be optional or undeclared."""
    # An answer may repeat an undeclared name, so only one undeclared property can be counted.
    properties, required = node.get("properties", {}), node.get("required", ())
    optional = [name for name in properties if name not in required]
    minimum, maximum = node.get("minProperties", 0), node.get("maxProperties")
    if minimum <= len(required):
        node.pop("minProperties", None)
    elif minimum == len(required) + 1 and 0 < len(optional) <= _MOST_OPTIONAL:
        del node["minProperties"]
        _ask_any(node, [{"required": [name]} for name in optional])
    elif optional or minimum > len(required) + 1:
        del node["minProperties"]
        yield "minProperties"
    if maximum is None:
        return
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    if is_closed and len(properties.keys() | set(required)) <= maximum:
        del node["maxProperties"]
    elif optional:
        del node["maxProperties"]
        yield "maxProperties"


def _patterns(node: Node) -> Iterator[str]:
    """Leave out patterns that llguidance cannot enforce, and translate the others."""
    if "pattern" in node:
        if is_holdable(node["pattern"]):
            node["pattern"] = as_ecma(node["pattern"])
        else:
            del node["pattern"]
            yield "pattern"
    elif node.get("format") in OWN_FORMATS:
        node["pattern"] = OWN_FORMATS[node.pop("format")]
    named = node.get("patternProperties", {})
    if all(map(is_holdable, named)):
        if named:
            node["patternProperties"] = {as_ecma(pattern): named[pattern] for pattern in named}
        return
    del node["patternProperties"]
    yield "patternProperties"
    # `additionalProperties` would also forbid the names that these patterns allowed.
    if node.pop("additionalProperties", True) is not True:
        yield "additionalProperties"


_RULES: Final[Sequence[Callable[[Node], Iterator[str]]]] = (
    *(_items, _large_numbers, _near_bounds, _literals, _counts, _patterns),
)


# ── Alternatives that exclude each other ──────────────────────────────────────────────────────


def _hold_one_of(node: Node, root: Node) -> bool:
    """Replace `oneOf` by `anyOf`, and return True if no value fits two of the alternatives."""
    ways = node.pop("oneOf")
    targets = [_target(way, root) for way in ways]
    required = frozenset(node.get("required", ()))
    is_held = len(ways) <= _MOST_COMPARED and all(
        _are_apart(one, other, _kinds(node), required) for one, other in combinations(targets, 2)
    )
    # Closed alternatives are apart if one requires a property that the other does not declare.
    if not is_held and len(ways) <= _MOST_COMPARED and not _CONSTRAINTS & node.keys():
        closed = [_closed(way) for way in ways]
        is_held = all(
            _are_apart(closed[i], targets[j], _kinds(node), required)
            for i, j in permutations(range(len(ways)), 2)
        )
        if is_held:
            ways = closed
    _ask_any(node, ways)
    return is_held


def _ask_any(node: Node, ways: Sequence[Schema]) -> None:
    if "anyOf" in node:
        node["allOf"] = [*node.get("allOf", ()), {"anyOf": ways}]
    else:
        node["anyOf"] = ways


def _are_apart(one: Schema, other: Schema, kinds: frozenset[str], required: frozenset[str]) -> bool:
    """Return True if no value of these types and with these properties fits both schemas."""
    if _differ(one, other):
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    shared = kinds & _kinds(one) & _kinds(other)
    if shared != {"object"}:
        return not shared
    # No object fits both schemas if they differ in a property that it must have.
    names = required.union(one.get("required", ()), other.get("required", ()))
    return any(_differ(_property(one, name), _property(other, name)) for name in names)


def _differ(one: Schema, other: Schema) -> bool:
    """Return True if the types or enumerated values of two schemas have nothing in common."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return not values & other_values
    return not _kinds(one) & _kinds(other)


def _values(node: Node) -> frozenset[str] | None:
    """Return the values that a schema enumerates, as JSON, or None."""
    values = node.get("enum")
    if "const" in node:
        values = [node["const"]]
    # The JSON texts of equal values may differ, such as 1.0 and 1.
    if values is None or any(isinstance(value, (float, list, dict)) for value in values):
        return None
    return frozenset(map(json.dumps, values))


def _kinds(node: Node) -> frozenset[str]:
    """Return the JSON types that a schema allows, with integers if it allows numbers."""
    kinds = types(node)
    return kinds | {"integer"} if "number" in kinds else kinds


def _target(schema: Schema, root: Node) -> Schema:
    if not isinstance(schema, dict) or "$ref" not in schema:
        return schema
    return resolve(root, schema["$ref"])


def _property(node: Node, name: str) -> Schema:
    if name in node.get("properties", {}):
        return node["properties"][name]
    return node.get("additionalProperties") is not False or "patternProperties" in node


def _closed(way: Schema) -> Schema:
    """Forbid undeclared properties in an alternative, unless it may need some."""
    is_open = isinstance(way, dict) and "properties" in way and not _OPENING & way.keys()
    if not is_open or not way["properties"].keys() >= set(way.get("required", ())):
        return way
    return {**way, "additionalProperties": False}


# ── The compiler's messages ───────────────────────────────────────────────────────────────────


def why(part: Held, problem: str) -> str:
    """Return a message for the caller that explains llguidance's message, `problem`."""
    for place, node in part.nodes:
        for lower, upper in _RANGES:
            low, high = node.get(lower), node.get(upper)
            if is_number(low) and is_number(high) and low > high:
                return (
                    f"The JSON Schema keyword `{lower}` at {place} is above `{upper}`: "
                    f"{low} and {high} leave no value."
                )
        if node.get("enum") == []:
            return f"The JSON Schema keyword `enum` at {place} is empty: it allows no value."
        named = [("patternProperties", name) for name in node.get("patternProperties", ())]
        for key, pattern in [("pattern", node.get("pattern", "")), *named]:
            fault = _FAULT.search(problem) and _FAULT.search(_problem_of(pattern))
            if fault:
                return f"The JSON Schema keyword `{key}` at {place} cannot be read: {fault[1]}."
    for words, reason in _REASONS.items():
        if words in problem:
            return f"The JSON Schema {reason}."
    reason = problem.partition("\n")[0].strip().rstrip(".")[:200]
    return f"No grammar can enforce the JSON Schema in this combination: {reason}."


def _problem_of(pattern: str) -> str:
    return LLMatcher.validate_grammar(grammar_from("json_schema", json.dumps({"pattern": pattern})))


def check_strict(unenforced: Sequence[str]) -> None:
    """Raise BadRequest if any keyword is unenforced."""
    if unenforced:
        place, _, keyword = unenforced[0].rpartition("/")
        what = f"keyword `{keyword}` at {place}" if place else "as a whole"
        raise refusal(
            f"The JSON Schema {what} cannot be enforced here, and 'strict' asks for all of the "
            "schema."
        )


# ── llguidance's options ──────────────────────────────────────────────────────────────────────

# With flexible white space, a model might write spaces forever.
COMPACT: Final[Mapping[str, Any]] = {"whitespace_flexible": False}
_ESCAPES: Final = 'nrbtf\\"'
_CONTROLS: Final = re.compile(r"\\u00[01]|\x7f")


def read_options(schema: Schema) -> Mapping[str, Any]:
    """Return the options for llguidance that a schema sets. Raises BadRequest."""
    # Any other option would change the constraints, or make the answer invalid JSON.
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if options not in ({}, {"whitespace_flexible": False}, {"whitespace_flexible": True}):
        raise refusal(
            "The JSON Schema keyword `x-guidance` may only set whitespace_flexible, a boolean."
        )
    return {"whitespace_flexible": bool(options.get("whitespace_flexible"))}


def to_llguidance(schema: Node, options: Mapping[str, Any] = COMPACT) -> Node:
    # A declared name that is written with `\u` escapes would count as undeclared. So these escapes
    # are allowed only if the schema needs them for control characters, and objects are closed then.
    if _CONTROLS.search(json.dumps(schema)):
        schema = rebuild(schema, _without_others)
    else:
        options = {**options, "json_allowed_escapes": _ESCAPES}
    return {**schema, "x-guidance": {**options, "lenient": True}}


def _without_others(node: Schema) -> Schema:
    if isinstance(node, dict) and node.get("properties"):
        node["additionalProperties"] = False
    return node
