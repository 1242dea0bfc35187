"""What of a JSON Schema a grammar can hold an answer to, and what is left to be checked.

In two steps. `translated` says exactly the same in keywords that llguidance has; `held` then
leaves out what it has none for, naming each keyword so left out by its JSON pointer. Nothing it
keeps allows more than the schema does, but for what is named.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from gateway.engine.grammar.disjoint import Proofs
from gateway.engine.grammar.drafts import is_place
from gateway.engine.grammar.patterns import DATES, FORMATS, all_but, one_of
from gateway.engine.grammar.schemas import (
    NOTES,
    TYPES,
    Node,
    Schema,
    children,
    escaped,
    rebuilt,
    resolve,
    types,
    walk,
)

Tighten: TypeAlias = Callable[[Schema], Schema]

_UNHELD: Final = (
    *("not", "uniqueItems", "contains", "propertyNames", "dependentRequired", "dependentSchemas"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
_IN_PLACE: Final = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf")
_CONDITIONS: Final = ("if", "dependentSchemas", "then", "else")
# What says something else, or less, by what stands beside it.
_BY_SIBLINGS: Final = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("prefixItems", "items", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("if", "then", "else"),
    }
)
_LARGEST: Final = 2**53  # beyond it neighbouring integers are one double, and llguidance has those
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST_WAYS: Final = 16
_OLDER: Final = {"prefixItems": "items", "items": "additionalItems"}


@dataclass(frozen=True, slots=True)
class Held:
    """A schema for a grammar, and pointers to the caller's keywords that it says nothing of."""

    schema: Schema
    unenforced: tuple[str, ...] = ()


# ── The same in other words ──────────────────────────────────────────────────────────────────


def translated(schema: Schema, *, conditions: int) -> Schema:
    """Say the same in keywords that llguidance has, where there are such.

    At most so many `conditions` become alternatives: each may double what is compiled.
    """
    left = conditions

    def change(node: Schema) -> Schema:
        nonlocal left
        if not isinstance(node, dict):
            return node
        for step in (_formatted, _evaluated, _plain_not, _plain_contains, _named):
            changed = step(node)
            if changed is False:
                return False
            node = changed
        node, found = _conditional(node, left)
        left -= len(found)
        for ways in found:
            node = _and(node, {"anyOf": ways})
        return node

    return rebuilt(schema, change)


def _is_plain(schema: Schema) -> bool:
    """Tell whether all of a schema can be held: what is not must keep the caller's place."""
    beyond = {*_UNHELD, "if", "oneOf", "minProperties", "maxProperties"}
    return all(not beyond & node.keys() for _, node in walk(schema))


def _and(node: Node, more: Schema) -> Node:
    """Ask both; what the node leaves open is said in it, the rest beside it."""
    if more is True:
        return node
    if isinstance(more, dict):
        is_heard = _BY_SIBLINGS & more.keys() and _BY_SIBLINGS & node.keys()
        if not is_heard and not more.keys() & node.keys():
            return {**node, **more}
    return {**node, "allOf": [*node.get("allOf", ()), more]}


def _formatted(node: Node) -> Node:
    """Write dates as patterns; a format that is not known says nothing."""
    name = node.get("format")
    if name is None or (isinstance(name, str) and name in FORMATS):
        return node
    node = {key: value for key, value in node.items() if key != "format"}
    return _and(node, {"pattern": DATES[name]}) if name in DATES else node


def _plain_not(node: Node) -> Schema:
    if "not" not in node:
        return node
    other = opposite(node["not"])
    if other is None or not _is_plain(other):
        return node
    return False if other is False else _and({k: v for k, v in node.items() if k != "not"}, other)


def opposite(schema: Schema) -> Schema | None:
    """Return a schema of all that doesn't fit; None where these keywords have no words for it."""
    if isinstance(schema, bool):
        return not schema
    keys = schema.keys() - NOTES
    if not keys:
        return False
    if keys == {"not"}:
        return schema["not"]
    if keys == {"type"}:
        return _other_types(schema)
    if keys <= {"const", "enum", "type"} and keys & {"const", "enum"}:
        return _other_values(schema)
    if keys <= {"required", "properties", "type"} and schema.get("type", "object") == "object":
        return _other_objects(schema)
    for key, joined in (("anyOf", "allOf"), ("allOf", "anyOf")):
        if keys == {key}:
            others = [opposite(each) for each in schema[key]]
            return None if None in others else {joined: others}
    return None


def _other_types(schema: Node) -> Schema | None:
    named = types(schema)
    if "number" in named:
        named |= {"integer"}
    elif "integer" in named:
        return None  # fractions alone are no type
    others = sorted(TYPES - named - ({"integer"} if "number" not in named else set()))
    return {"type": others} if others else False


def _other_values(schema: Node) -> Schema | None:
    """Exclude strings, null and one boolean. Numbers and larger values are past words."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if "type" in schema and types(schema) != {"string"}:
        return None
    if not all(value is None or isinstance(value, (bool, str)) for value in values):
        return None
    if "type" in schema:
        values = [value for value in values if isinstance(value, str)]
    ways: Node = {}
    if words := [value for value in values if isinstance(value, str)]:
        pattern = all_but(words)
        if pattern is None:
            return None
        ways["pattern"] = pattern
    without = {"null"} if None in values else set()
    booleans = {value for value in values if isinstance(value, bool)}
    without |= {"boolean"} if len(booleans) == 2 else set()
    if without:
        ways["type"] = sorted(TYPES - without - {"integer"})
    if len(booleans) == 1:
        kinds = sorted(TYPES - {"boolean", "integer"})
        ways["anyOf"] = [{"type": kinds}, {"const": not booleans.pop()}]
    return ways


def _other_objects(schema: Node) -> Schema | None:
    """Miss a required property, have one that doesn't fit, or be no object."""
    required = schema.get("required", [])
    ways: list[Schema] = [{"type": "object", "properties": {name: False}} for name in required]
    for name, own in schema.get("properties", {}).items():
        other = opposite(own)
        if other is None:
            return None
        if other is not False:
            ways.append({"type": "object", "properties": {name: other}, "required": [name]})
    if "type" in schema:
        ways.append({"type": sorted(TYPES - {"object", "integer"})})
    if not ways:
        return False
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


def _plain_contains(node: Node) -> Node:
    """Count items where `contains` asks nothing of them; leave out what asks for none."""
    if "contains" not in node:
        return node
    least, most = node.get("minContains", 1), node.get("maxContains")
    rest = {k: v for k, v in node.items() if k not in ("contains", "minContains", "maxContains")}
    if least == 0 and most is None:
        return rest
    if node["contains"] in (True, {}):
        rest = _and(rest, {"minItems": least})
        return rest if most is None else _and(rest, {"maxItems": most})
    return node


def _named(node: Node) -> Node:
    """Hold names to `propertyNames`: an enumeration, or one pattern."""
    names = node.get("propertyNames")
    if names is None:
        return node
    rest = {key: value for key, value in node.items() if key != "propertyNames"}
    if names is True:
        return rest
    if names is False:
        return {**rest, **_with_names(rest, ())} if "patternProperties" not in rest else node
    keys = names.keys() - NOTES
    if "type" in keys and "string" in types(names):
        keys -= {"type"}
    if not keys:
        return rest
    if "patternProperties" in rest:
        return node
    if keys in ({"enum"}, {"const"}):
        words = names.get("enum", [names.get("const")])
        return {**rest, **_with_names(rest, [word for word in words if isinstance(word, str)])}
    if rest.get("properties"):
        return node
    if keys == {"pattern"}:
        pattern = names["pattern"]
    elif keys <= {"minLength", "maxLength"}:
        pattern = f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
    else:
        return node
    value = rest.pop("additionalProperties", True)
    return {**rest, "patternProperties": {pattern: value}, **_CLOSED}


_CLOSED: Final[Mapping[str, Any]] = {"additionalProperties": False}


def _with_names(node: Node, names: Sequence[str]) -> Node:
    """Close an object to all but these names, each as it was."""
    own, rest = node.get("properties", {}), node.get("additionalProperties", True)
    others = [name for name in names if name not in own]
    kept = {name: own[name] if name in names else False for name in own}
    made: Node = {"properties": kept, **_CLOSED}
    if others and rest is not False:
        made["patternProperties"] = {one_of(others): rest}
    return made


def _evaluated(node: Node) -> Node:
    """Take `unevaluated…` for what is additional where nothing else could evaluate it.

    A `not` cannot: what it holds has to fail, and what fails evaluates nothing.
    """
    if any(key in node for key in (*_IN_PLACE, *_CONDITIONS)):
        return node
    for key, plain in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if key in node and not (key == "unevaluatedItems" and "contains" in node):
            value = node[key]
            node = {k: v for k, v in node.items() if k != key}
            node.setdefault(plain, value)
    return node


def _conditional(node: Node, most: int) -> tuple[Node, list[list[Schema]]]:
    """Take at most so many conditions out of a node, each as the ways to meet it."""
    node, found = dict(node), list[list[Schema]]()
    if "if" in node:
        asked, then, other = (node.get(key, True) for key in ("if", "then", "else"))
        negated = opposite(asked)
        parts = (asked, then, negated, other)
        if "then" not in node and "else" not in node:
            node.pop("if")
        elif negated is not None and most > 0 and all(map(_is_plain, parts)):
            node = {k: v for k, v in node.items() if k not in ("if", "then", "else")}
            found.append([{"allOf": [asked, then]}, {"allOf": [negated, other]}])
    needs = dict(node.pop("dependentRequired", {}))
    found += [
        [{"properties": {name: False}}, {"required": [name, *needs.pop(name)]}]
        for name in list(needs)[: max(0, most - len(found))]
    ]
    return (node | {"dependentRequired": needs} if needs else node), found


# ── What is left out ─────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Holder:
    """One pass over a schema. `tighten` is what closes an alternative of a `oneOf`, if any may."""

    root: Schema
    tighten: Tighten | None
    leaves: frozenset[str]  # places of keywords that are known not to compile
    is_older: bool
    unenforced: list[str] = field(default_factory=list)
    proofs: Proofs = field(init=False)
    live: frozenset[int] = field(init=False)
    alive: list[bool] = field(default_factory=list)  # of the subschemas one is in, outermost first

    def __post_init__(self) -> None:
        self.proofs = Proofs(self.root)
        self.live = frozenset(_live(self.root))

    def hold(self, schema: Schema, place: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        self.alive.append(id(schema) in self.live)
        node = self._held(schema, place)
        self.alive.pop()
        return node

    def _held(self, schema: Node, place: str) -> Node:
        node = dict(schema)
        self._leave(node, place)
        for key in [key for key in node if f"{place}/{key}" in self.leaves]:
            del node[key]
            self._name(f"{place}/{key}")
        was_open = "patternProperties" not in schema or "patternProperties" in node
        if not was_open and node.pop("additionalProperties", True) is not True:
            self._name(f"{place}/additionalProperties")  # it would forbid what patterns allow
        for key, value in node.items():
            node[key] = self._held_child(key, value, place, node)
        if "oneOf" in node:
            ways = node.pop("oneOf")
            node = _and(node, {"anyOf": self._one_of(schema, ways, place)})
        return self._counted(node, place)

    def _held_child(self, key: str, value: Any, place: str, node: Node) -> Any:
        at = f"{place}/{key}"
        if self.is_older and key in _OLDER and "prefixItems" in node:
            at = f"{place}/{_OLDER[key]}"
        if key in ("items", "additionalProperties") and isinstance(value, dict):
            return self.hold(value, at)
        if key in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            return [self.hold(child, f"{at}/{i}") for i, child in enumerate(value)]
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            return {
                name: self.hold(each, name if is_place(name) else f"{at}/{escaped(name)}")
                for name, each in value.items()
            }
        return value

    def _leave(self, node: Node, place: str) -> None:
        if node.get("uniqueItems") and node.get("maxItems", 2) <= 1:
            del node["uniqueItems"]
        for key in _UNHELD:
            if key in node:
                del node[key]
                is_split = self.is_older and key.startswith("dependent")
                self._name(f"{place}/{'dependencies' if is_split else key}")
        if "if" in node:
            self._name(f"{place}/if")
        for key in ("if", "then", "else", "minContains", "maxContains"):
            node.pop(key, None)
        ref = node.get("$ref")
        if isinstance(ref, str) and resolve(self.root, ref) is None:
            del node["$ref"]
            self._name(f"{place}/$ref")
        for key in (*_BOUNDS, "multipleOf", "const", "enum"):
            if any(abs(number) > _LARGEST for number in _numbers(node.get(key))):
                del node[key]
                self._name(f"{place}/{key}")
        for key in ("const", "enum"):  # llguidance leaves the character out of literals
            if any("\x7f" in text for text in _texts(node.get(key))):
                del node[key]
                self._name(f"{place}/{key}")

    def _name(self, pointer: str) -> None:
        if self.alive[-1] and pointer not in self.unenforced:
            self.unenforced.append(pointer)

    def _one_of(self, schema: Node, ways: list[Schema], place: str) -> list[Schema]:
        """Choose the ways of which no two share a value: then any of them is exactly one.

        A way is held to its own form only as long as that shares nothing with any other way as
        the caller wrote it; one that lies within another is never the only one.
        """
        whole: list[Schema] = schema["oneOf"]
        beside = {k: v for k, v in schema.items() if k != "oneOf"}

        def is_apart(way: Schema, index: int) -> bool:
            return all(
                self.proofs.are_disjoint((way, beside), (other,))
                for i, other in enumerate(whole)
                if i != index
            )

        found = []
        for i, way in enumerate(ways):
            for form in (way, *([self.tighten(way)] if self.tighten else ())):
                if is_apart(form if form is not way else whole[i], i):
                    found.append(form)
                    break
            else:
                if not any(
                    self.proofs.includes(other, whole[i]) for j, other in enumerate(whole) if j != i
                ):
                    found = []
                    break
        if not found:
            self._name(f"{place}/oneOf")
            return ways
        return found

    def _counted(self, node: Node, place: str) -> Node:
        """Count properties as llguidance can: where none that is declared is optional."""
        least, most = node.get("minProperties", 0), node.get("maxProperties")
        required = node.get("required", ())
        optional = [name for name in node.get("properties", {}) if name not in required]
        if least <= len(required):
            node = {key: value for key, value in node.items() if key != "minProperties"}
            least = 0
        if most is not None and node.get("additionalProperties") is False:
            declared = len(optional) + len(required)
            if declared <= most and "patternProperties" not in node:
                node = {key: value for key, value in node.items() if key != "maxProperties"}
                most = None
        if not optional and least <= len(required) + 1:
            return node  # names beyond those declared may repeat, so only one of them counts
        wanted = least - len(required)
        if least and most is None and optional:
            ways = list(itertools.islice(itertools.combinations(optional, wanted), _MOST_WAYS + 1))
            is_few = 0 < len(ways) <= _MOST_WAYS
            is_closed = node.get("additionalProperties") is False
            if is_few and (is_closed or wanted == 1):
                node = {key: value for key, value in node.items() if key != "minProperties"}
                return _and(node, {"anyOf": [{"required": list(way)} for way in ways]})
        for key in ("minProperties", "maxProperties"):
            if key in node:
                node = {k: v for k, v in node.items() if k != key}
                self._name(f"{place}/{key}")
        return node


def _live(root: Schema) -> set[int]:
    """Identify the subschemas that an answer may be held to: some definitions nobody asks for."""
    todo, live = [root], set[int]()
    while todo:
        node = todo.pop()
        if not isinstance(node, dict) or id(node) in live:
            continue
        live.add(id(node))
        todo += children(node)
        if isinstance(node.get("$ref"), str):
            todo.append(resolve(root, node["$ref"]))
    return live


def held(
    schema: Schema,
    *,
    tighten: Tighten | None = None,
    leaves: frozenset[str] = frozenset(),
    is_older: bool = False,
) -> Held:
    """Leave out, by name, what no grammar holds.

    `tighten` may make an alternative of a `oneOf` narrower. `leaves` are places of keywords to
    be left out besides; `is_older` names places as drafts before 2020-12 do.
    """
    holder = _Holder(schema, tighten, leaves, is_older)
    return Held(holder.hold(schema, "#"), tuple(holder.unenforced))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, dict)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _numbers(child)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        if isinstance(value, dict):
            yield from value
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)
