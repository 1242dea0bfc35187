"""Converts the arguments of calls to values, and writes calls as text, for all call formats."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache, partial
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # JSON Schemas of parameters, by function name
Call = Mapping[str, Any]  # keys "name", "arguments" and, if the model wrote one, "id"


class Ending(Enum):
    """How a text ends: more follows, the model ended it, or the length limit cut it."""

    MORE = auto()
    END = auto()
    CUT = auto()


class Unfinished(ValueError):
    """Raised if a text ends inside a call."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The calls that were read at one place of a text."""

    calls: Sequence[Call]  # empty if the calls are malformed: they are plain text
    end: int  # the place after the calls and their closing mark
    is_last: bool = False  # no calls follow `end`, only plain text


# Reads the calls at a place of a text. Returns None if a call is unfinished or may still change.
# Raises ValueError if no call begins there.
ReadCalls = Callable[[str, int, Schemas, Ending], Reading | None]
# Reads a body, the text between a format's opening and closing marks. Returns the body's calls and
# its end. The list of calls is empty if the body is malformed. Raises Unfinished if the text ends
# inside the body, and ValueError if no body begins there.
ReadBody = Callable[[str, int, Schemas, Sequence[str]], tuple[list[Call], int]]


def read_all(read: ReadCalls, text: str, schemas: Schemas) -> list[Call]:
    """Return the calls in a text. Raises ValueError if there is any other text."""
    calls: list[Call] = []
    rest = text.strip()
    while rest:
        reading = read(rest, 0, schemas, Ending.END)
        if reading is None or not reading.calls:
            raise ValueError("not calls alone")
        calls += reading.calls
        rest = rest[reading.end :].lstrip()
    return calls


UNREADABLE = (ValueError, TypeError, LookupError, SyntaxError, MemoryError, RecursionError)
SPACE = re.compile(r"\s*+")
# In lenient reading, a quote closes a string only if the text after the quote can follow a value.
_ENDS_VALUE = r"(?=\s*+(?:[,)\]}:]|\Z))"
_ESCAPES = re.compile(
    r"\\(?:[\\'\"abfnrtv\n]|[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|[\\'\"\n\r]"
)
_ESCAPED = {"\n": r"\n", "\r": r"\r", "\\": r"\\", "'": r"\'", '"': r"\""}
_LITERALS = {"true": "True", "false": "False", "null": "None"}


def _string(quote: str, end: str) -> str:
    """Return a pattern, linear in time, of strings.

    A quote ends a string only if the pattern `end` matches after the quote.
    """
    return rf"{quote}[^\\{quote}]*+(?:(?:\\.|{quote}(?!{end}))[^\\{quote}]*+)*+{quote}"


def _strings(end: str) -> str:
    triples = (quote * 2 + _string(quote, quote * 2) + quote * 2 for quote in "\"'")
    return "|".join((*triples, *(_string(quote, end) for quote in "\"'")))


_STRICT, _LENIENT = _strings(""), _strings(_ENDS_VALUE)
_WORDS = r"(?P<word>[\w.$-]++)(?P<is_name>(?=\s*+(?:\(|=(?!=))))?"
_TOKENS = [
    re.compile(rf"(?P<prefix>[bBfFrRuU]{{0,2}})(?P<string>{strings})|{_WORDS}|[\"'].*", re.DOTALL)
    for strings in (_STRICT, _LENIENT)
]


def skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the place where a pattern's match at `at` ends, or `at` if there is no match."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


@lru_cache
def _brackets(closers: tuple[str, ...], *, is_lenient: bool) -> re.Pattern[str]:
    mark = "|".join(map(re.escape, filter(None, closers))) or r"(?!)"
    strings = _LENIENT if is_lenient else _STRICT
    return re.compile(
        rf"(?P<mark>{mark})|{strings}|(?P<loose>[\"'])|(?P<open>[\[({{]+)|(?P<close>[\])}}]+)",
        re.DOTALL,
    )


def find_end(
    text: str, at: int, closers: Sequence[str], *, is_lenient: bool = False
) -> tuple[int, int]:
    """Return the place where a bracket or a closing mark ends the text that begins at `at`.

    The second value is the number of open brackets there. Raises Unfinished if there is no end.
    """
    depth = 0
    for token in _brackets(tuple(closers), is_lenient=is_lenient).finditer(text, at):
        if token["mark"]:
            return token.start(), depth
        if token["loose"]:
            break
        depth += len(token["open"] or "") - len(token["close"] or "")
        if token["close"] and depth <= 0:
            return token.end() + depth, 0
    raise Unfinished("no end")


def parse_python(source: str) -> tuple[ast.expr, Mapping[str | None, str]]:
    """Return an expression's tree, and the names that `_0`, `_1`, … replace in it.

    Line breaks in strings, unknown escapes, names with dashes and JSON's literals are repaired.
    Raises SyntaxError.
    """
    try:
        return _parse(source, _TOKENS[0])
    except SyntaxError:
        return _parse(source, _TOKENS[1])


def _parse(source: str, tokens: re.Pattern[str]) -> tuple[ast.expr, Mapping[str | None, str]]:
    names: dict[str | None, str] = {}

    def escape(match: re.Match[str]) -> str:
        return _ESCAPED.get(match[0], match[0])

    def spell(token: re.Match[str]) -> str:
        string, word = token["string"], token["word"]
        if string is not None:
            if token["prefix"] or string.startswith(('"""', "'''")):
                return token[0]
            return string[0] + _ESCAPES.sub(escape, string[1:-1]) + string[0]
        if word is None or token["is_name"] is None:  # a string without an end, or a value
            return _LITERALS.get(word, token[0])
        names[f"_{len(names)}"] = word
        return f"_{len(names) - 1}"

    return ast.parse(tokens.sub(spell, source), mode="eval").body, names


def read_literal(source: str, *, is_lenient: bool = False) -> object:
    """Return the value of a Python literal, repaired as in `parse_python`. Raises UNREADABLE."""
    return ast.literal_eval(_parse(source, _TOKENS[is_lenient])[0])


WriteValue = Callable[[Any], str]

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_QUOTED = re.compile(r"\s*([\"'])(.*)\1\s*", re.DOTALL)
_DEPTH = 16  # the greatest depth to which references and alternatives are followed
# The lane waits while schemas are read. These limits keep the wait short.
_MOST_PARTS = 256  # parts of one schema
_MOST_SCHEMAS = 4096  # schemas of one call


def _convert(text: str, types: frozenset[str]) -> Any:
    """Return the value of a text if it has one of the JSON `types`, else the text."""
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
        is_padded_null = value is None and is_text and text != "null"
        if any(_TYPES[name](value) for name in types if name in _TYPES) and not is_padded_null:
            return value
    return text


def guess(text: str) -> Any:
    """Return the value of a text that is JSON or a Python list or dict, else the text."""
    readers: list[Callable[[str], Any]] = [partial(json.loads, strict=False)]
    if text.lstrip().startswith(("[", "{")):
        readers.append(lambda text: read_literal(text.strip()))  # some models write Python
    for read in readers:
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)  # an error for NaN, infinities and Python's sets
        except UNREADABLE:
            continue
        return value
    return text


class Allowed:
    """Converts the argument texts of one call to values that a function's schema allows."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # The keys are ids of schemas, so `_root` and `_inner` must keep the schemas alive.
        self._types: dict[int, frozenset[str]] = {}
        self._parts: dict[int, list[tuple[Mapping[str, Any], bool]]] = {}
        self._inner: dict[tuple[int, str, bool], Mapping[str, Any]] = {}

    def argument(self, name: str, text: str) -> Any:
        return self.value(text, self.inner(self._root, name))

    def value(self, text: str, schema: Any) -> Any:
        value = _convert(text, self.types(schema))
        quoted = _QUOTED.fullmatch(text)
        if isinstance(value, str) and quoted is not None and not self._has_constant(schema, text):
            return quoted[2] if self._has_constant(schema, quoted[2]) else value
        return value

    def types(self, schema: Any, depth: int = _DEPTH) -> frozenset[str]:
        """Return the JSON types that a schema allows, or none if it names no types."""
        if not isinstance(schema, Mapping) or depth == 0:
            return frozenset()
        if id(schema) not in self._types:
            # The entry comes first, because references may lead back to this schema.
            self._types[id(schema)] = frozenset()
            if len(self._types) <= _MOST_SCHEMAS:
                self._types[id(schema)] = self._read_types(schema, depth - 1)
        return self._types[id(schema)]

    def _read_types(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        kinds = {type(value): value for value in _constants(schema)}
        stated = schema.get("type", [type_of(value) for value in kinds.values()])
        names = {name for name in [stated, *_as_list(stated)] if isinstance(name, str)}
        constraints = [frozenset(names | {"integer"} if "number" in names else names)]
        constraints.append(self.types(_resolve(schema, self._root), depth))
        constraints += [self.types(part, depth) for part in _followed(schema, "allOf")]
        fallback = frozenset({"object"} if "properties" in schema else ())
        for keyword in ("anyOf", "oneOf"):
            branches = [self.types(each, depth) for each in _followed(schema, keyword)]
            if all(branches):
                constraints.append(frozenset().union(*branches))
            else:  # an alternative that names no types may allow any type
                fallback = frozenset().union(*branches) or fallback
        known = [types for types in constraints if types]
        return frozenset.intersection(*known) if known else fallback

    def inner(self, schema: Any, name: str, *, is_item: bool = False) -> Mapping[str, Any]:
        """Return the schema of the property `name`, or of the items of a list."""
        key = id(schema), name, is_item
        if key not in self._inner:
            stated: dict[bool, list[Any]] = {False: [], True: []}
            for part, is_alternative in self._flatten(schema):
                properties = part.get("properties")
                others = part.get("additionalProperties")
                own = properties.get(name, others) if isinstance(properties, Mapping) else others
                stated[is_alternative].append(part.get("items", own) if is_item else own)
            self._inner[key] = {"allOf": stated[False], "anyOf": stated[True]}
        return self._inner[key]

    def _has_constant(self, schema: Any, text: str) -> bool:
        return any(text in _constants(part) for part, _ in self._flatten(schema))

    def _flatten(self, schema: Any) -> list[tuple[Mapping[str, Any], bool]]:
        """Return a schema and its parts, each with True if the part is only an alternative."""
        if id(schema) not in self._parts:
            parts, known = [(schema, False)], {}
            for part, is_alternative in parts:
                if not isinstance(part, Mapping) or id(part) in known:
                    continue
                known[id(part)] = part, is_alternative
                more = [(_resolve(part, self._root), is_alternative)]
                for word in ("allOf", "anyOf", "oneOf"):
                    is_one = is_alternative or word != "allOf"
                    more += [(each, is_one) for each in _followed(part, word)]
                parts += more[: _MOST_PARTS - len(parts)]
            self._parts[id(schema)] = list(known.values())
        return self._parts[id(schema)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def type_of(value: Any) -> str:
    return next((name for name, holds in _TYPES.items() if holds(value)), "string")


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _as_list(schema.get("enum"))


def _followed(schema: Mapping[str, Any], word: str) -> list[Any]:
    return _as_list(schema.get(word))[:_MOST_PARTS]


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    ref = schema.get("$ref")
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    place: Any = root
    for step in ref.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def as_cdata(value: Any) -> str:
    text = as_text(value)
    return f"<![CDATA[{text}]]>" if re.search(r"[<&\s]", text) else text


def write_gemma_value(delimiter: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{delimiter}{value}{delimiter}"
    if isinstance(value, list):
        return f"[{','.join(write_gemma_value(delimiter, each) for each in value)}]"
    if isinstance(value, dict):
        pairs = (f"{key}:{write_gemma_value(delimiter, each)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    return as_json(value)


def write_elements(mark: str, value: Any) -> str:
    if not isinstance(value, dict | list):
        return as_text(value)
    pairs = value.items() if isinstance(value, dict) else [("item", each) for each in value]
    texts = ((key, write_elements(mark, each)) for key, each in pairs)
    return "".join(f"{mark}<{key}>{text}{mark}</{key}>" for key, text in texts)


def write_call(call: Call, form: str, pair: str, write_value: WriteValue, **more: Any) -> str:
    """Return the text of a call, from its form and the form of one argument, `pair`."""
    arguments = call["arguments"]
    pairs = [
        pair.format(
            key=key,
            value=write_value(value),
            kind=type_of(value),
            is_text=as_json(isinstance(value, str)),
        )
        for key, value in arguments.items()
    ]
    separator = "" if pair.endswith(("\n", ">")) else ","
    written = {"name": call["name"], "arguments": as_json(arguments), **more}
    return form.format(pairs=separator.join(pairs), **written)
