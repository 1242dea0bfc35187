"""Joins, leaves, prefixes, drafts, grammars, adapters, preemption: all at once, at random."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway import clock
from tests.engine.generation.mixtures import KINDS, Mixture, Models

SHORT_S = 15 / len(KINDS)
LONG = 10_000 // len(KINDS)


def run(folder: Path, kind: str, may_go_on: Callable[[int], bool]) -> Counter[str]:
    """Make one mixture after another while it may go on; return what happened in them."""
    models, steps, counts = Models.write(folder, kind), 0, Counter[str]()
    for seed in itertools.count():
        mixture = Mixture(models, kind, seed)
        began = steps
        steps += mixture.run(lambda: may_go_on(began))
        counts += mixture.counts
        if not may_go_on(steps):
            return counts
    raise AssertionError("there are always more seeds")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_amid_any_others_is_that_of_its_model_alone(kind: str, tmp_path: Path) -> None:
    """As many mixtures as fit: at least one step, on however busy a machine."""
    until = clock.now() + SHORT_S
    counts = run(tmp_path, kind, lambda steps: steps == 0 or clock.now() < until)
    print(kind, counts)
