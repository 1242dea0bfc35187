"""Bodies of Gemma's calls → calls: Gemma 4's `call:f{a:1,b:<|"|>text<|"|>}`, and FunctionGemma's.

A text may hold its own delimiter, which stands for a quote there. So a delimiter ends a text only
where the next pair or value follows, or the brackets that are open are closed. Models also write
quotes in its place, arguments in parentheses, Python's literals, or no delimiter at the beginning.
"""

import re
from collections.abc import Sequence
from typing import Any

import regex  # type: ignore[import-untyped]

from gateway.engine.answers.call_bodies import match_head
from gateway.engine.answers.call_reading import Call, Schemas, Unfinished
from gateway.engine.answers.call_values import guess
from gateway.engine.answers.literals import UNREADABLE, read_literal, skip_space

_DEPTH = 64  # brackets that are open at once
_MOST = 1 << 16  # places looked at in one call: a quarter of a second
_MARKS = ('<|"|>', "<escape>")
_MARK = "(?:" + "|".join(map(re.escape, _MARKS)) + ")"
_HEAD = regex.compile(r"\s*+call:\s*+(?P<name>[^\s{}()<>,]{1,256})\s*+(?P<open>[{(])")
_CLOSED_BY = {"{": "}", "(": ")", "[": "]"}
_CLOSING = re.compile(r"[\s}\])]*+")
_LITERALS = {"True": True, "False": False, "None": None}
_CALL_ENDS = ("<tool_call|>", "<end_function_call>")
# A call inside a text, which it has whole.
_CALL = "|".join(
    rf"{begin}\s*+call:(?:(?!{begin}\s*+call:|{end}).)*+(?:{end})?+"
    for begin, end in (
        (r"<\|tool_call>", r"<tool_call\|>"),
        ("<start_function_call>", "<end_function_call>"),
    )
)
# Whatever may end a value, by the quote that begins it.
_ENDS = {
    **{mark: re.compile(rf"{re.escape(mark)}|(?P<call>{_CALL})", re.DOTALL) for mark in _MARKS},
    '"': re.compile(r'\\.|"', re.DOTALL),
    "'": re.compile(r"\\.|'", re.DOTALL),
    "": re.compile(rf"(?P<mark>{_MARK})|,|[}}\])][\s}}\])]*+"),
}


def _key(sign: str, excluded: str) -> str:
    word = rf"(?:(?!{_MARK})[^\s,\"'{{}}\[\]{excluded}])++"
    quotes = (_MARK, '"', "'")
    quoted = "|".join(rf"{quote}(?:(?!{quote}).)*+{quote}" for quote in quotes)
    return rf"\s*+(?P<key>{quoted}|{word}(?:[ ]{word})*+)\s*+{sign}"


_KEYS = {"{": _key(":", ":"), "(": _key("=", "()=")}
_KEY_PATTERNS = {opening: re.compile(key, re.DOTALL) for opening, key in _KEYS.items()}
_VALUE = rf"\s*+(?:{_MARK}|[\"'{{\[\d-]|(?:[tT]rue|[fF]alse|null|None)\b)"
_NEXT = {
    opening: re.compile(rf",(?:{pattern}|\s*+[}}\])])", re.DOTALL)
    for opening, pattern in {**_KEYS, "[": _VALUE}.items()
}


def read_gemma(
    text: str, at: int, schemas: Schemas, closers: Sequence[str]
) -> tuple[list[Call], int]:
    """Read one call. What is no such call from its arguments on has no known end: Unfinished."""
    head = match_head(_HEAD, text, at)
    arguments, end = _Body(text, closers).read(head.end(), head["open"])
    return [{"name": head["name"], "arguments": arguments}], end


class _Body:
    """Reads the arguments of one call, which begin behind their first bracket."""

    def __init__(self, text: str, closers: Sequence[str]) -> None:
        self._text = text
        self._open: list[str] = []  # brackets
        self._count = 0  # places where a value might have ended
        marks = "|".join(map(re.escape, closers))
        follows = rf"\Z|call:|<\|?tool|<start_function|{marks}" if marks else ""
        self._after = re.compile(follows)

    def read(self, at: int, opening: str) -> tuple[dict[str, Any], int]:
        """Return the arguments, and the place behind the bracket that closes them."""
        text = self._text
        arguments: dict[str, Any] = {}
        within: list[Any] = [arguments]  # the objects and arrays that are open
        value: Any
        self._open = [opening]
        while self._open:
            at = skip_space(text, at)
            if text.startswith(_CLOSED_BY[self._open[-1]], at):
                within.pop()
                self._open.pop()
                at += 1
            else:
                key, at = self._read_key(at)
                bracket, is_nested = text[at : at + 1], text.startswith(("{", "["), at)
                if is_nested:
                    value, at = ({} if bracket == "{" else []), at + 1
                else:
                    value, at = self._read_value(at)
                if isinstance(within[-1], dict):
                    within[-1][key] = value
                else:
                    within[-1].append(value)
                if is_nested:
                    within.append(value)
                    self._open.append(bracket)
                    continue
            comma = skip_space(text, at)
            if self._open and text.startswith(",", comma):
                at = comma + 1
        return arguments, at

    def _read_key(self, at: int) -> tuple[str, int]:
        """Return the key that a pair has and a value of an array hasn't, and the value's place."""
        if len(self._open) > _DEPTH:
            raise Unfinished("too deep")
        if self._open[-1] == "[":
            return "", at
        key = _KEY_PATTERNS[self._open[-1]].match(self._text, at)
        if key is None:
            raise Unfinished("no key")
        name = key["key"]
        for quote in (*_MARKS, '"', "'"):
            if name.startswith(quote):
                name = name.removeprefix(quote).removesuffix(quote)
                break
        return name, skip_space(self._text, key.end())

    def _read_value(self, at: int) -> tuple[Any, int]:
        """Return a text or a literal, and the place behind it."""
        quote = next((each for each in _ENDS if self._text.startswith(each, at)), "")
        begin = at + len(quote)
        for end in _ENDS[quote].finditer(self._text, begin):
            self._count += 1
            if self._count > _MOST:
                break
            if end.lastgroup == "call":
                if not end[0].endswith(_CALL_ENDS):
                    break
                continue
            is_marked = end[0] in _ENDS
            behind = end.end() if is_marked else end.start()
            if not end[0].startswith("\\") and self._is_followed(behind):
                return self._value(
                    quote, self._text[begin : end.start()], is_text=is_marked
                ), behind
        raise Unfinished("no end of a value")

    def _value(self, quote: str, text: str, *, is_text: bool) -> Any:
        if quote in _MARKS:
            return _ENDS[quote].sub(lambda end: end["call"] or '"', text)
        try:
            if quote:
                return read_literal(quote + text + quote, is_lenient=True)
        except UNREADABLE as error:
            raise Unfinished("no text") from error
        bare = text.strip()
        if is_text:
            return bare
        if not bare:
            raise Unfinished("no value")
        return _LITERALS[bare] if bare in _LITERALS else guess(bare)

    def _is_followed(self, at: int) -> bool:
        """Return True if what stands at a place can stand behind a value."""
        run = _CLOSING.match(self._text, at)
        assert run is not None  # it may be empty
        depth = len(self._open)
        for bracket in "".join(run[0].split()):
            depth -= 1
            if bracket != _CLOSED_BY[self._open[depth]]:
                return False
            if depth == 0:
                return self._after.match(self._text, run.end()) is not None
        return _NEXT[self._open[depth - 1]].match(self._text, run.end()) is not None
