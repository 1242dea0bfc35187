"""A text that stands for an argument of a call → its value, as the function's schema says."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
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
    return read_value(text, Allowed(schema).inner(schema, name), schema)


def read_value(text: str, stated: Any, root: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for; `stated` is its schema, a part of `root`."""
    allowed = Allowed(root)
    value = _convert(text, allowed.types(stated))
    quoted = _QUOTED.fullmatch(text)
    if isinstance(value, str) and quoted is not None and text not in allowed.choices:
        return quoted[2] if quoted[2] in allowed.choices else value
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
        is_integer = "integer" in types and "number" not in types
        if is_integer and isinstance(value, float) and value.is_integer():
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


class Allowed:
    """Reads what subschemas of one root allow, each reference once; `choices` are the values that
    the schemas read so far list.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: dict[str, frozenset[str]] = {}
        self.choices: list[Any] = []

    def types(self, schema: Any, depth: int = _DEPTH) -> frozenset[str]:
        """Return the JSON types that a schema allows, as far as it says; empty if it doesn't.

        Keywords of one schema narrow each other; among alternatives, those that say nothing don't
        count, unless something else does say. An integer is a number: "number" allows both.
        """
        if not isinstance(schema, Mapping) or depth == 0:
            return frozenset()
        listed = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        self.choices += listed
        stated = schema.get("type", [type_of(value) for value in listed])
        names = {name for name in [stated, *_list(stated)] if isinstance(name, str)}
        constraints = [frozenset(names | {"integer"} if "number" in names else names)]
        ref = schema.get("$ref")
        if isinstance(ref, str):
            constraints.append(self._at(ref, depth))
        constraints += [self.types(part, depth - 1) for part in _list(schema.get("allOf"))]
        fallback = frozenset({"object"} if "properties" in schema else ())
        for keyword in ("anyOf", "oneOf"):
            branches = [self.types(each, depth - 1) for each in _list(schema.get(keyword))]
            if all(branches):
                constraints.append(frozenset().union(*branches))
            else:
                fallback = frozenset().union(*branches) or fallback
        known = [types for types in constraints if types]
        return frozenset.intersection(*known) if known else fallback

    def inner(self, schema: Any, name: str) -> Mapping[str, Any]:
        """Return the schema of what an object has under a name, or a list as an item."""
        parts, stated, refs = [schema], list[Any](), set[str]()
        for part in (each for each in parts if isinstance(each, Mapping)):
            listed = part.get("properties")
            others = part.get("items", part.get("additionalProperties"))
            stated.append(listed.get(name, others) if isinstance(listed, Mapping) else others)
            parts += [
                each for word in ("allOf", "anyOf", "oneOf") for each in _list(part.get(word))
            ]
            if (ref := str(part.get("$ref"))) not in refs:
                refs.add(ref)
                parts.append(_resolve(ref, self._root))
        return {"anyOf": [each for each in stated if isinstance(each, Mapping)]}

    def _at(self, ref: str, depth: int) -> frozenset[str]:
        if ref not in self._referred:
            self._referred[ref] = frozenset()  # while it is followed: it may lead to itself
            self._referred[ref] = self.types(_resolve(ref, self._root), depth - 1)
        return self._referred[ref]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def type_of(value: Any) -> str:
    """Return the name of a value's type in JSON Schema."""
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
