"""The part of a JSON Schema that a grammar can hold an answer to, and what is left to be checked.

`drop_unenforceable` leaves out what llguidance has no keyword for, or cannot take, once a schema
has been translated to its keywords (translation.py), and names each keyword left out by its JSON
pointer. But for those, what it keeps allows nothing that the schema does not.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from gateway.engine.grammar.disjoint import Proofs
from gateway.engine.grammar.drafts import is_place
from gateway.engine.grammar.schemas import Node, Schema, children, escape, resolve
from gateway.engine.grammar.translation import UNHELD, with_also

Tighten: TypeAlias = Callable[[Schema], Schema]
Leaves: TypeAlias = frozenset[tuple[int, str]]
"""Keywords that are known not to compile, each with the identity of its subschema."""

_LARGEST: Final = 2**53  # beyond it neighbouring integers are one double, and llguidance has those
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST_WAYS: Final = 16
_OLDER: Final = {"prefixItems": "items", "items": "additionalItems"}


@dataclass(frozen=True, slots=True)
class Held:
    """A schema for a grammar, and pointers to the caller's keywords that it does not enforce."""

    schema: Schema
    unenforced: tuple[str, ...] = ()


@dataclass(slots=True)
class _Holder:
    """One pass over a schema. `tighten` closes alternatives of a `oneOf`, if any may be."""

    root: Schema
    tighten: Tighten | None
    leaves: Leaves
    is_older: bool
    unenforced: list[str] = field(default_factory=list)
    proofs: Proofs = field(init=False)
    live: frozenset[int] = field(init=False)
    alive: list[bool] = field(default_factory=list)  # of the subschemas one is in, outermost first

    def __post_init__(self) -> None:
        self.proofs = Proofs(self.root)
        self.live = frozenset(find_live(self.root))

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
        for key in [key for key in node if (id(schema), key) in self.leaves]:
            del node[key]
            self._name(f"{place}/{self._written(key, schema)}")
        for key in ("properties", "patternProperties"):
            was_open = key not in schema or key in node
            if not was_open and node.pop("additionalProperties", True) is not True:
                self._name(f"{place}/additionalProperties")  # it would forbid what that allows
        for key, value in node.items():
            node[key] = self._held_child(key, value, place, node)
        if "oneOf" in node:
            ways = node.pop("oneOf")
            node = with_also(node, {"anyOf": self._one_of(schema, ways, place)})
        return self._counted(node, place)

    def _held_child(self, key: str, value: Any, place: str, node: Node) -> Any:
        at = f"{place}/{self._written(key, node)}"
        if key in ("items", "additionalProperties") and isinstance(value, dict):
            return self.hold(value, at)
        if key in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            return [self.hold(child, f"{at}/{i}") for i, child in enumerate(value)]
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            return {
                name: self.hold(each, name if is_place(name) else f"{at}/{escape(name)}")
                for name, each in value.items()
            }
        return value

    def _written(self, key: str, node: Node) -> str:
        """Return the keyword as the caller wrote it."""
        is_older = self.is_older and "prefixItems" in node
        return _OLDER.get(key, key) if is_older else key

    def _leave(self, node: Node, place: str) -> None:
        if node.get("uniqueItems") and node.get("maxItems", 2) <= 1:
            del node["uniqueItems"]
        for key in UNHELD:
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
        """Choose alternatives of which no two share a value: then any of them is exactly one.

        An alternative is held to its tightened form only as long as that shares nothing with any
        other as the caller wrote it; one that lies within another is never the only one.
        """
        whole: list[Schema] = schema["oneOf"]
        siblings = {k: v for k, v in schema.items() if k != "oneOf"}

        def is_separate(way: Schema, index: int) -> bool:
            return all(
                self.proofs.are_disjoint((way, siblings), (other,))
                for i, other in enumerate(whole)
                if i != index
            )

        found = []
        for i, way in enumerate(ways):
            for form in (way, *([self.tighten(way)] if self.tighten else ())):
                if is_separate(form if form is not way else whole[i], i):
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
        """Bound the number of properties as llguidance can: if no declared one is optional."""
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
                return with_also(node, {"anyOf": [{"required": list(way)} for way in ways]})
        for key in ("minProperties", "maxProperties"):
            if key in node:
                node = {k: v for k, v in node.items() if k != key}
                self._name(f"{place}/{key}")
        return node


def find_live(root: Schema) -> set[int]:
    """Return the ids of subschemas that can apply to an answer: some definitions never do."""
    todo, found = [root], set[int]()
    while todo:
        node = todo.pop()
        if not isinstance(node, dict) or id(node) in found:
            continue
        found.add(id(node))
        todo += children(node)
        if isinstance(node.get("$ref"), str):
            todo.append(resolve(root, node["$ref"]))
    return found


def drop_unenforceable(
    schema: Schema,
    *,
    tighten: Tighten | None = None,
    leaves: Leaves = frozenset(),
    is_older: bool = False,
) -> Held:
    """Leave out, and list, the keywords that no grammar can hold.

    `tighten` may make an alternative of a `oneOf` narrower. `leaves` are left out as well;
    `is_older` names places as drafts before 2020-12 do.
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
