"""The width that pays: which it is, and rows that take turns, on a device with an M1's costs."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import metrics
from gateway.jobs.chat import Delta, Grammar
from gateway.jobs.steps import KvCost
from gateway.serving.budget import Budget
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.memory import KV_STEP, RowCosts, RowMemory
from gateway.serving.generation.widths import (
    LEAST_GAIN,
    RUN,
    WIDTHS,
    StepTimes,
    Width,
    choose_width,
    next_width,
)
from tests.fakes import generate_job
from tests.serving.generation.harness import asking, deltas, joined
from tests.serving.generation.simulated import (
    M1,
    PAIRS,
    WIDE,
    SimulatedChat,
    run_virtually,
    seconds,
    simulating,
    until_now,
)

LONG = 10_000  # tokens of a context
TABLES = st.lists(st.floats(1e-4, 1.0), max_size=len(WIDTHS)).map(tuple)


class TestChoice:
    """By the seconds of steps alone."""

    @given(step_s=TABLES, rows=st.integers(1, 32))
    def test_no_other_width_gives_more_and_all_run_together_unless_it_gains(
        self, step_s: StepTimes, rows: int
    ) -> None:
        width = choose_width(step_s, rows)
        assert 1 <= width.rows <= rows
        if rows > max(WIDTHS[: len(step_s)], default=0):
            assert width == Width(rows)
            return
        rates = [each / seconds(step_s, each) for each in range(1, rows + 1)]
        assert rates[width.rows - 1] >= rates[-1] * (1 - 1e-9)
        if width.alternates:
            assert width.gain == pytest.approx(max(rates) / rates[-1])
            assert width.gain >= LEAST_GAIN
        else:
            assert width == Width(rows)
            assert max(rates) < LEAST_GAIN * rates[-1] * (1 + 1e-9)

    def test_an_m1_alternates_between_two_and_three_and_batches_more(self) -> None:
        widths = {rows: choose_width(M1, rows).rows for rows in range(1, 33)}
        assert widths == {1: 1, 2: 1, 3: 1} | {rows: rows for rows in range(4, 33)}
        assert choose_width(M1, 2).gain == pytest.approx(1.82, abs=0.01)

    def test_a_step_that_costs_the_same_or_no_more_a_row_batches_all(self) -> None:
        for step_s in (WIDE, (0.1,) * 5, (0.1, 0.2, 0.4, 0.8, 1.6), (), (0.1,)):
            assert all(choose_width(step_s, rows) == Width(rows) for rows in range(1, 33))

    def test_a_width_between_is_found(self) -> None:
        assert [choose_width(PAIRS, rows).rows for rows in (1, 2, 3, 4, 9, 16, 17)] == [
            *(1, 2, 2, 2, 2, 2),
            17,
        ]

    def test_no_width_is_timed_without_places_nor_after_one_that_took_too_long(self) -> None:
        assert [next_width(M1[:known], 32, 0.25) for known in range(6)] == [*WIDTHS, None]
        assert [next_width(M1[:known], 5, 0.25) for known in range(4)] == [1, 2, 4, None]
        assert next_width((0.1, 0.26), 32, 0.25) is None
        assert next_width((0.1,) * 9, 32, 0.25) is None


async def ask(batcher: GenerationBatcher, lengths: list[int], **given: Any) -> list[str]:
    """Ask for answers of these lengths at once."""
    asked = [asking(batcher, chr(97 + i % 26) * length, **given) for i, length in enumerate(lengths)]
    return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16])
def test_streams_on_an_m1_give_what_the_best_width_does(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimulatedChat(max_context=LONG)

    async def work() -> None:
        async with simulating(engine) as batcher:
            answers = await ask(batcher, [400] * rows)
        assert [len(answer) for answer in answers] == [400] * rows

    run_virtually(monkeypatch, work())
    one_after_another = rows * 400 * M1[0] / engine.spent_s
    width = choose_width(M1, rows).rows
    expected = width * M1[0] / seconds(M1, width)
    assert one_after_another >= 0.95 * min(expected, 1.0) if rows < 4 else 0.95 * expected
    assert one_after_another >= 0.95 * expected


@pytest.mark.parametrize("device", [M1, PAIRS])
@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_a_stream_waits_for_the_runs_of_others_and_no_longer(
    device: StepTimes, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimulatedChat(max_context=LONG, device=device)

    async def work() -> None:
        async with simulating(engine) as batcher:
            await ask(batcher, [300] * rows)

    run_virtually(monkeypatch, work())
    width = choose_width(device, rows).rows
    assert max(Counter(map(len, engine.together))) <= max(width, 3)
    assert max(engine.waits().values()) <= ceil(rows / width) * RUN
