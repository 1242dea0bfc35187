"""A JSON Schema rewritten in keywords that llguidance has: exactly equal, where it has them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.engine.grammar.patterns import DATES, FORMATS, all_but, one_of
from gateway.engine.grammar.schemas import NOTES, TYPES, Node, Schema, rebuild, types, walk

UNHELD: Final = (
    *("not", "uniqueItems", "contains", "propertyNames", "dependentRequired", "dependentSchemas"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
_IN_PLACE: Final = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf")
_CONDITIONS: Final = ("if", "dependentSchemas", "then", "else")
# Keywords whose meaning depends on their siblings.
_BY_SIBLINGS: Final = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("prefixItems", "items", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("if", "then", "else"),
    }
)


def translate(schema: Schema, *, conditions: int, is_plain: bool = False) -> Schema:
    """Rewrite a schema in keywords that llguidance has, where there are equal ones.

    At most so many `conditions` become alternatives: each may double what is compiled. With
    `is_plain`, what only several keywords could express stays as the caller wrote it.
    """
    left = conditions
    exact: tuple[Callable[[Node], Schema], ...] = (_translate_format, _plain_contains)
    if not is_plain:
        exact = (_translate_format, _evaluated_names, _plain_not, _plain_contains, _translate_names)

    def change(node: Schema) -> Schema:
        nonlocal left
        if not isinstance(node, dict):
            return node
        for step in exact:
            changed = step(node)
            if changed is False:
                return False
            node = changed
        node, found = _conditional(node, left)
        left -= len(found)
        for ways in found:
            node = with_also(node, {"anyOf": ways})
        return node

    return rebuild(schema, change)


def _is_plain(schema: Schema) -> bool:
    """Return True if all of a schema can be enforced: what cannot must keep the caller's place."""
    beyond = {*UNHELD, "if", "oneOf", "minProperties", "maxProperties"}
    return all(not beyond & node.keys() for _, node in walk(schema))


def with_also(node: Node, more: Schema) -> Node:
    """Ask both; what the node leaves open is said in it, the rest beside it."""
    if more is True:
        return node
    if isinstance(more, dict):
        is_heard = _BY_SIBLINGS & more.keys() and _BY_SIBLINGS & node.keys()
        if not is_heard and not more.keys() & node.keys():
            return {**node, **more}
    return {**node, "allOf": [*node.get("allOf", ()), more]}


def _translate_format(node: Node) -> Node:
    """Write dates as patterns; drop a format that is not known."""
    name = node.get("format")
    if name is None or (isinstance(name, str) and name in FORMATS):
        return node
    node = {key: value for key, value in node.items() if key != "format"}
    return with_also(node, {"pattern": DATES[name]}) if name in DATES else node


def _plain_not(node: Node) -> Schema:
    if "not" not in node:
        return node
    other = opposite(node["not"])
    if other is None or not _is_plain(other):
        return node
    return (
        False if other is False else with_also({k: v for k, v in node.items() if k != "not"}, other)
    )


def opposite(schema: Schema) -> Schema | None:
    """Return a schema of all that doesn't fit; None if these keywords cannot express it."""
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
    """Exclude strings, null and one boolean. Numbers and larger values cannot be excluded."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if "type" in schema and types(schema) != {"string"}:
        return None
    if not all(value is None or isinstance(value, (bool, str)) for value in values):
        return None
    if "const" in schema:  # next to an enumeration that may lack it
        values = [value for value in values if value == schema["const"]]
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
        rest = with_also(rest, {"minItems": least})
        return rest if most is None else with_also(rest, {"maxItems": most})
    return node


def _translate_names(node: Node) -> Node:
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


def _evaluated_names(node: Node) -> Node:
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
