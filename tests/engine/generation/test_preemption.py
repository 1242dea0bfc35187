"""Rows that are parked, preempted, resumed and bounded, wherever they are."""

from pathlib import Path
from typing import Any

import pytest

from gateway.jobs.chat import Sampling
from gateway.jobs.steps import Verdict
from tests.checkpoints import SLIDING, STATEFUL, teach_thinking, write_chat
from tests.engine.generation.harness import Batch, Passing, exchange, open_engine

GREEDY: dict[str, Any] = {"sampling": Sampling(temperature=0), "max_tokens": 40}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sliding": SLIDING, "stateful": STATEFUL}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return teach_thinking(write_chat(path, **KINDS[request.param]), opens=False)


def test_a_parked_row_says_nothing_and_keeps_its_kv(folder: Path) -> None:
    engine = open_engine(folder)
    weights = engine.nbytes()
    batch = Batch(engine)
    row = batch.ask("Hello", GREEDY)
    batch.step()
    batch.change(parking=[row])
    assert not batch.is_busy
    assert engine.nbytes() > weights
    batch.change(preempting=[row])
    assert engine.nbytes() == weights
    assert batch.decode() == []
    batch.leave(row)
    batch.change(resuming=[row])
    assert not batch.is_busy


def test_a_preempted_row_can_be_read_again_and_wait(folder: Path) -> None:
    """A plan that resumes and parks it: all its tokens are read, and it waits to say more."""
    engine = open_engine(folder)
    batch = Batch(engine)
    alone = batch.answers[batch.ask("Hello", GREEDY)]
    batch.finish()
    row = batch.ask("Hello", GREEDY)
    for _ in range(5):
        batch.step()
    batch.change(preempting=[row])
    batch.change(resuming=[row], parking=[row])
    said = batch.answers[row].tokens
    while batch.is_busy:
        batch.step()
    assert batch.answers[row].tokens == said < alone.tokens
    batch.change(resuming=[row])
    batch.finish()
    assert batch.answers[row].says_as(alone)


def test_a_fault_after_a_row_is_resumed_does_not_stop_it_again(folder: Path) -> None:
    """It was parked while it was read; the fault has it read again, and nobody resumes it twice."""
    engine = open_engine(folder)
    batch = Batch(engine)
    row = batch.ask("Hello", {**GREEDY, "max_tokens": 12})
    batch.change(parking=[row])
    batch.step()
    batch.change(resuming=[row])
    exchange(engine, Passing(engine._model, 2))
    batch.finish()
    assert batch.answers[row].ends
    assert not engine._sequences._parked


@pytest.mark.parametrize(("tokens", "is_batched"), [(1, False), (6, True)])
def test_a_bound_that_is_reached_ends_a_row(folder: Path, tokens: int, is_batched: bool) -> None:
    engine = open_engine(folder, prefix_cache_bytes=1 << 24)
    engine.apply_verdict(Verdict(rows=is_batched, single=True, prefixes=True, window=True))
    batch = Batch(engine)
    sampling = {"sampling": Sampling(temperature=1, seed=1, ignore_eos=True), "max_tokens": 12}
    batch.ask("Hi " * 200, sampling)
    batch.finish()
    row, other = batch.ask("Hi " * 200, sampling), batch.ask("Hello!", sampling)
    while batch.answers[row].tokens < tokens:
        batch.step()
    cached = batch.answers[row].cached_tokens
    assert cached
    batch.hear(batch.change(capped=[(row, tokens)]))
    batch.finish()
    assert (batch.answers[row].finish_reason, batch.answers[row].tokens) == ("length", tokens)
    assert batch.answers[row].cached_tokens == cached
    assert batch.answers[other].tokens == 12
