"""Joins, leaves, prefixes, drafts, grammars, adapters, preemption: all at once, at random."""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gateway import clock
from tests.engine.generation.mixtures import KINDS, Mixture, Models

pytestmark = pytest.mark.slow

SHORT_S = 9 / len(KINDS)
LONG_STEPS = 10_000 / len(KINDS)
ALWAYS = {"joined", "ended", "left", "park", "preempt", "capped", "cached", "formed", "reloaded"}
ALWAYS |= {"forced", "accepted"}


def run(folder: Path, kind: str, may_go_on: Callable[[int], bool]) -> Counter[str]:
    """Make mixtures while so many steps are not enough; return how often what happened in them."""
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
    """As many mixtures as fit in the time; at least one step, on however busy a machine."""
    until = clock.now() + SHORT_S
    run(tmp_path, kind, lambda steps: not steps or clock.now() < until)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_of_thousands_differs_from_that_of_its_model_alone(
    kind: str, tmp_path: Path
) -> None:
    """All that a mixture is for happened, or this would show little."""
    counts = run(tmp_path, kind, lambda steps: steps < LONG_STEPS)
    assert min(counts[name] for name in ALWAYS) >= 5, counts
