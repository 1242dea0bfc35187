"""Shows an answer while it is written: as Markdown on a terminal, as text elsewhere."""

import sys
import time
from collections.abc import Iterable
from typing import Final

from markdown_it import MarkdownIt
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines
from rich.spinner import Spinner
from rich.text import Text

from gateway.cli.conversation import Piece

THOUGHT_LINES: Final = 6  # lines of the last thoughts that are shown
_THOUGHT_CHARACTERS: Final = 2000  # enough for THOUGHT_LINES of a wide terminal
# HTML and images are shown as they are written, since rich would leave them out.
_PARSER: Final = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_PARSER.disable("image")


def make_markdown(text: str) -> Markdown:
    """Return Markdown that keeps the lines of a paragraph, as a poem needs them."""
    markdown = Markdown("", code_theme="ansi_dark", hyperlinks=False)  # shows a link's address
    markdown.parsed = _PARSER.parse(text)
    for child in (child for token in markdown.parsed for child in token.children or ()):
        child.type = "hardbreak" if child.type == "softbreak" else child.type
    return markdown


def whole_blocks(text: str) -> int:
    """Count the characters of the blocks that later text cannot change: all but the last."""
    lines = text.split("\n")[:-1]
    tokens = _PARSER.parse("\n".join(lines))
    start = max((token.map[0] for token in tokens if token.map and not token.level), default=0)
    return sum(len(line) + 1 for line in lines[:start])


class Screen:
    """Shows one answer on a terminal.

    Whole blocks are printed, and stay; the last block and thoughts are drawn again as they grow.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._spinner = console, Spinner("dots")
        self._text, self._thoughts = "", ""  # the parts that are drawn again
        self._since, self._has_printed = 0.0, False

    def draw(self, pieces: Iterable[Piece]) -> None:
        try:
            with Live(get_renderable=self._preview, console=self._console, transient=True):
                for piece in pieces:
                    self._take(piece)
        finally:
            self._fold()
            self._print(len(self._text))

    def _take(self, piece: Piece) -> None:
        if piece.thoughts:
            self._print(len(self._text))
            self._since = self._since if self._thoughts else time.monotonic()
            self._thoughts += piece.thoughts
        if piece.text:
            self._fold()
            self._text += piece.text
            if "\n" in piece.text:
                self._print(whole_blocks(self._text))

    def _preview(self) -> RenderableType:
        if not (self._thoughts or self._text).strip():
            return self._spinner
        room = max(1, self._console.height - 2)
        # A long block takes long to draw: the first line may open a block of code.
        first, *lines = self._text.lstrip("\n").split("\n")
        shown: RenderableType = make_markdown("\n".join((first, *lines[-room:])))
        if self._thoughts:
            shown = Text(self._thoughts[-_THOUGHT_CHARACTERS:].lstrip(), "dim")
            room = min(room, THOUGHT_LINES)
        return SegmentLines(self._console.render_lines(shown, pad=False)[-room:], new_lines=True)

    def _fold(self) -> None:
        if self._thoughts:
            seconds, self._thoughts = time.monotonic() - self._since, ""
            self._console.print(Text(f"thought for {seconds:.0f} s", "dim"))

    def _print(self, count: int) -> None:
        """Print the first characters of the text for good."""
        done, self._text = self._text[:count], self._text[count:]
        if done.strip():
            self._console.print(*([""] if self._has_printed else []), make_markdown(done))
            self._has_printed = True


def write(pieces: Iterable[Piece]) -> None:
    """Write the text of an answer, without its thoughts, and a line feed at its end."""
    last = "\n"
    try:
        for piece in pieces:
            last = piece.text or last
            print(piece.text, end="", flush=True)
    finally:
        print(end="" if last.endswith("\n") else "\n", flush=True)


def show(pieces: Iterable[Piece]) -> None:
    """Show an answer on a terminal, or write it elsewhere."""
    (Screen(Console()).draw if sys.stdout.isatty() else write)(pieces)
