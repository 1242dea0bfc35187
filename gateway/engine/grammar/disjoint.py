"""Whether no value fits two alternatives of a schema, as they are constructed.

They differ in type, in a constant or an enumeration, or in a property that one of them requires.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.engine.grammar.schemas import TYPES, Node, Schema, resolve, types

_DEPTH: Final = 8
_MOST: Final = 64  # alternatives, whose pairs are compared


def are_disjoint(
    ways: Sequence[Schema], others: Sequence[Schema], parent: Node, root: Node
) -> bool:
    """Return True if no value fits one of these alternatives and another in another place.

    Both are of the same `oneOf`, of this parent.
    """
    if len(ways) > _MOST:
        return False
    proof = _Proof(root, _with_integers(types(parent)), frozenset(parent.get("required", ())))
    return all(
        proof.is_apart(way, other)
        for (i, way), (j, other) in itertools.product(enumerate(ways), enumerate(others))
        if i != j
    )


@dataclass(frozen=True, slots=True)
class _Proof:
    """Compares schemas of values that are of some kinds and have some properties."""

    root: Node
    kinds: frozenset[str] = TYPES
    required: frozenset[str] = frozenset()
    depth: int = _DEPTH

    def is_apart(self, one: Schema, other: Schema) -> bool:
        """Return True if no value fits both."""
        one, other = _target(one, self.root), _target(other, self.root)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or self.depth == 0:
            return False
        inner = replace(self, depth=self.depth - 1)
        for way, rest in ((one, other), (other, one)):
            for key, enough in (("allOf", any), ("anyOf", all), ("oneOf", all)):
                parts = way.get(key, ())
                if parts and enough(inner.is_apart(part, rest) for part in parts):
                    return True
        shared = self.kinds & _kinds(one) & _kinds(other)
        if not shared:
            return True
        values, others = _values(one), _values(other)
        if values is not None and others is not None and not values & others:
            return True
        if shared != {"object"}:
            return False
        names = self.required.union(one.get("required", ()), other.get("required", ()))
        of_property = _Proof(self.root, depth=self.depth - 1)
        return any(
            of_property.is_apart(_property(one, name), _property(other, name)) for name in names
        )


def _target(schema: Schema, root: Node) -> Schema:
    for _ in range(_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        target = resolve(root, schema["$ref"])
        schema = True if target is None else target
    return schema


def _property(node: Node, name: str) -> Schema:
    """Return what a property must fit, as far as it is declared."""
    properties = node.get("properties", {})
    if name in properties:
        return properties[name]
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    return not is_closed


def _values(node: Node) -> frozenset[str] | None:
    """Return the values that a schema enumerates, comparable; None if it doesn't."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if values is None:
        return None
    return frozenset(json.dumps(_plain(value), sort_keys=True) for value in values)


def _plain(value: Any) -> Any:
    """Return 1 for 1.0, which is the same number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(child) for child in value]
    if isinstance(value, dict):
        return {name: _plain(child) for name, child in value.items()}
    return value


def _kinds(node: Node) -> frozenset[str]:
    kinds = _with_integers(types(node))
    values = [node["const"]] if "const" in node else node.get("enum")
    if values is None:
        return kinds
    return kinds & frozenset(map(_kind, values))


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) and not value.is_integer():
        return "number"
    if isinstance(value, (int, float)):
        return "integer"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _with_integers(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds
