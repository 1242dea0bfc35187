"""Calls whose own text says where they end, between two marks or after one."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.engine.answers.call_reading import (
    Call,
    Ending,
    ReadBody,
    Reading,
    Schemas,
    Unfinished,
)
from gateway.engine.answers.call_writing import write_call

_BETWEEN = re.compile(r"(?:[\s;,]|```\w*)*+")  # bodies
_AFTER = re.compile(r"[\s;,`)\]}]*+")  # the last body: brackets too many
_LONGEST = 64  # characters, more than any mark has


@dataclass(frozen=True, slots=True)
class Bodies:
    """One family's calls.

    `marks` are pairs of marks; the second is empty if only the answer's end ends the calls. One
    call, and one pair of its arguments, are written by forms (call_writing.py).
    """

    read_body: ReadBody
    marks: Sequence[tuple[str, str]] = ()
    call: str = '{{"name": "{name}", "arguments": {arguments}}}'
    pair: str = ""
    write_value: Callable[[Any], str] = str
    is_list: bool = False  # of all calls, between two marks

    def __call__(self, text: str, at: int, schemas: Schemas, ending: Ending) -> Reading | None:
        start, closer = next(
            (pair for pair in self.marks if text.startswith(pair[0], at)), ("", "")
        )
        closers = (closer,) if start else tuple(end for _, end in self.marks)
        closers = tuple(filter(None, closers))
        begin = at + len(start.removesuffix("["))
        try:
            calls, end, is_last = self._read_bodies(text, begin, schemas, closers)
        except Unfinished:
            return None
        if is_last:
            return None if ending is Ending.MORE else Reading(calls, end, is_last=True)
        place = skip(_AFTER, text, end)
        for each in closers:
            found = text.find(each, end, place + len(each))
            if found >= 0:
                return Reading(calls, found + len(each))
        rest = text[place : place + _LONGEST]
        may_close = not rest or any(each.startswith(rest) for each in closers)
        if may_close and (ending is Ending.MORE or (ending is Ending.CUT and closer)):
            return None
        return Reading(calls, end if rest else place)

    def write(self, calls: Sequence[Call]) -> str:
        start, end = self.marks[0] if self.marks else ("", "")
        texts = [
            write_call(call, self.call, self.pair, self.write_value, place=place)
            for place, call in enumerate(calls)
        ]
        if self.is_list:
            return f"{start}[{', '.join(texts)}]{end}"
        return "\n".join(f"{start}{text}{end}" for text in texts)

    def _read_bodies(
        self, text: str, at: int, schemas: Schemas, closers: Sequence[str]
    ) -> tuple[list[Call], int, bool]:
        """Return calls that follow one another, their end, and whether a broken one follows."""
        marks = (*closers, *(start for start, _ in self.marks))
        calls, end = self.read_body(text, skip(_BETWEEN, text, at), schemas, closers)
        while calls:
            begin = skip(_BETWEEN, text, end)
            if begin == len(text) or text.startswith(marks, begin):
                break
            try:
                more, more_end = self.read_body(text, begin, schemas, closers)
            except Unfinished:
                return calls, end, True
            except ValueError:
                break
            if not more:
                return calls, end, True
            calls, end = calls + more, more_end
        return calls, end, False


def skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the place in a text behind what a pattern matches there, which may be nothing."""
    match = pattern.match(text, at)
    return at if match is None else match.end()
