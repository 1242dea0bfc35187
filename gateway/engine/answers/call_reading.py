"""The text of tool calls → calls, by position: a mark counts by where it stands."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # of each function's arguments, by its name
Call = Mapping[str, Any]  # "name", "arguments" and, where the model makes one, "id"


class Ending(Enum):
    """What follows a text: more of it, nothing as its model ended it, or nothing as it was cut."""

    MORE = auto()
    END = auto()
    CUT = auto()


class Unfinished(ValueError):
    """Raised for a text that ends before its call does."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The calls at a place of a text, and the place where they end, closing mark included.

    Without calls, the text up to there is text; nothing in it is looked at again. If it `is_last`,
    what follows is text too: it begins a call that cannot be read.
    """

    calls: Sequence[Call]
    end: int
    is_last: bool = False


# Reads the calls at a place of a text, where a mark stands or a call without one. Returns None as
# long as what follows may matter, and for a call that the text leaves unfinished. Raises ValueError
# if no call begins there.
ReadCalls = Callable[[str, int, Schemas, Ending], Reading | None]
# Reads one body of calls (a JSON object or list, say) at a place of a text, given the functions
# and the marks that may close it → its calls, and the place where it ends; no calls if it is no
# call. Raises Unfinished, or ValueError if no body begins there.
ReadBody = Callable[[str, int, Schemas, Sequence[str]], tuple[list[Call], int]]

_BETWEEN = re.compile(r"(?:[\s;,]|```\w*)*+")  # bodies
_AFTER = re.compile(r"[\s;,`)\]}]*+")  # the last body: brackets too many
_LONGEST = 64  # characters, more than any mark has


@dataclass(frozen=True, slots=True)
class Bodies:
    """Reads calls whose own text says where they end, between two marks or after one.

    `marks` are pairs of marks; the second is empty if only the answer's end ends the calls.
    """

    read_body: ReadBody
    marks: Sequence[tuple[str, str]]

    def __call__(self, text: str, at: int, schemas: Schemas, ending: Ending) -> Reading | None:
        start = next((start for start, _ in self.marks if text.startswith(start, at)), "")
        closers = tuple({end for begin, end in self.marks if end and start in ("", begin)})
        try:
            calls, end, is_last = self._read_bodies(text, at + len(start), schemas, closers)
        except Unfinished:
            return None
        if is_last:
            return None if ending is Ending.MORE else Reading(calls, end, is_last=True)
        place = skip(_AFTER, text, end)
        rest = text[place : place + _LONGEST]
        for closer in closers:
            if rest.startswith(closer):
                return Reading(calls, place + len(closer))
        if ending is Ending.MORE and (not rest or any(each.startswith(rest) for each in closers)):
            return None
        if ending is Ending.CUT and closers and not rest:
            return None
        return Reading(calls, end if rest else place)

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
