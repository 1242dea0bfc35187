"""Progress: a bar on a terminal, and lines elsewhere."""

import io
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal
from unittest.mock import patch

import pytest
import structlog

from gateway import logs
from gateway.cli import progress
from gateway.cli.progress import shown
from gateway.jobs import Progress

MIB = 1 << 20


class Terminal(io.StringIO):
    """A terminal that keeps everything written to it."""

    def isatty(self) -> bool:
        return True


@contextmanager
def stderr(stream: io.StringIO, *, style: Literal["json", "console"]) -> Iterator[None]:
    with patch.object(sys, "stderr", stream):
        logs.configure("info", style)
        try:
            yield
        finally:
            structlog.reset_defaults()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Give a terminal of 100 columns, on which a bar is drawn at once."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "REFRESH_S", 0.001)
    return Terminal()


def draw(look: Sequence[Progress | None], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Show these one after the other, the last one twice, and do something in between."""
    left, is_over = list(look), threading.Event()

    def next_one() -> Progress | None:
        if len(left) > 1:
            return left.pop(0)
        if left:
            meanwhile()
            return left.pop()
        is_over.set()
        return look[-1]

    with shown(next_one):
        assert is_over.wait(60)


def frames(terminal: Terminal) -> list[str]:
    """List what was drawn in the bar's place, without colours and bars."""
    text = re.sub(r"\x1b\[[\d;]*m|[━╸╺]+ ?", "", terminal.getvalue())
    return [" ".join(line.split()) for line in re.split(r"\r|\n|\x1b\[2K", text) if line.strip()]


def download(mib: int) -> Progress:
    return Progress("model_download", "mine", mib * MIB, 24 * MIB)


def load(model: str, mib: int, total: int | None = None) -> Progress:
    return Progress("model_loading", model, mib * MIB, None if total is None else total * MIB)


def test_a_bar_tells_bytes_and_not_the_speed_of_what_was_there(terminal: Terminal) -> None:
    """A download that goes on where another stopped: its first bytes took no time."""
    with stderr(terminal, style="console"):
        draw([download(10), download(10)])
    told = [frame for frame in frames(terminal) if frame.startswith("Downloading")]
    assert told
    assert all(re.fullmatch(r"Downloading mine 10\.0/24\.0 MiB \? -:--:--", each) for each in told)


def test_one_bar_shows_models_one_after_the_other(terminal: Terminal) -> None:
    """Bytes only while they are known; after the last byte the model is warmed up."""
    with stderr(terminal, style="console"):
        draw([load("a", 0), load("a", 1, 2), load("a", 2, 2), None, load("b", 9, 10)])
    told = [re.split(r" \?| \d:", frame)[0] for frame in frames(terminal)]
    order = [each for each in dict.fromkeys(told) if each[0].isalpha()]
    assert order == [
        "Loading a",
        "Loading a 1.0/2.0 MiB",
        "Warming up a 2.0/2.0 MiB",
        "Loading b 9.0/10.0 MiB",
    ]


def test_a_line_that_is_logged_meanwhile_is_whole_and_the_bar_goes(terminal: Terminal) -> None:
    log = logs.get("test")
    with stderr(terminal, style="console"):
        draw([download(1)], lambda: log.info("meanwhile", what="x" * 30))
        text = terminal.getvalue()
        print("after", file=sys.stderr)
    assert re.search(r"\x1b\[2Kmeanwhile [\d:]{8} what=x{30}\n", text)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert text.endswith("\x1b[1A\x1b[2K")  # the bar's line is empty
    assert terminal.getvalue() == f"{text}after\n"


def test_an_interrupt_clears_the_bar(terminal: Terminal) -> None:
    is_drawn = threading.Event()

    def look() -> Progress:
        if "Downloading" in terminal.getvalue():
            is_drawn.set()
        return download(1)

    def interrupt() -> None:
        with shown(look):
            assert is_drawn.wait(60)
            raise KeyboardInterrupt

    with stderr(terminal, style="console"), pytest.raises(KeyboardInterrupt):
        interrupt()
    assert "\x1b[?25h" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")


def test_elsewhere_a_line_tells_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is written while nothing goes on."""
    assert progress.LINE_S <= 10
    monkeypatch.setattr(progress, "LINE_S", 0.001)
    written = io.StringIO()
    with stderr(written, style="json"):
        draw([None, load("a", 0), load("a", 3, 9), download(5)])
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    told = [
        (line["event"], line["model"], line["bytes"], line.get("total_bytes")) for line in lines
    ]
    assert list(dict.fromkeys(told)) == [
        ("model_loading", "a", 0, None),
        ("model_loading", "a", 3 * MIB, 9 * MIB),
        ("model_download", "mine", 5 * MIB, 24 * MIB),
    ]
    assert "\x1b" not in written.getvalue()
