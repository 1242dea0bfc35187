"""Log lines: what happened, and nobody's secrets."""

import io
import json
import sys
from typing import Literal

import pytest
import structlog

from gateway import logs


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_logged_exception_shows_no_variables(
    style: Literal["json", "console"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold keys and prompts, and make lines of megabytes."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    try:
        logs.configure("info", style)
        _fail("sk-secret-key")
    finally:
        structlog.reset_defaults()
    assert "ValueError" in written.getvalue()
    assert "sk-secret" not in written.getvalue()
    assert len(written.getvalue()) < 5000


def test_a_line_is_written_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone surrogate of a file's name, a huge number, an object: each in a line of JSON."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    try:
        logs.configure("info", "json")
        for odd in ("\udcff", 2**80, object(), {("a", "b"): 1}):
            logs.get("test").info("odd", said=odd)
    finally:
        structlog.reset_defaults()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["odd"] * 4


def _fail(key: str) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get("test").exception("failed")
