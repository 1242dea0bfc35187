"""Texts pushed in pieces, and the parts that come out."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from gateway.engine.answers.output_parts import OutputPart
from tests.engine.chat_formats import gathered


class Parser(Protocol):
    def push(self, piece: str) -> list[OutputPart]: ...
    def flush(self) -> list[OutputPart]: ...


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def pushed(parser: Parser, pieces: Sequence[str]) -> dict[str, Any]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return gathered([*parts, *parser.flush()])
