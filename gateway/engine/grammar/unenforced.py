"""What of a JSON Schema no grammar holds: left out of what is compiled, and named by pointer.

llguidance, asked to be lenient, says in warnings what it leaves out; the rules here are for what it
refuses, or holds to something else, without one (of 1.9.1). A finished answer is checked by the
whole schema in any case.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote, urljoin

from gateway.engine.grammar.disjoint import are_disjoint
from gateway.engine.grammar.patterns import DATES, is_holdable, quotable
from gateway.engine.grammar.schemas import (
    NOTES,
    Node,
    Schema,
    can_end,
    endless_refs,
    escape,
    has_plain_refs,
    is_draft,
    is_number,
    reachable,
    rebuild,
    refusal,
    resolve,
    types,
    walk,
)

ROOT: Final = "#"
_LARGEST: Final = 2**53  # beyond it neighbouring integers are one double, and llguidance has those
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_COUNTS: Final = ("minProperties", "maxProperties")
_MOST_OPTIONAL: Final = 8  # properties, of which one at least is asked for: as many alternatives
_STEP_PLACES: Final = 6  # after the point: how near a number comes to an exclusive bound, at least
_DEFINITION: Final = re.compile(r"#(?:/(?:\$defs|definitions)/[^/]+)?")
_NOWHERE: Final = re.compile(r"(?:Anchor|Pointer) '(.*)' does not exist")
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: (\[.*\])")
# Keywords that ask nothing by themselves, and those that stand for another one.
_ASK_NOTHING: Final = frozenset(
    {"$dynamicAnchor", "$recursiveAnchor", "then", "else", "minContains", "maxContains"}
)
_PATTERNS: Final = 64  # that are compiled alone, to see which is wrong; all others may be
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
_WAYS: Final = frozenset({*_IN_PLACE, "minProperties"})
_CONSTRAINTS: Final = frozenset({"$ref", "allOf", "properties", "patternProperties", "required"})
_OPENING: Final = frozenset({"additionalProperties", "patternProperties", "$ref", *_IN_PLACE})
_RANGES: Final = (
    *(("minLength", "maxLength"), ("minItems", "maxItems"), _COUNTS),
    *(("minimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")),
)


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a schema that a grammar may hold, and pointers to the keywords that it does not.

    `nodes` are its subschemas that may apply to an answer, each with its pointer; `ways` the
    keywords of each that are alternatives by now, as the caller wrote them.
    """

    schema: Node
    nodes: Sequence[tuple[str, Node]]
    ways: Mapping[str, Sequence[str]]
    unenforced: tuple[str, ...]

    def naming(self, pointers: Iterable[str]) -> "Held":
        """Return the same with more pointers."""
        unenforced = dict.fromkeys((*self.unenforced, *pointers))
        return replace(self, unenforced=tuple(unenforced))


def hold(root: Schema, max_path: int) -> Held:
    """Leave out, and name, what llguidance is known not to hold. Changes the schema in place.

    Raises BadRequest for one that no finite value fits, or whose references lead nowhere.
    """
    if root is False:
        raise refusal("The JSON Schema `false` allows no answer.")
    schema: Node = {} if root is True else root
    nodes = reachable(schema, max_path)
    if endless := endless_refs(schema, (node for _, node in nodes)):
        schema = rebuild(schema, lambda node: _unless_endless(node, endless))
        nodes = reachable(schema, max_path) if isinstance(schema, dict) else []
    if not can_end(schema):
        raise refusal("The JSON Schema allows no finite answer: something required is impossible.")
    if has_plain_refs(schema):
        _hoist(schema, nodes)
    addresses = _addresses(schema)
    unenforced: list[str] = []
    ways = {place: [key for key in node if key in _WAYS] for place, node in nodes}
    for place, node in nodes:
        if "$ref" in node:
            is_local = _is_local(node["$ref"], addresses)
            # Beside inner addresses llguidance may follow a reference to another place.
            unenforced += [] if is_local and len(addresses) <= 1 else [f"{place}/$ref"]
            if not is_local:
                del node["$ref"]
        if "$schema" in node and not is_draft(node["$schema"]):
            del node["$schema"]  # llguidance would look for it
        for rule in _RULES:
            unenforced += [f"{place}/{key}" for key in rule(node)]
    for place, node in nodes:  # after all rules, which look into alternatives
        if "oneOf" in node:
            unenforced += [f"{place}/{key}" for key in _one_of(node, schema)]
    return Held(schema, nodes, ways, tuple(dict.fromkeys(unenforced)))


def _unless_endless(node: Schema, endless: frozenset[str]) -> Schema:
    return False if isinstance(node, dict) and node.get("$ref") in endless else node


def _hoist(root: Node, nodes: Iterable[tuple[str, Node]]) -> None:
    """Copy to `$defs` what references lead to elsewhere.

    Keywords on the way there may be rewritten, and some are none of JSON Schema's, such as
    OpenAPI's `components`.
    """
    moved: Node = {}
    for _, node in nodes:
        ref = node.get("$ref", "#")
        if ref.startswith("#") and not _DEFINITION.fullmatch(ref):
            moved[ref] = resolve(root, ref)
            node["$ref"] = f"#/$defs/{quote(escape(ref), safe='~')}"
    if moved:
        root["$defs"] = {**root.get("$defs", {}), **moved}


def _addresses(root: Node) -> list[str]:
    """List the addresses that a schema, and schemas inside it, give themselves."""
    base = str(root.get("$id", root.get("id", ""))).partition("#")[0]
    ids = [node.get("$id", node.get("id")) for _, node in walk(root)]
    names = [name.partition("#")[0] for name in ids if isinstance(name, str)]
    return [urljoin(base, name) for name in names if name]


def _is_local(ref: str, addresses: Sequence[str]) -> bool:
    address = ref.partition("#")[0]
    return not address or any(urljoin(base, address) in addresses for base in addresses)


# ── Rules: each leaves keywords out of a subschema, and yields those ──────────────────────────


def _items(node: Node) -> Iterator[str]:
    """Leave out `uniqueItems` where it asks nothing."""
    if "uniqueItems" in node and (not node["uniqueItems"] or node.get("maxItems", 2) <= 1):
        del node["uniqueItems"]
    yield from ()


def _large_numbers(node: Node) -> Iterator[str]:
    """Draw bounds in to what a double keeps exact; leave out those that would become wider."""
    for key in (*_LOWER, *_UPPER, "multipleOf"):
        bound = node.get(key)
        if not is_number(bound) or abs(bound) <= _LARGEST:
            continue
        if key in _LOWER and bound < 0:
            node[key] = -_LARGEST
        elif key in _UPPER and bound > 0:
            node[key] = _LARGEST
        else:
            del node[key]
            yield key


def _near_bounds(node: Node) -> Iterator[str]:
    """Write exclusive bounds of numbers less than 1 apart as the nearest inclusive ones.

    llguidance lets the bound itself through there.
    """
    lowest = [node[key] for key in _LOWER if is_number(node.get(key))]
    highest = [node[key] for key in _UPPER if is_number(node.get(key))]
    if "number" not in types(node) or not lowest or not highest:
        return
    if not 0 < min(highest) - max(lowest) < 1:
        return
    places = max(_STEP_PLACES, *(2 + _places(bound) for bound in (*lowest, *highest)))
    step = Decimal(10) ** -places
    for key, bound, sign, tighter in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        value = node.get(bound) if node.get(key) is True else node.get(key)  # draft 4 has a flag
        if is_number(value) and node.get(key, False) is not False:
            nearest = float(Decimal(str(value)) + sign * step)
            del node[key]
            node[bound] = tighter(nearest, node.get(bound, nearest))
    yield from ()


def _literals(node: Node) -> Iterator[str]:
    """Leave out constants that llguidance writes otherwise: large numbers, and a DEL."""
    for key in ("const", "enum"):
        if key in node and any(map(_is_miswritten, _scalars(node[key]))):
            del node[key]
            yield key


def _is_miswritten(value: Any) -> bool:
    if isinstance(value, str):
        return "\x7f" in value
    return is_number(value) and abs(value) > _LARGEST


def _counts(node: Node) -> Iterator[str]:
    """Leave out numbers of properties where some are optional, or more than one is undeclared.

    Undeclared names may repeat, so that only one of them counts.
    """
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
    """Leave out patterns that mean something else to llguidance, or repeat too much."""
    yield from _leave_patterns(node, lambda pattern: not is_holdable(pattern))
    if "pattern" in node:
        node["pattern"] = quotable(node["pattern"])
    elif node.get("format") in DATES:
        node["pattern"] = DATES[node.pop("format")]
    if "patternProperties" in node:
        named = node["patternProperties"]
        node["patternProperties"] = {quotable(pattern): named[pattern] for pattern in named}


def _leave_patterns(node: Node, is_wrong: Callable[[str], bool]) -> Iterator[str]:
    if "pattern" in node and is_wrong(node["pattern"]):
        del node["pattern"]
        yield "pattern"
    if any(map(is_wrong, node.get("patternProperties", ()))):
        yield from _leave_names(node)


def _leave_names(node: Node) -> Iterator[str]:
    """Leave out `patternProperties`, and what would forbid the names that they allow."""
    del node["patternProperties"]
    yield "patternProperties"
    if node.pop("additionalProperties", True) is not True:
        yield "additionalProperties"


_RULES: Final[Sequence[Callable[[Node], Iterator[str]]]] = (
    *(_items, _large_numbers, _near_bounds, _literals, _counts, _patterns),
)


def _one_of(node: Node, root: Node) -> Iterator[str]:
    """Write a `oneOf` as `anyOf`: the same, where no value fits two of its alternatives.

    That may take closed ones: what names no other property fits none that requires another.
    """
    ways = node.pop("oneOf")
    if not are_disjoint(ways, ways, node, root):
        closed = [_closed(way) for way in ways]
        if are_disjoint(closed, ways, node, root) and not _CONSTRAINTS & node.keys():
            ways = closed
        else:
            yield "oneOf"
    _ask_any(node, ways)


def _closed(way: Schema) -> Schema:
    """Return an alternative whose object has no undeclared properties, if it needs none."""
    is_open = isinstance(way, dict) and "properties" in way and not _OPENING & way.keys()
    if not is_open or not way["properties"].keys() >= set(way.get("required", ())):
        return way
    return {**way, "additionalProperties": False}


def _ask_any(node: Node, ways: Sequence[Schema]) -> None:
    if "anyOf" in node:
        node["allOf"] = [*node.get("allOf", ()), {"anyOf": ways}]
    else:
        node["anyOf"] = ways


def _places(bound: float) -> int:
    exponent = Decimal(str(bound)).normalize().as_tuple().exponent
    return -min(0, int(exponent))


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from _scalars(child)
    else:
        yield value


# ── What the compiler says ────────────────────────────────────────────────────────────────────


def warned(held: Held, warnings: Iterable[str]) -> Iterator[str]:
    """Yield pointers to the keywords that llguidance's warnings name; the root for what is unknown.

    Formats that it does not know are annotations.
    """
    keys = set[str]()
    for warning in warnings:
        match = _UNIMPLEMENTED.match(warning)
        if match:
            keys |= frozenset(json.loads(match[1])) - _ASK_NOTHING
        elif warning.startswith("min/maxProperties"):
            keys |= {*_COUNTS}
        elif not warning.startswith("Unknown format"):
            yield ROOT
    for place, node in held.nodes:
        yield from (f"{place}/{key}" for key in node if key in keys)
    if keys - {*_COUNTS} - {key for _, node in held.nodes for key in node}:  # a shape may count
        yield ROOT


def leave_out(held: Held, problem: str, is_broken: Callable[[str], bool]) -> Held | None:
    """Leave out, and name, the keywords that the compiler may have refused a schema for.

    None if there are none. `is_broken` tries a pattern alone.
    """
    pointers: list[str] = []
    tried: dict[str, bool] = {}

    def is_wrong(pattern: str) -> bool:
        if pattern not in tried:
            tried[pattern] = len(tried) >= _PATTERNS or is_broken(pattern)
        return tried[pattern]

    for place, node in held.nodes:
        keys: list[str] = []
        if "patternProperty" in problem:
            if any(f"/{pattern}/" in problem for pattern in node.get("patternProperties", ())):
                keys += _leave_names(node)
        elif any(word in problem for word in ("Resource", "Pointer", "Anchor")):
            if f"{place}/$ref" in held.unenforced and node.pop("$ref", None):
                keys.append("$ref")
        elif "circular" in problem:
            keys += _leave_circles(node)
        elif any(word in problem for word in ("regex", "look", "expressions")):
            keys += _leave_patterns(node, is_wrong)
        if _WAYS & {*keys}:
            keys = [*(key for key in keys if key not in _WAYS), *held.ways[place]]
        pointers += [f"{place}/{key}" for key in keys]
    return held.naming(pointers) if pointers else None


def _leave_circles(node: Node) -> Iterator[str]:
    """Leave out what stands beside a reference, and references beside something else."""
    siblings = node.keys() - NOTES - {"x-guidance", "$schema", "$id", "id"}
    if "$ref" in siblings:
        for key in sorted(siblings - {"$ref"}):
            del node[key]
            yield key
        return
    for key in _IN_PLACE:
        ways = node.get(key, ())
        is_shared = len(siblings) > 1 or (key == "allOf" and len(ways) > 1)
        if is_shared and any(isinstance(way, dict) and "$ref" in way for way in ways):
            del node[key]
            yield key


def why(held: Held, problem: str) -> str:
    """Return the reason why nothing compiles, in our words."""
    for place, node in held.nodes:
        for lower, upper in _RANGES:
            low, high = node.get(lower), node.get(upper)
            if is_number(low) and is_number(high) and low > high:
                return (
                    f"The JSON Schema keyword `{lower}` at {place} is above `{upper}`: "
                    f"{low} and {high} leave no value."
                )
        if node.get("enum") == []:
            return f"The JSON Schema keyword `enum` at {place} is empty: it allows no value."
    if "nsatisfiable" in problem or "no answer" in problem:
        return "The JSON Schema allows no answer: what it requires contradicts itself."
    if any(word in problem for word in ("max is", "too ", "limit", "level exceeded", "Unable")):
        return (
            "The JSON Schema is too wide or too deep to hold an answer to: it has too many "
            "properties, alternatives or repetitions in one place."
        )
    if match := _NOWHERE.match(problem):
        for place, node in held.nodes:
            if node.get("$ref", "").endswith(f"#{match[1]}"):
                return f"The JSON Schema keyword `$ref` at {place} leads nowhere: `{node['$ref']}`."
    reason = problem.partition("\n")[0].strip().rstrip(".")[:200]
    return f"The JSON Schema cannot be held by a grammar as it is combined: {reason}."


def check_strict(unenforced: Sequence[str]) -> None:
    """Raise BadRequest if something is left out, naming the keyword and its place."""
    if unenforced:
        place, _, keyword = unenforced[0].rpartition("/")
        what = f"keyword `{keyword}` at {place}" if place else "as it is combined"
        raise refusal(
            f"The JSON Schema {what} cannot be enforced here, and 'strict' asks for all of the "
            "schema."
        )


# ── The options of its form ───────────────────────────────────────────────────────────────────

COMPACT: Final[Mapping[str, Any]] = {"whitespace_flexible": False}  # or spaces have no end
_SPACE: Final = r"[ \t\n\r]|\\[tnr]|\\x(?:20|0[9AaDd])"
_WHITE_SPACE: Final = re.compile(  # a regex of what JSON has as white space, and of nothing else
    rf"(?:{_SPACE}|\[(?:{_SPACE})+\]|[*+?|()]|\(\?:|\{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}})*"
)
_WHITE_SPACE_CHARS: Final = 64
_ESCAPES: Final = 'nrbtf\\"'
_CONTROLS: Final = re.compile(r"\\u00[01]|\x7f")


def read_options(schema: Schema) -> Mapping[str, Any]:
    """Return llguidance's own options in a schema, `x-guidance`: those of white space.

    Raises BadRequest for any other: it would change what is held, or make the answer no JSON.
    """
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    allowed = {"whitespace_flexible": _is_boolean, "whitespace_pattern": _is_white_space}
    if not isinstance(options, dict) or not options.keys() <= allowed.keys():
        raise refusal(
            f"The JSON Schema keyword `x-guidance` may have {' and '.join(allowed)} only."
        )
    for name, value in options.items():
        if not allowed[name](value):
            raise refusal(
                f"The JSON Schema keyword `x-guidance` has a `{name}` that cannot be taken: "
                "whitespace_flexible is a boolean, whitespace_pattern a regex of JSON's white "
                f"space, of at most {_WHITE_SPACE_CHARS} characters."
            )
    return {**COMPACT, **options}


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool)


def _is_white_space(value: object) -> bool:
    is_short = isinstance(value, str) and len(value) <= _WHITE_SPACE_CHARS
    return is_short and _WHITE_SPACE.fullmatch(str(value)) is not None


def to_llguidance(schema: Node, options: Mapping[str, Any] = COMPACT) -> Node:
    """Write a schema as llguidance reads it, leniently, with the options of its form.

    A name could be spelled with `\\u` in many ways, and so stand beside its own declaration:
    only what can't be written otherwise, control characters, is spelled so, and then no object
    with declared names has others.
    """
    if _CONTROLS.search(json.dumps(schema)):
        schema = rebuild(schema, _without_others)
    else:
        options = {**options, "json_allowed_escapes": _ESCAPES}
    return {**schema, "x-guidance": {**options, "lenient": True}}


def _without_others(node: Schema) -> Schema:
    if isinstance(node, dict) and node.get("properties"):
        node["additionalProperties"] = False
    return node
