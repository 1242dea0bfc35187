"""Tightens a JSON Schema, so that a small model neither writes endlessly nor leaves fields out.

Every value that fits the tightened schema also fits the caller's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

from gateway.engine.grammar.patterns import ENDLESS_FORMATS, FORMATS, widths
from gateway.engine.grammar.schemas import (
    Node,
    Schema,
    can_end,
    is_number,
    rebuild,
    resolve,
    tuple_items,
    types,
    walk,
)
from gateway.registry import ChatSpec

_SETTLED: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_CONSTRAINTS: Final = frozenset({"properties", "patternProperties", "required"})
_BOUNDS: Final = ("max_string_chars", "max_array_items")  # names in models.yaml
_OPEN: Final = "#/$defs/gateway-open-"
_OPEN_DEPTH: Final = 3
_SHORTEST_FORMAT: Final = 16  # characters that a host name or link may always have
_SAFE: Final = 2**53 - 1  # the largest integer that is exact in every JSON parser
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_PLACES: Final = 10  # the most decimal places that llguidance 1.9.1 accepts
_PLACES_IF_SHORT: Final = 4  # decimal places of numbers if strings are bounded too


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The ways in which a schema is tightened."""

    max_string_chars: int | None = None
    max_array_items: int | None = None
    complete: bool = True  # require properties that are nullable or have a default
    closed: bool = True  # forbid properties that the schema does not mention

    @classmethod
    def of(cls, spec: ChatSpec) -> "Shape":
        return cls(**{name: getattr(spec.structured, name) for name in _BOUNDS})

    def completed(self, stated: object) -> "Shape":
        """Return the shape with missing bounds filled in from a checkpoint.

        `stated` is the object `structured` in the checkpoint's generation_config.json.
        """
        own = stated if isinstance(stated, Mapping) else {}
        return replace(
            self,
            **{
                name: own[name]
                for name in _BOUNDS
                if getattr(self, name) is None and type(own.get(name)) is int and own[name] >= 1
            },
        )


def shape_schema(schema: Schema, shape: Shape) -> Schema:
    if shape.closed:
        schema = close_objects(schema)
    if shape.complete:
        schema = complete(schema)
    return bound_strings(schema, shape.max_string_chars, shape.max_array_items)


def complete(schema: Schema) -> Schema:
    """Require all properties of objects whose optional properties are nullable or have a default.

    Return the schema unchanged if no finite value would fit it then.
    """
    # A language model that may skip fields often skips all of them.
    whole = rebuild(schema, _complete)
    return whole if can_end(whole) else schema


def _complete(node: Schema) -> Schema:
    if not isinstance(node, dict) or not isinstance(node.get("properties"), dict):
        return node
    properties, required = node["properties"], list(node.get("required", ()))
    optional = [name for name in properties if name not in required]
    room = node.get("maxProperties", len(properties) + len(required)) - len(required)
    if len(optional) <= room and all(_may_say_nothing(properties[name]) for name in optional):
        names = {*required, *optional}
        node["required"] = [name for name in properties if name in names] + [
            name for name in required if name not in properties
        ]
    return node


def _may_say_nothing(schema: Schema) -> bool:
    if not isinstance(schema, dict):
        return False
    if "default" in schema:
        return True
    if "type" in schema:
        return "null" in types(schema)
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return any(isinstance(option, dict) and option.get("type") == "null" for option in options)


def close_objects(schema: Schema) -> Schema:
    """Add `additionalProperties: false` to objects that name properties and don't mention others.

    If several subschemas constrain an object, only the outer one is closed, because an inner one
    would forbid the properties of the others.
    """
    root = rebuild(schema, lambda node: node)
    shared = set[int]()  # ids of subschemas whose object an outer one constrains
    todo: list[Node] = []
    for _, node in walk(root):
        if len(node.get("allOf", ())) > 1 or _CONSTRAINTS & node.keys():
            todo += _parts(node, root)
    while todo:
        part = todo.pop()
        if id(part) not in shared:
            shared.add(id(part))
            todo += _parts(part, root)
    for _, node in walk(root):
        is_said = "additionalProperties" in node or "patternProperties" in node
        if is_said or id(node) in shared or not node.get("properties"):
            continue
        if _names(node) <= node["properties"].keys():
            node["additionalProperties"] = False
    return root


def _parts(node: Node, root: Schema) -> list[Node]:
    """Return the subschemas that constrain the same value as a node."""
    parts = [part for key in ("allOf", "anyOf", "oneOf") for part in node.get(key, ())]
    if "$ref" in node:
        parts.append(resolve(root, node["$ref"]))
    return [part for part in parts if isinstance(part, dict)]


def _names(node: Node) -> set[str]:
    # The name "$ref" keeps a node with a reference open.
    names = {*node.get("required", ()), *({"$ref"} & node.keys())}
    for part in _parts(node, {}):
        names |= {*part.get("properties", ())} | _names(part)
    return names


def bound_strings(
    schema: Schema,
    max_string_chars: int | None,
    max_array_items: int | None,
) -> Schema:
    """Bound strings, arrays, numbers and undeclared property names, at any depth of a schema."""
    limits: Node = {}
    if max_string_chars is not None:
        limits["maxLength"] = max_string_chars
    if max_array_items is not None:
        limits["maxItems"] = max_array_items

    def bound(node: Schema) -> Schema:
        if node is True and limits:
            node = {}
        if not isinstance(node, dict):
            return node
        if any(key in node for key in _SETTLED):
            return _bound_names(node, limits)
        counted = _limit(_bound_counts(node, limits), limits)
        if limits:
            counted = _open(counted, limits)
        return _bound_names(counted, limits)

    copy = rebuild(schema, bound)
    refs = [node.get("$ref", "") for _, node in walk(copy)]
    if any(ref.startswith(_OPEN) for ref in refs):
        copy["$defs"] = {**copy.get("$defs", {}), **_open_levels(limits)}
    return copy


def _limit(node: Node, limits: Node) -> Node:
    kinds = types(node)
    if "maxLength" in limits and "string" in kinds and "maxLength" not in node:
        max_chars = _most_chars(node, limits["maxLength"])
        if max_chars is not None:
            node["maxLength"] = max_chars
    if "maxItems" in limits and "array" in kinds and "maxItems" not in node:
        first_items, _ = tuple_items(node)
        node["maxItems"] = max(limits["maxItems"], node.get("minItems", 0), len(first_items))
    return node


def _most_chars(node: Node, limit: int) -> int | None:
    """Return the `maxLength` of a string, or None if its pattern or format limits it."""
    max_chars = max(limit, int(node.get("minLength", 0)))
    if "pattern" in node:
        narrowest, widest = widths(node["pattern"])
        if widest is not None:
            return None
        if narrowest:
            return max(max_chars, narrowest + limit)
    elif node.get("format") in ENDLESS_FORMATS:
        return max(max_chars, _SHORTEST_FORMAT)
    elif node.get("format") in FORMATS:
        return None
    return max_chars


def _bound_names(node: Node, limits: Node) -> Node:
    """Bound the number of properties, and their names, in objects that declare none."""
    value = node.get("additionalProperties", False)
    is_map = value is not False and not any(key in node for key in _CONSTRAINTS)
    if not is_map or "object" not in types(node) or "maxLength" not in limits:
        return node
    node = {**node, **_any_properties(limits, value)}
    if "maxItems" in limits and "maxProperties" not in node:
        node["maxProperties"] = max(limits["maxItems"], node.get("minProperties", 0))
    return node


def _bound_counts(node: Node, limits: Node) -> Node:
    """Limit the digits of numbers, because a small model may repeat digits endlessly."""
    # Without bounds for strings, numbers without bounds stay unlimited: they may need an exponent.
    kinds, is_short = types(node), "maxLength" in limits
    bounds = [node[key] for key in (*_LOWER, *_UPPER) if is_number(node.get(key))]
    if "number" in kinds and "multipleOf" not in node and (bounds or is_short):
        places = max(_PLACES_IF_SHORT if is_short else _PLACES, *map(_places_near, bounds), 0)
        if places > _PLACES:
            return node
        node["multipleOf"] = float(f"1e-{places}")
    elif "integer" not in kinds or "number" in kinds:
        return node
    if not any(key in node for key in _UPPER):
        node["maximum"] = _SAFE
    if not any(key in node for key in _LOWER):
        node["minimum"] = -_SAFE
    return node


def _places_near(bound: float) -> int:
    """Return the decimal places of a bound and two more."""
    exponent = Decimal(str(bound)).normalize().as_tuple().exponent
    return 2 - min(0, int(exponent))


def _open(node: Node, limits: Node) -> Node:
    """Allow only items and properties of bounded size where a subschema allows any."""
    opened: dict[str, Any] = {}
    if "array" in types(node) and "items" not in node:
        opened["items"] = _open_ref(_OPEN_DEPTH)
    named = any(key in node for key in ("properties", "patternProperties"))
    if "object" in types(node) and not named and "additionalProperties" not in node:
        opened.update(_any_properties(limits, _open_ref(_OPEN_DEPTH)))
        if not {"minProperties", "maxProperties", "required"} & node.keys():
            opened.update(_few_properties(limits))
    return {**node, **opened}


def _few_properties(limits: Node) -> Node:
    return {"maxProperties": limits["maxItems"]} if "maxItems" in limits else {}


def _open_ref(depth: int) -> Node:
    return {"$ref": f"{_OPEN}{depth}"}


def _open_levels(limits: Node) -> Node:
    # One definition per depth of nesting, because a model may nest values forever.
    name = _OPEN.removeprefix("#/$defs/")
    scalar = _bound_counts({"type": ["string", "number", "boolean", "null"]}, limits)
    scalar = _limit(scalar, limits)
    levels: Node = {f"{name}0": scalar}
    for depth in range(1, _OPEN_DEPTH + 1):
        inner = _open_ref(depth - 1)
        several = _limit({"type": "array", "items": inner}, limits)
        named = {"type": "object", **_any_properties(limits, inner), **_few_properties(limits)}
        levels[f"{name}{depth}"] = {"anyOf": [scalar, several, named]}
    return levels


def _any_properties(limits: Node, value: Node) -> Node:
    """Return keywords that allow any properties with bounded names."""
    if "maxLength" not in limits:
        return {"additionalProperties": value}
    names = f"^(?s:.{{0,{limits['maxLength']}}})$"
    return {"patternProperties": {names: value}, "additionalProperties": False}
