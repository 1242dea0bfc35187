"""docs/reliability.md and pages beside it cite things that exist: tests, settings, series."""

import re
from pathlib import Path

import pytest

from gateway import metrics
from gateway.settings import Settings

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
PROMISES = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
UPSTREAM = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
FOREIGN = (ROOT / "docs" / "llama-cpp-suite.md").read_text(encoding="utf-8")
BYTES = TEXT.partition("\n## Where bytes are held\n")[2].partition("\n## ")[0]

CONSTANT = re.compile(r"`((?:\w+/)*\w+\.py)::([A-Za-z_]+)`")
CITED = re.compile(r"`((?:\w+/)*test_\w+\.py(?:::\w+)?)`")


@pytest.mark.parametrize("cited", sorted(set(CITED.findall(PROMISES + FOREIGN + UPSTREAM))))
def test_every_test_that_is_cited_exists(cited: str) -> None:
    file, _, name = cited.partition("::")
    path = ROOT / file if file.startswith("compat_tests/") else ROOT / "tests" / file
    assert f"def {name}(" in path.read_text(encoding="utf-8") or not name


def test_every_promise_has_a_test_by_its_number() -> None:
    promised = re.findall(r"^\| (\d+) \| ", TEXT.partition("\n## Where")[0], re.MULTILINE)
    provoked = re.findall(r"^\| (\d+) \| (.+) \|$", PROMISES, re.MULTILINE)
    assert [number for number, _ in provoked] == promised
    assert len(promised) > 50
    assert all(CITED.search(tests) for _, tests in provoked)


def test_every_foreign_behaviour_is_tested_or_has_a_reason() -> None:
    """A test of ours is cited, or it is said why there is none."""
    rows = [line.split(" | ") for line in FOREIGN.splitlines() if line.startswith("| ")][2:]
    assert rows
    for _, asked, here in rows:
        assert asked
        assert CITED.search(here) or here.startswith("Not here: "), asked


@pytest.mark.parametrize("cited", sorted(set(CONSTANT.findall(BYTES))), ids="::".join)
def test_every_constant_that_bounds_bytes_exists(cited: tuple[str, str]) -> None:
    """It is where the table says; a path is below gateway/, unless it is the repository's."""
    file, name = cited
    path = ROOT / file if file.startswith("deploy/") else ROOT / "gateway" / file
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"^(?:class |def )?{name}\b", text, re.MULTILINE)


def test_every_place_that_holds_bytes_names_what_bounds_it() -> None:
    rows = [line for line in BYTES.splitlines() if line.startswith("| ")]
    for row in rows:
        assert row.startswith(("| What is held |", "| --- |")) or re.search(
            r"`(?:GATEWAY_|OTEL_)\w+`|\.py::", row.rsplit(" | ", 1)[1]
        ), row


def test_every_setting_that_is_named_exists() -> None:
    named = {name.lower() for name in re.findall(r"GATEWAY_([A-Z_]+)", TEXT + FOREIGN)}
    assert named
    assert named <= set(Settings.model_fields)


def test_every_series_that_is_named_exists() -> None:
    known = {each.name for each in vars(metrics).values() if isinstance(each, metrics.Level)}
    known |= {name for each in vars(metrics).values() if (name := getattr(each, "_name", None))}
    named = {name.removesuffix("_total") for name in re.findall(r"`(gateway_\w+)`", TEXT)}
    assert named
    assert named <= known
