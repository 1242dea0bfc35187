"""docs/reliability.md cites what there is: tests, settings and series."""

import re
from pathlib import Path

import pytest

from gateway import metrics
from gateway.settings import Settings

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


CITED = re.compile(r"`((?:\w+/)*test_\w+\.py(?:::\w+)?)`")


@pytest.mark.parametrize("cited", sorted(set(CITED.findall(TEXT))))
def test_every_test_that_is_cited_exists(cited: str) -> None:
    """A promise is worth what provokes it."""
    file, _, name = cited.partition("::")
    path = ROOT / file if file.startswith("compat_tests/") else ROOT / "tests" / file
    assert f"def {name}(" in path.read_text(encoding="utf-8") or not name


def test_every_foreign_behaviour_is_tested_or_has_a_reason() -> None:
    """A test of ours is cited, or it is said why there is none."""
    section = TEXT.partition("## Behaviours of llama.cpp's server tests\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert rows
    for _, asked, here in rows:
        assert asked
        assert CITED.search(here) or here.startswith("Not here: "), asked


def test_every_setting_that_is_named_exists() -> None:
    """A knob that is turned has to be there."""
    named = {name.lower() for name in re.findall(r"GATEWAY_([A-Z_]+)", TEXT)}
    assert named
    assert named <= set(Settings.model_fields)


def test_every_series_that_is_named_exists() -> None:
    """By its name as Prometheus has it: a counter's ends with _total."""
    known = {each.name for each in vars(metrics).values() if isinstance(each, metrics.Level)}
    known |= {name for each in vars(metrics).values() if (name := getattr(each, "_name", None))}
    named = {name.removesuffix("_total") for name in re.findall(r"`(gateway_\w+)`", TEXT)}
    assert named
    assert named <= known
