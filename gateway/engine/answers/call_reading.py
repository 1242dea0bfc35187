"""The readers of the text of tool calls, as types, and their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # the arguments of each function, by its name
Call = Mapping[str, Any]  # "name", "arguments" and, where the model makes one, "id"


class Ending(Enum):
    """How a text ends: not yet, by the model's own choice, or cut at its greatest length."""

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


def read_all(read: ReadCalls, text: str, schemas: Schemas) -> list[Call]:
    """Return the calls of a text that is nothing else. Raises ValueError."""
    calls: list[Call] = []
    rest = text.strip()
    while rest:
        reading = read(rest, 0, schemas, Ending.END)
        if reading is None or not reading.calls:
            raise ValueError("not calls alone")
        calls += reading.calls
        rest = rest[reading.end :].lstrip()
    return calls
