"""docs/reliability.md cites what there is: tests, settings and series."""

import re
from pathlib import Path

import pytest

from gateway import metrics
from gateway.settings import Settings

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("cited", sorted(set(re.findall(r"`(\w+/test_\w+\.py(?:::\w+)?)`", TEXT))))
def test_every_test_that_is_cited_exists(cited: str) -> None:
    """A promise is worth what provokes it."""
    file, _, name = cited.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8") or not name


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
