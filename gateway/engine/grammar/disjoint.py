"""Proofs that no value fits two schemas, or that all values of one fit the other.

False means only that there is no proof. Schemas are in draft 2020-12. A keyword that is not
understood is taken to allow everything, so a proof of disjointness holds without it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gateway.engine.grammar.schemas import NOTES, Node, Schema, resolve, types

Both: TypeAlias = tuple[Schema, ...]  # schemas that a value fits all of

_STEPS: Final = 20_000
_DEPTH: Final = 24
_LENGTHS: Final = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}
_BY_SIBLINGS: Final = frozenset({"unevaluatedProperties", "unevaluatedItems"})
_SCALAR_KEYS: Final = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), 1),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), -1),
}


@dataclass(slots=True)
class Proofs:
    """Proofs about the subschemas of one root, with a common bound on steps."""

    root: Schema
    steps: int = _STEPS

    def are_disjoint(self, one: Both, other: Both, depth: int = _DEPTH) -> bool:
        """Prove that no value fits all of `one` and all of `other`."""
        self.steps -= 1
        if self.steps < 0 or depth < 0:
            return False
        left, right = list(self._parts(one)), list(self._parts(other))
        if False in left or False in right:
            return True
        both = [_own(part) for part in (*left, *right) if isinstance(part, dict)]
        for part in both:
            for key in ("anyOf", "oneOf"):
                if key in part:
                    rest = tuple({k: v for k, v in p.items() if k != key} for p in both)
                    if all(self.are_disjoint((way,), rest, depth - 1) for way in part[key]):
                        return True
        if not both:
            return False
        values = [_values(part) for part in both]
        for some in values:
            if some is not None:
                return all(any(self._rejects(part, value) for part in both) for value in some)
        kinds = _shared_types(both)
        return all(self._no_value_of(kind, both, depth) for kind in kinds)

    def includes(self, wide: Schema, narrow: Schema, depth: int = _DEPTH) -> bool:
        """Prove that whatever fits `narrow` fits `wide`."""
        self.steps -= 1
        if self.steps < 0 or depth < 0:
            return False
        if wide is True or narrow is False or wide == narrow:
            return True
        if not isinstance(wide, dict) or not isinstance(narrow, dict):
            return False
        if "$ref" in narrow and set(narrow) - NOTES == {"$ref"}:
            target = resolve(self.root, narrow["$ref"])
            return target is not None and self.includes(wide, target, depth - 1)
        if not types(narrow) <= types(wide) | ({"integer"} if "number" in types(wide) else set()):
            return False
        return all(
            key == "type" or self._implies(key, wide, narrow, depth) for key in set(wide) - NOTES
        )

    def _implies(self, key: str, wide: Node, narrow: Node, depth: int) -> bool:
        asked = wide[key]
        if key == "required":
            return set(asked) <= set(narrow.get("required", ()))
        if key in _SCALAR_KEYS and key in narrow:
            sign = _SCALAR_KEYS[key]
            return bool(sign * narrow[key] >= sign * asked)
        if key == "properties":
            return all(
                self.includes(asked[name], prop, depth - 1)
                for name in asked
                for prop in [_and(tuple(_property(narrow, name)))]
            )
        if key == "items":
            has_tuple = "prefixItems" in wide or "prefixItems" in narrow
            return not has_tuple and self.includes(asked, narrow.get("items", True), depth - 1)
        if key == "additionalProperties":
            names = wide.get("properties", {}).keys() >= narrow.get("properties", {}).keys()
            has_patterns = "patternProperties" in wide or "patternProperties" in narrow
            rest = narrow.get("additionalProperties", True)
            return names and not has_patterns and self.includes(asked, rest, depth - 1)
        if key in ("enum", "const"):
            some, most = _values(narrow), _values(wide)
            return some is not None and all(_is_in(value, most or []) for value in some)
        return key not in _BY_SIBLINGS and key in narrow and bool(narrow[key] == asked)

    def _parts(self, schemas: Both, seen: frozenset[str] = frozenset()) -> Iterator[Schema]:
        """List schemas that must all fit, following references and `allOf`."""
        for schema in schemas:
            if not isinstance(schema, dict):
                yield schema
                continue
            self.steps -= 1
            if self.steps < 0:
                return
            yield schema
            yield from self._parts(tuple(schema.get("allOf", ())), seen)
            ref = schema.get("$ref")
            if isinstance(ref, str) and ref not in seen:
                target = resolve(self.root, ref)
                if target is not None:
                    yield from self._parts((target,), seen | {ref})

    def _no_value_of(self, kind: str, both: Sequence[Node], depth: int) -> bool:
        if kind == "object":
            return self._no_object(both, depth)
        if kind in _LENGTHS and _is_empty(both, *_LENGTHS[kind]):
            return True
        if kind == "array":
            least = max(part.get("minItems", 0) for part in both)
            return any(
                self.are_disjoint((), tuple(_item(part, i) for part in both), depth - 1)
                for i in range(min(least, 8))
            )
        if kind in ("number", "integer"):
            return _no_number(both)
        return False

    def _no_object(self, both: Sequence[Node], depth: int) -> bool:
        required = {name for part in both for name in part.get("required", ())}
        if len(required) > min(part.get("maxProperties", len(required)) for part in both):
            return True
        return any(
            self.are_disjoint(
                (), tuple(prop for part in both for prop in _property(part, name)), depth - 1
            )
            for name in sorted(required)
        )

    def _rejects(self, node: Node, value: Any) -> bool:
        """Prove that a value doesn't fit, by the node's own keywords."""
        if not types(node) & _types_of(value):
            return True
        some = _values(node)
        if some is not None and not _is_in(value, some):
            return True
        if isinstance(value, str):
            length = len(value)
            return not node.get("minLength", 0) <= length <= node.get("maxLength", length)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _no_number([node, {"minimum": value, "maximum": value}])
        if isinstance(value, dict):
            return any(name not in value for name in node.get("required", ())) or any(
                prop is False or (isinstance(prop, dict) and self._rejects(prop, each))
                for name, each in value.items()
                for prop in _property(node, name)
            )
        return False


def _own(node: Node) -> Node:
    """Remove the keywords that have been followed."""
    if "$ref" in node or "allOf" in node:
        return {key: value for key, value in node.items() if key not in ("$ref", "allOf")}
    return node


def _and(schemas: Both) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)} if schemas else True


def _property(node: Node, name: str) -> Iterator[Schema]:
    """List what a property of this name must fit, as far as its name alone decides."""
    own = node.get("properties", {})
    if name in own:
        yield own[name]
    elif "patternProperties" not in node:
        yield node.get("additionalProperties", True)


def _item(node: Node, index: int) -> Schema:
    prefix = node.get("prefixItems", ())
    return prefix[index] if index < len(prefix) else node.get("items", True)


def _values(node: Node) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values: list[Any] | None = node.get("enum")
    return values


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(_is_same(value, each) for each in values)


def _is_same(one: Any, other: Any) -> bool:
    """Compare as JSON does: 1 equals 1.0, and no boolean equals a number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if value == int(value) else {"number"}
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _shared_types(both: Sequence[Node]) -> set[str]:
    shared = {"string", "number", "integer", "boolean", "null", "array", "object"}
    for part in both:
        kinds = types(part)
        shared &= kinds | ({"integer"} if "number" in kinds else set())
    return shared


def _is_empty(both: Sequence[Node], least: str, most: str) -> bool:
    bounds = [part[most] for part in both if most in part]
    return bool(bounds) and bool(max(part.get(least, 0) for part in both) > min(bounds))


def _no_number(both: Sequence[Node]) -> bool:
    """Prove that the bounds leave no number between them."""
    low = [(part["minimum"], False) for part in both if "minimum" in part]
    low += [(part["exclusiveMinimum"], True) for part in both if "exclusiveMinimum" in part]
    high = [(part["maximum"], False) for part in both if "maximum" in part]
    high += [(part["exclusiveMaximum"], True) for part in both if "exclusiveMaximum" in part]
    return any(
        least > most or (least == most and (is_above or is_below))
        for least, is_above in low
        for most, is_below in high
    )
