"""Leaves out the keywords of a JSON Schema that no grammar enforces, and lists them as JSON
pointers.

In lenient mode, llguidance itself leaves out some keywords and names them in warnings. The rules
here are for keywords that llguidance 1.9.1 refuses or misreads without a warning. A finished answer
is checked against the whole schema in any case.
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

_SMALLEST: Final = 1e-50  # smaller bounds are left out: llguidance 1.9.1 refuses a hundred zeros
# llguidance computes with doubles, which cannot tell larger neighbouring integers apart.
_LARGEST: Final = 2**53
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_COUNTS: Final = ("minProperties", "maxProperties")
_COUNTED: Final = {"minLength", "maxLength", "minItems", "maxItems", *_COUNTS}
# Larger counts are reduced to this one: no answer has more parts, and llguidance refuses them.
_MOST_COUNTED: Final = 2**32 - 1
# The most optional properties for "at least one must be present": each becomes an alternative.
_MOST_OPTIONAL: Final = 8
_MOST_COMPARED: Final = 64  # alternatives of a `oneOf`, compared pair by pair
_FAULT: Final = re.compile(r"^regex parse error:.*^error: (.+)$", re.MULTILINE | re.DOTALL)
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: (\[.*\])")
# Keywords that constrain nothing without another keyword: `unenforced` lists the other keyword.
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
_REASONS: Final[Mapping[str, str]] = {  # keys are words of the compiler's message
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
    """The part of a schema that a grammar may enforce, and JSON pointers to the keywords left out.

    `nodes` are the schema's subschemas that may apply to an answer, each with its JSON pointer.
    """

    schema: Node
    nodes: Sequence[tuple[str, Node]]
    unenforced: tuple[str, ...]

    def naming(self, pointers: Iterable[str]) -> "Held":
        """Return a copy with these pointers added to `unenforced`."""
        return replace(self, unenforced=tuple(dict.fromkeys((*self.unenforced, *pointers))))

    def warned(self, warnings: Iterable[str]) -> "Held":
        """Return a copy whose `unenforced` also has the keywords in llguidance's warnings. For a
        warning of an unknown kind, the root is added.
        """
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
    """Leave out the keywords that llguidance is known not to enforce, and list them. Changes the
    schema in place.

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
            # If `$schema` were a URL that llguidance doesn't know, it would try to retrieve it.
            node["$schema"] = draft_of(node).value
        for rule in _RULES:
            unenforced += [f"{place}/{key}" for key in rule(node)]
    # Alternatives are compared only once the rules have been applied to all of them.
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
    """Reduce counts and bounds to numbers that llguidance accepts and computes exactly. Leave out
    bounds that would allow more values if they were reduced.
    """
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
    """Leave out constants that llguidance writes wrongly: large numbers, and texts with a DEL."""
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
    """Leave out counts of properties if some are optional, or more than one is undeclared."""
    # An answer may have the same undeclared name several times, so no more than one undeclared
    # property can be counted.
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
    """Leave out patterns that llguidance reads differently, or that repeat too much."""
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
    # If `additionalProperties` stayed, it would also forbid the names that the patterns allowed.
    if node.pop("additionalProperties", True) is not True:
        yield "additionalProperties"


_RULES: Final[Sequence[Callable[[Node], Iterator[str]]]] = (
    *(_items, _large_numbers, _near_bounds, _literals, _counts, _patterns),
)


# ── Alternatives of which only one may fit ────────────────────────────────────────────────────


def _hold_one_of(node: Node, root: Node) -> bool:
    """Replace `oneOf` by `anyOf`. Return True if no value fits two of the alternatives, so that
    both keywords mean the same.
    """
    ways = node.pop("oneOf")
    targets = [_target(way, root) for way in ways]
    required = frozenset(node.get("required", ()))
    is_held = len(ways) <= _MOST_COMPARED and all(
        _are_apart(one, other, _kinds(node), required) for one, other in combinations(targets, 2)
    )
    # Alternatives may be apart once they are closed: an object without undeclared properties
    # doesn't fit another alternative that requires one of these.
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
    """Return True if no value fits both schemas. Only values of the types `kinds` count, and only
    objects that have the properties `required`.
    """
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
    """Return True if two schemas surely have no value in common, judging by their types and
    enumerated values.
    """
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return not values & other_values
    return not _kinds(one) & _kinds(other)


def _values(node: Node) -> frozenset[str] | None:
    """Return the values that a schema enumerates, as JSON; None if it enumerates none, or if equal
    values may have different JSON texts.
    """
    values = node.get("enum")
    if "const" in node:
        values = [node["const"]]
    # 1.0 equals 1, also inside lists and objects, but their texts differ.
    if values is None or any(isinstance(value, (float, list, dict)) for value in values):
        return None
    return frozenset(map(json.dumps, values))


def _kinds(node: Node) -> frozenset[str]:
    """Return the JSON types that a schema allows. If it allows numbers, it allows integers too."""
    kinds = types(node)
    return kinds | {"integer"} if "number" in kinds else kinds


def _target(schema: Schema, root: Node) -> Schema:
    if not isinstance(schema, dict) or "$ref" not in schema:
        return schema
    return resolve(root, schema["$ref"])


def _property(node: Node, name: str) -> Schema:
    """Return the schema of a declared property. For an undeclared one, return True if it may be
    present.
    """
    if name in node.get("properties", {}):
        return node["properties"][name]
    return node.get("additionalProperties") is not False or "patternProperties" in node


def _closed(way: Schema) -> Schema:
    """Return an alternative with undeclared properties forbidden. If it may need some, return it
    unchanged.
    """
    is_open = isinstance(way, dict) and "properties" in way and not _OPENING & way.keys()
    if not is_open or not way["properties"].keys() >= set(way.get("required", ())):
        return way
    return {**way, "additionalProperties": False}


# ── The compiler's messages ───────────────────────────────────────────────────────────────────


def why(part: Held, problem: str) -> str:
    """Return the reason why a schema doesn't compile, in words for the caller. `problem` is
    llguidance's message.
    """
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
    """Return llguidance's message for a schema that has only this pattern."""
    return LLMatcher.validate_grammar(grammar_from("json_schema", json.dumps({"pattern": pattern})))


def check_strict(unenforced: Sequence[str]) -> None:
    """Raise BadRequest, naming the first keyword and its place, if any keyword is unenforced."""
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
    """Return the only one of llguidance's options that a schema may set in `x-guidance`."""
    # Any other option would change the constraints, or make the answer invalid JSON.
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if options not in ({}, {"whitespace_flexible": False}, {"whitespace_flexible": True}):
        raise refusal(
            "The JSON Schema keyword `x-guidance` may only set whitespace_flexible, a boolean."
        )
    return {"whitespace_flexible": bool(options.get("whitespace_flexible"))}


def to_llguidance(schema: Node, options: Mapping[str, Any] = COMPACT) -> Node:
    """Return a schema for llguidance, with these options and lenient mode."""
    # A model could write a declared name with `\\u` escapes, and it would count as undeclared. So
    # `\\u` is allowed only if the schema has control characters, which cannot be written otherwise.
    # In that case, objects with declared names may have no undeclared ones.
    if _CONTROLS.search(json.dumps(schema)):
        schema = rebuild(schema, _without_others)
    else:
        options = {**options, "json_allowed_escapes": _ESCAPES}
    return {**schema, "x-guidance": {**options, "lenient": True}}


def _without_others(node: Schema) -> Schema:
    if isinstance(node, dict) and node.get("properties"):
        node["additionalProperties"] = False
    return node
