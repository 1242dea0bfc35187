"""A conversation's terminal: reads prompts, and shows answers as Markdown while they come."""

import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines
from rich.spinner import Spinner
from rich.text import Text

_THOUGHTS: Final = 400  # characters of the last thoughts that are shown
_HIGHLIGHTED: Final = 8000  # most characters of a block of code in colours, which take long
# HTML and images are shown as they are written, since rich would leave them out.
_PARSER: Final = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_PARSER.disable("image")
_NOT_KEPT: Final = "Prompts are not kept for later: {}"
_ECHO: Final = 2  # columns of ^C, which a terminal echoes at the end of the last line


def make_reader(*, keeps_history: bool) -> Callable[[], str]:
    """Return a reader of prompts. A history that cannot be kept is named, and left out."""
    history = None
    try:
        history = open_history() if keeps_history else None
    except (OSError, RuntimeError) as error:
        print(_NOT_KEPT.format(error), file=sys.stderr)
    keys, about = KeyBindings(), "Ask something. /help lists the commands."
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session = PromptSession[str](history=history, key_bindings=keys, placeholder=about)
    return partial(session.prompt, ">>> ", enable_suspend=True)


class History(FileHistory):
    """Prompts in a file. One that it cannot take, as on a full disk, is named."""

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            print(_NOT_KEPT.format(error), file=sys.stderr)


def open_history() -> History:
    """Return the user's history, in a file that others cannot read.

    Raises OSError, and RuntimeError for a user without a home.
    """
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = state if state.is_absolute() else Path.home() / ".local/state"  # as XDG has it
    file = state / "mlx-gateway" / "history"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(0o600)
    file.chmod(0o600)  # it may be older
    with file.open("a+"):
        return History(file)


def make_markdown(text: str) -> Markdown:
    """Return Markdown that keeps the lines of a paragraph, as a poem needs them."""
    markdown = Markdown("", code_theme="ansi_dark", hyperlinks=False)  # shows a link's address
    markdown.parsed = _PARSER.parse(text)
    for token in markdown.parsed:
        token.info = token.info if len(token.content) <= _HIGHLIGHTED else ""
        for child in token.children or ():
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
        self._since = 0.0

    def draw(self, pieces: Iterable[tuple[str, str]]) -> None:
        """Show the pieces of an answer: texts and thoughts."""
        try:
            with Live(get_renderable=self._preview, console=self._console, transient=True):
                for text, thoughts in pieces:
                    self._take(text, thoughts)
        finally:
            self._fold()
            self._print(len(self._text))

    def _take(self, text: str, thoughts: str) -> None:
        if thoughts:
            self._print(len(self._text))
            self._since = self._since if self._thoughts else time.monotonic()
            self._thoughts += thoughts
        if text:
            self._fold()
            self._text += text
            if "\n" in text:
                self._print(whole_blocks(self._text))

    def _preview(self) -> RenderableType:
        room = max(1, self._console.height - 2)
        # A long block takes long to draw: the first line may open a block of code.
        first, *lines = self._text.lstrip("\n").split("\n")
        shown: RenderableType = make_markdown("\n".join((first, *lines[-room:])))
        if self._thoughts:
            shown = Text(self._thoughts[-_THOUGHTS:].lstrip(), "dim")
        elif not self._text.strip():
            return self._spinner
        options = self._console.options.update(width=self._width())
        drawn = self._console.render_lines(shown, options, pad=False)
        return SegmentLines(drawn[-room:], new_lines=True)

    def _width(self) -> int:
        return max(1, self._console.width - _ECHO)

    def _fold(self) -> None:
        if self._thoughts:
            seconds, self._thoughts = time.monotonic() - self._since, ""
            self._console.print(Text(f"thought for {seconds:.0f} s", "dim"))

    def _print(self, count: int) -> None:
        """Print the first characters of the text for good."""
        done, self._text = self._text[:count], self._text[count:]
        if done.strip():
            self._console.print(make_markdown(done), "", width=self._width())
