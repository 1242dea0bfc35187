"""Joins, leaves, prefixes, drafts, grammars, adapters, preemption: all at once, at random."""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engine.generation.mixtures import ASSISTANT, HEADS, KINDS, Mixture, Models

pytestmark = pytest.mark.slow

# One in which much happens in little time: prompts kept and drafts, whatever else.
SEEDS = {"plain": 4, "sliding": 5, "hybrid": 11, "states": 1, "head": 2, "later": 1, "assistant": 0}
LONG_STEPS = 10_000 / len(KINDS)
ALWAYS = {
    "joined",
    "ended",
    "left",
    "parking",
    "preempting",
    "capped",
    "cached",
    "formed",
    "reloaded",
}
ALWAYS |= {"forced", "accepted"}


def run(folder: Path, kind: str, may_go_on: Callable[[int], bool]) -> Counter[str]:
    """Make mixtures while more steps are wanted; return how often each event happened in them."""
    models, steps, counts = Models.write(folder, kind), 0, Counter[str]()
    for seed in itertools.count():
        mixture = Mixture(models, kind, seed)
        steps += mixture.run(partial(may_go_on, steps))
        counts += mixture.counts
        if not may_go_on(steps):
            break
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_amid_any_others_is_that_of_its_model_alone(kind: str, tmp_path: Path) -> None:
    """The soak below makes hundreds."""
    mixture = Mixture(Models.write(tmp_path, kind), kind, SEEDS[kind])
    mixture.run(lambda: True)
    assert min(mixture.counts[name] for name in ("cached", "drafted", "ended", "preempting")) > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_of_thousands_differs_from_that_of_its_model_alone(
    kind: str, tmp_path: Path
) -> None:
    """All that a mixture is for happened, or this would show little."""
    counts = run(tmp_path, kind, lambda steps: steps < LONG_STEPS)
    source = "mtp_head" if kind in HEADS else "draft_model" if kind == ASSISTANT else ""
    always = ALWAYS | ({source} if source else set())
    assert min(counts[name] for name in always) >= 5, counts
