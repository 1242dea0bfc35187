"""Reads calls whose bodies are JSON or Python, between two marks or after an opening mark."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]

from gateway.engine.answers.call_values import (
    SPACE,
    UNREADABLE,
    Call,
    Ending,
    ReadBody,
    Reading,
    Schemas,
    Unfinished,
    find_end,
    parse_python,
    read_literal,
    skip,
    write_call,
)

Body = tuple[list[Call], int]  # the calls of a body, and the place where the body ends
_BETWEEN = re.compile(r"(?:[\s;,]|```\w*)*+")  # separators between bodies
_AFTER = re.compile(r"[\s;,`)\]}]*+")  # surplus brackets after the last body
_DECODER = json.JSONDecoder(strict=False)  # strings may hold line breaks and tabs
_BAD_ESCAPE = re.compile(r"(\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4}))|\\(')|\\")
_ID = r"(?P<name>[^\s<{]{1,256})"
_MISTRAL = regex.compile(
    r"\s*+(?P<name>[\w./:-]{1,256})\s*+(?:\[CALL_ID\]\s*+(?P<id>[\w-]{1,256})\s*+)?"
    r"(?:\[ARGS\]\s*+)?(?=\{)"
)
_DEEPSEEK = regex.compile(
    rf"\s*+(?:\w{{1,256}}<｜tool▁sep｜>{_ID}\s++|{_ID}<｜tool▁sep｜>\s*+)(?:```\w*+\s*+)?(?=\{{)"
)
_KIMI = regex.compile(rf"\s*+{_ID}\s*+<\|tool_call_argument_begin\|>\s*+(?=[{{\[\"])")
_KIMI_ID = re.compile(r"functions\.(.+):\d+")
_IS_JSON = re.compile(r"\{|\[\s*+[{\]]")
_NAME = re.compile(r"[\w.$-]*+\s*+")


@dataclass(frozen=True, slots=True)
class Bodies:
    """The call format of one model family."""

    read_body: ReadBody
    marks: Sequence[tuple[str, str]] = ()  # opening and closing marks; a closing mark may be ""
    call: str = '{{"name": "{name}", "arguments": {arguments}}}'
    pair: str = ""
    write_value: Callable[[Any], str] = str
    is_list: bool = False  # one list has all calls

    def __call__(self, text: str, at: int, schemas: Schemas, ending: Ending) -> Reading | None:
        begun = [pair for pair in self.marks if text.startswith(pair[0], at)][:1]
        closers = tuple(end for _, end in begun or self.marks if end)
        begin = at + sum(len(start.removesuffix("[")) for start, _ in begun)
        # A call in a cut answer is unfinished without its closing mark.
        is_open = ending is Ending.MORE or (ending is Ending.CUT and bool(begun and closers))
        try:
            read = self._read_bodies(text, begin, schemas, closers)
        except Unfinished:
            return None
        if read.is_last:
            return None if is_open else read
        calls, end, place = read.calls, read.end, skip(_AFTER, text, read.end)
        for each in closers:
            found = text.find(each, end, place + len(each))
            if found >= 0:
                return Reading(calls, found + len(each))
        starts = tuple(start for start, _ in self.marks)
        if text.startswith(starts, place):
            return Reading(calls, end)
        if place == len(text):
            return None if is_open else Reading(calls, place)
        # The text that follows may belong to the call if a closing mark comes after it.
        is_last = ending is Ending.END and bool(begun and closers)
        return Reading(calls, end) if is_last and closers[0] not in text[place:] else None

    def write(self, calls: Sequence[Call]) -> str:
        start, end = self.marks[0] if self.marks else ("", "")
        texts = [
            write_call(call, self.call, self.pair, self.write_value, place=place)
            for place, call in enumerate(calls)
        ]
        if self.is_list:
            return f"{start}[{', '.join(texts)}]{end}"
        gap = "\n" if self.call.endswith("\n") else ""
        return gap.join(f"{start}{text}{end}" for text in texts)

    def _read_bodies(self, text: str, at: int, schemas: Schemas, closers: Sequence[str]) -> Reading:
        marks = (*closers, *(start for start, _ in self.marks))
        calls, end = self.read_body(text, skip(_BETWEEN, text, at), schemas, closers)
        begin = skip(_BETWEEN, text, end)
        while calls and begin < len(text) and not text.startswith(marks, begin):
            try:
                more, more_end = self.read_body(text, begin, schemas, closers)
            except Unfinished:
                more, more_end = [], end
            except ValueError:
                break
            if not more:
                return Reading(calls, end, is_last=True)
            calls, end, begin = calls + more, more_end, skip(_BETWEEN, text, more_end)
        return Reading(calls, end)


def read_json(
    text: str, at: int, schemas: Schemas, closers: Sequence[str], *, is_named: bool = False
) -> Body:
    """Read a JSON object that is a call, or a list of these objects.

    `is_named` means that each object maps function names to arguments.
    """
    at = skip(SPACE, text, at)
    if at < len(text) and text[at] not in "[{":
        raise ValueError("no JSON")
    value, end = _read_value(text, at, closers)
    values: Any = value if isinstance(value, list) else [value]
    if is_named:
        values = ({"name": name, "arguments": each[name]} for each in values for name in each)
    return calls_of(values), end


def read_arguments(name: str, text: str) -> Call:
    """Return a call of `name` with the arguments in `text`. Raises ValueError."""
    return _call({"name": name, "arguments": text})


def read_mistral(text: str, at: int, schemas: Schemas, closers: Sequence[str]) -> Body:
    """Read Mistral's calls, a JSON list or since v11 `name[CALL_ID]id[ARGS]{…}`.

    Sources: mistral-common, and vLLM's tests, where [ARGS] may be missing.
    """
    if text.startswith(("[", "{"), skip(SPACE, text, at)):
        return read_json(text, at, schemas, closers)
    return _read_headed(_MISTRAL, text, at, closers)


def read_deepseek(text: str, at: int, schemas: Schemas, closers: Sequence[str]) -> Body:
    """Read DeepSeek's calls, with fenced JSON in V3 and R1, and plain JSON in V3.1."""
    return _read_headed(_DEEPSEEK, text, at, closers)


def read_kimi(text: str, at: int, schemas: Schemas, closers: Sequence[str]) -> Body:
    """Read Kimi K2's calls, which begin with an id such as `functions.f:0`."""
    calls, end = _read_headed(_KIMI, text, at, closers)
    return calls_of([_kimi_call(call, schemas) for call in calls]), end


def _kimi_call(call: Call, schemas: Schemas) -> Call:
    """Replace the id that was read as a call's name by the name of the function.

    The name is empty if neither the id nor the arguments tell which function is meant.
    """
    call_id, given = call["name"], set(call["arguments"])
    names = "|".join(map(re.escape, sorted(schemas, key=len, reverse=True)))
    exact = _KIMI_ID.fullmatch(call_id)
    known = re.fullmatch(rf"(?:functions[._])?({names})(?:[:._](?:call_?)?\d+)?", call_id) or exact
    if known and known[1]:
        return {**call, "name": known[1], "id": exact and call_id}
    fitting = [
        name
        for name, schema in schemas.items()
        if set(schema.get("required") or ()) <= given <= set(schema.get("properties") or ())
    ]
    is_own = re.match(r"(?:functions[._])?call[_-]", call_id) and len(fitting) == 1
    return {**call, "name": fitting[0] if is_own else ""}


def _read_headed(pattern: Any, text: str, at: int, closers: Sequence[str]) -> Body:
    """Read a call's head, whose groups are keys of the call, and its arguments."""
    head = match_head(pattern, text, at)
    arguments, end = _read_value(text, head.end(), closers)
    return calls_of([{**head.groupdict(), "arguments": arguments}]), end


def match_head(pattern: Any, text: str, at: int) -> Any:
    """Match the head of a call. Raises Unfinished if the head is cut, or else ValueError."""
    head = pattern.match(text, at, partial=True)
    if head is None:
        raise ValueError("no call")
    if head.partial:
        raise Unfinished("no whole head")
    return head


def _read_value(text: str, at: int, closers: Sequence[str]) -> tuple[Any, int]:
    """Return a JSON value, or [] if it cannot be read, and the place where it ends."""
    try:
        return _DECODER.raw_decode(text, at)
    except UNREADABLE:
        end, depth = find_end(text, at, closers)
    return [] if depth > 1 else _mend(text[at:end] + "}" * depth), end


def _mend(text: str) -> Any:
    """Return the value of malformed JSON, or [] if it cannot be repaired."""
    escaped = _BAD_ESCAPE.sub(lambda match: match[1] or match[2] or r"\\", text)
    for read, source in ((_DECODER.decode, escaped), (read_literal, text)):
        try:
            return read(source)
        except UNREADABLE:
            continue
    return []


def calls_of(values: Iterable[Any]) -> list[Call]:
    """Return JSON values as calls, or no calls if any value isn't a call."""
    try:
        return [_call(value) for value in values]
    except (*UNREADABLE, AttributeError):
        return []


def _call(value: Any) -> Call:
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") or value.get("tool_name") or value["function"]
    given: tuple[Any, ...] = (value.get("arguments"), value.get("parameters"), {})
    arguments = next(each for each in given if each is not None)
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = _mend(arguments) if arguments.strip() else {}
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("not a call")
    call, call_id = {"name": name, "arguments": arguments}, value.get("id")
    if call_id and isinstance(call_id, str):
        call["id"] = call_id
    return call


def read_python(text: str, at: int, schemas: Schemas, closers: Sequence[str]) -> Body:
    """Read a Python list of calls, JSON, or one Python call of a function in `schemas`."""
    at = skip(SPACE, text, at)
    if _IS_JSON.match(text, at):
        return read_json(text, at, schemas, closers)
    if not text.startswith("[", at):
        end = skip(_NAME, text, at)
        if end == len(text):
            raise Unfinished("no whole name")
        if text[end] != "(" or _own_name(text[at:end].strip(), schemas) not in schemas:
            raise ValueError("no function of that name")
    end, depth = find_end(text, at, closers, is_lenient=True)
    try:
        tree, names = parse_python(text[at:end] if depth == 0 else "")
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node, names, schemas) for node in nodes], end
    except UNREADABLE:
        return [], end


def _own_name(name: str, schemas: Schemas) -> str:
    return next((each for each in (name, name.removesuffix(".call")) if each in schemas), name)


def _python_call(node: ast.expr, names: Mapping[str | None, str], schemas: Schemas) -> Call:
    # A schema does not order its parameters, so positional arguments cannot be read.
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
        raise ValueError("not a call by names")
    arguments = {names[each.arg]: ast.literal_eval(each.value) for each in node.keywords}
    return {"name": _own_name(names[node.func.id], schemas), "arguments": arguments}
