"""docs/upstream.md is true: each of its blocks prints the text below it, with this mlx-lm."""

import contextlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@cache
def preamble() -> dict[str, Any]:
    """Return the names of the block that all others begin with."""
    first = FENCED.search(PAGE)
    assert first is not None
    names: dict[str, Any] = {}
    exec(compile(first[2], "docs/upstream.md", "exec"), names)
    return names


def faults() -> dict[str, tuple[str, str]]:
    """Return code and output of each heading's block."""
    found = {}
    of_mlx_lm = PAGE.partition("\n# In mlx-vlm\n")[0]
    for section in of_mlx_lm.split("\n## ")[1:]:
        (kind, code), (other, output) = FENCED.findall(section)
        assert (kind, other) == ("python", "text")
        found[section.splitlines()[0]] = (code, output)
    return found


@pytest.mark.parametrize("fault", list(faults()))
def test_a_reproduction_prints_what_the_page_says(fault: str) -> None:
    code, output = faults()[fault]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, fault, "exec"), dict(preamble()))
    assert printed.getvalue() == output


def test_a_key_that_is_read_is_not_called_ignored() -> None:
    for family in ("llama", "qwen3_moe", "mixtral", "solar_open", "phi3"):
        assert not preamble()["is_ignored"](family, rope_theta=7.0)
