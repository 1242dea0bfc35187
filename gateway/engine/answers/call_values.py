"""A text that stands for an argument of a call → its value, as the function's schema says."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from typing import Any

from gateway.engine.answers.literals import UNREADABLE, read_literal

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_QUOTED = re.compile(r"\s*([\"'])(.*)\1\s*", re.DOTALL)
_DEPTH = 16  # of references and alternatives followed in a parameter's schema


def read_argument(name: str, text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a function's argument; `schema` is of all its arguments."""
    properties = schema.get("properties")
    stated = properties.get(name) if isinstance(properties, Mapping) else None
    value = _convert(text, types_of(stated, schema))
    quoted = _QUOTED.fullmatch(text)
    if isinstance(value, str) and quoted is not None:
        choices = list(_choices(stated, schema, set()))
        if text not in choices and quoted[2] in choices:
            return quoted[2]
    return value


def _convert(text: str, types: frozenset[str]) -> Any:
    """Return the value that a text stands for, one of the JSON types where any are known."""
    if not types:
        return guess(text)
    if types != {"string"}:
        bare, is_text = text.strip(), "string" in types
        if bare.lower() in ("true", "false"):
            bare = bare.lower()
        elif bare in ("None", "nil", "NULL") and not is_text:
            bare = "null"
        value = guess(bare)
        if isinstance(value, float) and value.is_integer() and "integer" in types:
            value = int(value)
        is_word = value is None and is_text and text != "null"
        if any(_TYPES[name](value) for name in types if name in _TYPES) and not is_word:
            return value
    return text


def guess(text: str) -> Any:
    """Return JSON's value, Python's list or dict, or else the text itself.

    Without an equal in JSON, a value stays text: NaN, a number beyond all floats, Python's sets.
    """
    readers: list[Callable[[str], Any]] = [partial(json.loads, strict=False)]
    if text.lstrip().startswith(("[", "{")):
        readers.append(lambda text: read_literal(text.strip()))  # some write Python's
    for read in readers:
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except UNREADABLE:
            continue
        return value
    return text


def _choices(
    schema: Any, root: Mapping[str, Any], seen: set[str], depth: int = _DEPTH
) -> Iterator[Any]:
    """Yield the values that a schema lists, in parts and alternatives of it too."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    if "const" in schema:
        yield schema["const"]
    listed, ref = schema.get("enum"), schema.get("$ref")
    yield from listed if isinstance(listed, list) else ()
    if isinstance(ref, str) and ref not in seen:
        seen.add(ref)
        yield from _choices(_resolve(ref, root), root, seen, depth - 1)
    for keyword in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else ():
            yield from _choices(part, root, seen, depth - 1)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says; empty if it doesn't.

    Keywords of one schema narrow each other; among alternatives, those that say nothing don't
    count, unless something else does say.
    """
    return _Types(root).of(schema)


class _Types:
    """Reads the types of subschemas of one root, each reference once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: dict[str, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = _DEPTH) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return frozenset()
        constraints = [_stated_types(schema)]
        ref, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(ref, str):
            constraints.append(self._at(ref, depth))
        if isinstance(parts, list):
            constraints += [self.of(part, depth - 1) for part in parts]
        alternatives: frozenset[str] = frozenset()
        for branches in (schema.get("anyOf"), schema.get("oneOf")):
            if isinstance(branches, list):
                branch_types = [self.of(branch, depth - 1) for branch in branches]
                alternatives = frozenset().union(*branch_types)
                if all(branch_types):
                    constraints.append(alternatives)
        stated = [types for types in constraints if types]
        if stated:
            return reduce(_both, stated)
        return alternatives or frozenset({"object"} if "properties" in schema else ())

    def _at(self, ref: str, depth: int) -> frozenset[str]:
        if ref not in self._referred:
            self._referred[ref] = frozenset()  # while it is followed: it may lead to itself
            self._referred[ref] = self.of(_resolve(ref, self._root), depth - 1)
        return self._referred[ref]


def _stated_types(schema: Mapping[str, Any]) -> frozenset[str]:
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(name for name in stated if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_type_of, values)) if isinstance(values, list) else frozenset()


def _both(left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    """Return the types that two schemas allow together: integers are numbers, too."""
    both = left & right
    pairs = ((left, right), (right, left))
    if "number" not in both and any("integer" in a and "number" in b for a, b in pairs):
        return both | {"integer"}
    return both


def _type_of(value: Any) -> str:
    return next((name for name, holds in _TYPES.items() if holds(value)), "string")


def _resolve(ref: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference within the function's own schema points to."""
    if not ref.startswith("#/"):
        return None
    place: Any = root
    for step in ref.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place
