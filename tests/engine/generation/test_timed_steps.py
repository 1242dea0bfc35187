"""Decode steps that are timed: of as many rows as asked, apart from all others."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.engine.generation.engine import TIMED_STEPS, GenerationEngine
from tests.checkpoints import HYBRID, SLIDING, write_chat
from tests.engine.generation.harness import (
    Rows,
    active_memory,
    answers,
    exchange,
    job,
    open_engine,
    shapes,
    watch,
)

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sliding": SLIDING, "hybrid": HYBRID}


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GenerationEngine]:
    folder = write_chat(tmp_path / "m", **KINDS[request.param])
    engine = open_engine(folder, prefix_cache_bytes=1 << 20, speculate_rows=4)
    yield engine
    engine.close()


def timed(engine: GenerationEngine, rows: int) -> list[float | None]:
    return list(engine.time_step(rows))


@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_has_as_many_rows_as_asked_and_its_seconds_come_last(
    engine: GenerationEngine, rows: int
) -> None:
    """One pass each: the prompts, one that is not timed, and those that are."""
    passes = shapes(engine)
    *before, seconds = timed(engine, rows)
    assert before == [None] * (1 + TIMED_STEPS)
    assert seconds is not None
    assert 0 < seconds < 60
    # The last of a prompt is a pass of its own, and a pass is launched before its tokens are read.
    assert passes == [(rows, 1)] * (3 + TIMED_STEPS)


def test_nothing_of_it_is_left_and_answers_under_way_are_as_before(
    engine: GenerationEngine,
) -> None:
    """However far it came: no sequence, no KV, nothing kept of prompts."""
    expected = [answer.text for answer in answers(engine, [job("Hello"), job("What is it?")])]
    gc.collect()
    held, before = engine.nbytes(), active_memory()
    for steps in range(1, 4):
        test = engine.time_step(8)
        for _ in range(steps):
            next(test)
        test.close()
    timed(engine, 8)
    assert engine.nbytes() == held
    assert active_memory() <= before + 4096
    rows = Rows(engine)
    for each in ("Hello", "What is it?"):
        rows.add(job(each))
    for _ in range(4):
        rows.step()
        timed(engine, 3)
    assert [answer.text for answer in rows.finish()] == expected


def test_a_pass_that_fails_is_raised_and_the_engine_answers_on(tmp_path: Path) -> None:
    def check(tokens: mx.array) -> None:
        if tokens.shape[0] == 4:
            raise RuntimeError("no such shapes")

    engine = open_engine(write_chat(tmp_path / "m"))
    sound = watch(engine, check)
    assert timed(engine, 2)[-1] is not None
    with pytest.raises(RuntimeError, match="no such shapes"):
        timed(engine, 4)
    exchange(engine, sound)
    assert engine.is_batched
    told = answers(engine, [job("Hello")])
    assert [answer.error for answer in told] == [None]
    engine.close()
