"""Reads the calls of Gemma 4, such as `call:f{a:1,b:<|"|>text<|"|>}`, and of FunctionGemma.

A string may contain its delimiter, so the text after a delimiter shows whether the string ends.
"""

import re
from collections.abc import Sequence
from typing import Any

import regex  # type: ignore[import-untyped]

from gateway.engine.answers.call_bodies import Body, match_head
from gateway.engine.answers.call_values import (
    SPACE,
    UNREADABLE,
    Schemas,
    Unfinished,
    guess,
    read_literal,
    skip,
)

_DEPTH = 64  # the most brackets open at once
_MOST = 1 << 16  # the most ends of values that are tried in one call, in 0.25 s
_MARKS = ('<|"|>', "<escape>")
_MARK = "(?:" + "|".join(map(re.escape, _MARKS)) + ")"
_HEAD = regex.compile(r"\s*+call:\s*+(?P<name>[^\s{}()<>,]{1,256})\s*+(?P<open>[{(])")
_CLOSED_BY = {"{": "}", "(": ")", "[": "]"}
_CLOSING = re.compile(r"[\s}\])]*+")
_COMMA = re.compile(r"\s*+,?+")
_LITERALS = {"True": "true", "False": "false", "None": "null"}
# A whole call inside a string.
_CALL = (
    r"<\|tool_call>\s*+call:.*?(?:<tool_call\|>|\Z)"
    r"|<start_function_call>\s*+call:.*?(?:<end_function_call>|\Z)"
)
# Patterns of the possible ends of a value, by its opening quote.
_ENDS = {
    **{m: re.compile(rf"{re.escape(m)}|(?P<skipped>{_CALL})", re.DOTALL) for m in _MARKS},
    **{quote: re.compile(rf"{quote}|(?P<skipped>\\.)", re.DOTALL) for quote in "\"'"},
    "": re.compile(rf"{_MARK}|,|[}}\])][\s}}\])]*+"),
}


def _key(sign: str, excluded: str) -> str:
    word = rf"(?:(?!{_MARK})[^\s,\"'{{}}\[\]{excluded}])++"
    quoted = rf"(?P<quote>{_MARK}|[\"'])(?P<quoted>(?:(?!(?P=quote)).)*+)(?P=quote)"
    return rf"\s*+(?:{quoted}|(?P<bare>{word}(?:[ ]{word})*+))\s*+{sign}\s*+"


# Patterns of the next pair or value, by the bracket that closes the object or list.
_ITEMS = {
    "}": _key(":", ":"),
    ")": _key("=", "()="),
    "]": rf"\s*+(?:{_MARK}|[\"'{{\[\d-]|(?:[tT]rue|[fF]alse|null|None)\b)",
}
_KEYS = {closing: re.compile(item, re.DOTALL) for closing, item in _ITEMS.items()}
_NEXT = {
    closing: re.compile(rf",(?:{item}|\s*+[}}\])])", re.DOTALL) for closing, item in _ITEMS.items()
}


def read_gemma(text: str, at: int, schemas: Schemas, closers: Sequence[str]) -> Body:
    """Read one call. Raises Unfinished if the call's arguments are malformed."""
    head = match_head(_HEAD, text, at)
    arguments, end = _Items(text, closers).read(head.end(), _CLOSED_BY[head["open"]])
    return [{"name": head["name"], "arguments": arguments}], end


class _Items:
    def __init__(self, text: str, closers: Sequence[str]) -> None:
        self._text = text
        self._count = 0
        marks = "|".join(map(re.escape, closers))
        after = rf"\Z|call:|<\|?tool|<start_function|{marks}" if marks else ""
        self._next = {**_NEXT, "": re.compile(after)}

    def read(self, at: int, closing: str) -> tuple[Any, int]:
        """Return the object or list that opens before `at`, and the place after it.

        `closing` has the closing brackets of all open objects and lists, the innermost first.
        """
        text, items = self._text, dict[Any, Any]()
        if len(closing) > _DEPTH:
            raise Unfinished("too deep")
        while not text.startswith(closing[0], at := skip(SPACE, text, at)):
            key: Any = len(items)
            if closing[0] != "]":
                pair = _KEYS[closing[0]].match(text, at)
                if pair is None:
                    raise Unfinished("no key")
                key, at = pair["bare"] or pair["quoted"], pair.end()
            if text.startswith(("{", "["), at):
                items[key], at = self.read(at + 1, _CLOSED_BY[text[at]] + closing)
            else:
                items[key], at = self._read_value(at, closing)
            at = skip(_COMMA, text, at)
        return list(items.values()) if closing[0] == "]" else items, at + 1

    def _read_value(self, at: int, closing: str) -> tuple[Any, int]:
        quote = next(each for each in _ENDS if self._text.startswith(each, at))
        begin = at + len(quote)
        for end in _ENDS[quote].finditer(self._text, begin):
            self._count += 1
            if self._count > _MOST:
                break
            is_marked = end[0] in _ENDS
            behind = end.end() if is_marked else end.start()
            if end.lastgroup != "skipped" and self._is_followed(behind, closing):
                return _value(quote, self._text[begin : end.start()], is_text=is_marked), behind
        raise Unfinished("no end of a value")

    def _is_followed(self, at: int, closing: str) -> bool:
        """Return True if the text after `at` shows that a value ends there."""
        end = skip(_CLOSING, self._text, at)
        closed = "".join(self._text[at:end].split())[: len(closing)]
        following = self._next[closing[len(closed) :][:1]]
        return closing.startswith(closed) and following.match(self._text, end) is not None


def _value(quote: str, text: str, *, is_text: bool) -> Any:
    if quote in _MARKS:
        return _ENDS[quote].sub(lambda end: end["skipped"] or '"', text)
    try:
        if quote:
            return read_literal(quote + text + quote, is_lenient=True)
    except UNREADABLE as error:
        raise Unfinished("no text") from error
    bare = text.strip()
    if not (is_text or bare):
        raise Unfinished("no value")
    return bare if is_text else guess(_LITERALS.get(bare, bare))
