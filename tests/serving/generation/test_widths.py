"""The width that pays: which it is, and rows that take turns, on a device with an M1's costs."""

import asyncio
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gateway import metrics
from gateway.jobs.chat import Grammar, Question, Sampling
from gateway.jobs.steps import KvCost, SequenceParams
from gateway.serving.budget import Budget
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.choice import Choice
from gateway.serving.generation.fan_out import score_labels
from gateway.serving.generation.memory import RowCosts, RowMemory
from gateway.serving.generation.policy import QUANTUM, Batch, GenerationLimits, Joining
from gateway.serving.generation.queue import WaitingQueue
from gateway.serving.generation.scheduler import STEPS_PER_TURN
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
from tests.serving.generation.harness import asking, asking_bound, deltas, joined
from tests.serving.generation.simulated import (
    M1,
    PAIRS,
    WIDE,
    SimulatedChat,
    run_virtually,
    seconds,
    simulating,
)

LONG = 10_000  # tokens of a context
TABLES = st.lists(st.floats(1e-4, 1.0), max_size=len(WIDTHS)).map(tuple)


class TestChoice:
    """The choice depends on the seconds of steps alone."""

    @given(step_s=TABLES, rows=st.integers(1, 32))
    def test_no_other_width_gives_more_and_all_run_together_unless_it_gains(
        self, step_s: StepTimes, rows: int
    ) -> None:
        width = choose_width(step_s, rows)
        assert 1 <= width.rows <= rows
        if not step_s:
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
        assert [choose_width(PAIRS, rows).rows for rows in (1, 2, 3, 4, 9, 16)] == [1, *[2] * 5]

    def test_rows_beyond_the_widest_step_take_turns_if_its_own_would(self) -> None:
        """Timing ends at a step beyond the limit, which may have lost by its rows."""
        assert choose_width(PAIRS, 17).rows == choose_width(PAIRS[:4], 9).rows == 2
        assert choose_width((0.09, 0.327), 3).rows == 1
        assert choose_width(M1, 32) == Width(32)

    def test_no_width_is_timed_without_places_nor_after_one_that_took_too_long(self) -> None:
        assert [next_width(M1[:known], 32, 0.25) for known in range(6)] == [*WIDTHS, None]
        assert [next_width(M1[:known], 5, 0.25) for known in range(4)] == [1, 2, 4, None]
        assert next_width((0.1, 0.26), 32, 0.25) is None
        assert next_width((0.36,), 32, 0.25) == 2, "two rows may take six times as long"
        assert next_width((0.1,) * 9, 32, 0.25) is None


def test_a_burst_of_answers_of_a_form_keeps_to_the_places_of_held_ones() -> None:
    """A free stream runs beside the burst, and all of them take turns."""

    def choice(number: int, grammar: Grammar | None) -> Choice:
        params = SequenceParams(prompt=[1, 2], max_tokens=100, sampling=Sampling(), grammar=grammar)
        return Choice(params, asyncio.Queue(), rank=float(number), request=str(number))

    limits = GenerationLimits(max_batch_size=4, structured_rows=1, prefill_chunk_tokens=512)
    memory = RowMemory(Budget(10**9), RowCosts(KvCost(1)))
    free, waiting = choice(0, None), WaitingQueue()
    free.id, free.length, free.tokens = 1, 50, 3
    for number in range(1, 30):
        waiting.add(choice(number, Grammar("choice", '["a"]')))
    joining = Joining(Batch(limits, memory, [free], step_s=M1), waiting)
    assert len(joining.joiners) == sum(joiner.is_held for joiner in joining.joiners) == 4


async def ask(batcher: GenerationBatcher, lengths: list[int]) -> list[str]:
    """Ask for answers of these lengths at once."""
    words = [chr(97 + i) * length for i, length in enumerate(lengths)]
    return list(await asyncio.gather(*(asking(batcher, each) for each in words)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16])
def test_streams_on_an_m1_give_what_the_best_width_does(rows: int) -> None:
    """Two as many tokens as one after the other, four and eight as many as together."""
    engine = SimulatedChat(max_context=LONG)

    async def work() -> None:
        async with simulating(engine) as batcher:
            answers = await ask(batcher, [400] * rows)
        assert [len(answer) for answer in answers] == [400] * rows

    run_virtually(work())
    ratio = rows * 400 * M1[0] / engine.spent_s  # compared with one after the other
    width = choose_width(M1, rows).rows
    assert ratio >= 0.95 * width * M1[0] / seconds(M1, width)
    assert ratio >= {1: 0.95, 2: 0.95, 3: 0.95, 4: 0.9, 8: 1.7, 16: 3.2}[rows]


def test_without_turns_two_streams_on_an_m1_lose_nearly_half() -> None:
    """They lose it before a step was timed, and with `batching: force`."""
    engine = SimulatedChat(max_context=LONG)

    async def work() -> None:
        async with simulating(engine, known=()) as batcher:
            await ask(batcher, [400] * 2)

    run_virtually(work())
    assert 0.41 <= 2 * 400 * M1[0] / engine.spent_s <= 0.62


@pytest.mark.parametrize("device", [M1, PAIRS])
@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_a_stream_waits_for_the_runs_of_others_and_no_longer(device: StepTimes, rows: int) -> None:
    """Its fair share is a run of each of the others, as many at once as the width has."""
    engine = SimulatedChat(max_context=LONG, device=device)

    async def work() -> None:
        async with simulating(engine) as batcher:
            await ask(batcher, [300] * rows)

    run_virtually(work())
    width = choose_width(device, rows).rows
    assert max(map(len, engine.together)) == width
    assert max(engine.waits().values()) <= (ceil(rows / width) - 1) * RUN
    half = engine.together[: len(engine.together) // 2]
    shares = [sum(number in ids for ids in half) for number in range(1, rows + 1)]
    assert max(shares) - min(shares) <= 2 * RUN, "nobody runs more often than the others"
    if width < rows:
        changes = sum(a != b for a, b in pairwise(half))
        assert changes <= len(half) / RUN, "runs of those that share a batch end together"


def test_one_that_comes_later_begins_after_a_run_of_each_that_is_there() -> None:
    engine = SimulatedChat(max_context=LONG, device=PAIRS)

    async def work() -> None:
        async with simulating(engine) as batcher:
            first = asyncio.create_task(ask(batcher, [900] * 4))
            await asyncio.sleep(5)
            assert await asking(batcher, "later") == "later"
            assert not first.done()
            await first

    run_virtually(work())
    assert engine.waits()[5] <= 3 * RUN


def test_turns_end_once_enough_streams_gain_by_one_batch_and_begin_again_as_they_leave() -> None:
    engine = SimulatedChat(max_context=LONG)
    gain = metrics.of(metrics.WIDTH_GAIN, "m")._value
    gains: list[float] = []

    async def work() -> None:
        with structlog.testing.capture_logs() as logged:
            async with simulating(engine) as batcher:
                two = asyncio.create_task(ask(batcher, [600] * 2))
                await asyncio.sleep(3)
                gains.append(gain.get())
                four = asyncio.create_task(ask(batcher, [50] * 4))
                await asyncio.sleep(4)
                gains.append(gain.get())
                await four
                await asyncio.sleep(1)
                gains.append(gain.get())
                await two
                assert await ask(batcher, [20]) == ["a" * 20]
                gains.append(gain.get())
        told = [entry for entry in logged if entry["event"] == "rows_alternate"]
        assert [(entry["width"], entry["gain"]) for entry in told] == [(1, 1.82)]

    run_virtually(work())
    assert gains == pytest.approx([1.817, 1, 1.817, 1], abs=1e-3)
    assert {*map(len, engine.together)} == {1, 2, 6}
    assert sum(len(ids) == 2 for ids in engine.together) < STEPS_PER_TURN, "the turn as four left"


def test_questions_are_judged_beside_streams_that_take_turns() -> None:
    """They decode nothing: none is held, nor counted among those that decode."""
    engine = SimulatedChat(max_context=LONG)
    labels: list[object] = []

    async def work() -> None:
        async with simulating(engine) as batcher:
            two = asyncio.create_task(ask(batcher, [200] * 2))
            await asyncio.sleep(2)
            job = replace(
                generate_job("in", max_tokens=1),
                questions=[Question(i, "?", ["yes", "no"]) for i in range(3)],
            )
            judged, _ = await score_labels(batcher, [job])
            labels.extend(judged)
            assert not two.done()
            await two

    run_virtually(work())
    assert len(labels) == 3
    assert {*map(len, engine.together)} == {1}


@pytest.mark.parametrize("bound", [1, 2])
def test_answers_of_a_form_take_turns_with_the_others(bound: int) -> None:
    """They take turns among each other too, where only a given number of them decode at once."""
    engine = SimulatedChat(max_context=LONG)

    async def work() -> None:
        async with simulating(engine, structured_rows=bound) as batcher:
            held = [asking_bound(batcher, letter * 300) for letter in "gh"]
            free = asking(batcher, "f" * 300)
            assert await asyncio.gather(*held, free) == ["g" * 300, "h" * 300, "f" * 300]

    run_virtually(work())
    assert {*map(len, engine.together)} == {1}
    # Answers of a form are alone at the end, and take turns of a quantum if only one may decode.
    assert max(engine.waits().values()) <= (2 * RUN if bound == 2 else QUANTUM)


def test_answers_of_a_form_of_which_one_decodes_take_turns_of_a_quantum() -> None:
    """They take turns even without measured times: they would never share a step."""
    engine = SimulatedChat(max_context=LONG)

    async def work() -> None:
        async with simulating(engine) as batcher:
            held = [asking_bound(batcher, letter * 300) for letter in "gh"]
            await asyncio.gather(*held)

    run_virtually(work())
    assert sum(a != b for a, b in pairwise(engine.together)) <= 2 * 300 / QUANTUM


@dataclass(frozen=True)
class Stream:
    """An answer that somebody asks for, and perhaps leaves."""

    comes_s: float
    tokens: int
    choices: int
    is_bound: bool
    leaves_s: float | None


STREAMS = st.builds(
    Stream,
    comes_s=st.sampled_from([0.0, 0.0, 0.5, 4.0, 20.0]),
    tokens=st.sampled_from([1, 2, 7, 30, 200, 500]),
    choices=st.sampled_from([1, 1, 1, 3]),
    is_bound=st.sampled_from([False, False, False, True]),
    leaves_s=st.sampled_from([None, None, None, None, 0.01, 1.0, 9.0]),
)


@pytest.mark.generator
@given(
    streams=st.lists(STREAMS, min_size=1, max_size=12),
    device=st.sampled_from([M1, PAIRS, WIDE]),
    places=st.sampled_from([1, 2, 3, 32]),
    bound=st.sampled_from([1, 2]),
    nbytes=st.sampled_from([None, 2500, 9000]),
)
def test_every_stream_ends_with_all_its_tokens_whoever_comes_and_goes(
    streams: list[Stream], device: StepTimes, places: int, bound: int, nbytes: int | None
) -> None:
    engine = SimulatedChat(max_context=LONG, device=device)
    budget = Budget(nbytes or 10**9)
    memory = RowMemory(budget, RowCosts(KvCost(1), most=lambda: budget.limit_bytes))

    async def live(batcher: GenerationBatcher, number: int, stream: Stream) -> None:
        await asyncio.sleep(stream.comes_s)
        words = chr(97 + number) * stream.tokens
        job = generate_job(words, n=stream.choices, max_tokens=1000)
        if stream.is_bound:
            job = replace(job, grammar=Grammar("choice", '["a"]'))
        asked = asyncio.create_task(deltas(batcher, job))
        if stream.leaves_s is not None:
            await asyncio.sleep(stream.leaves_s)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            return
        answer = await asked
        for index in range(stream.choices):
            mine = [delta for delta in answer if delta.index == index]
            assert joined(mine) == words
            assert mine[-1].finish_reason == "stop"

    async def work() -> None:
        given: dict[str, Any] = {"structured_rows": bound, "max_batch_size": places}
        async with simulating(engine, memory, **given) as batcher, asyncio.timeout(10_000):
            lives = [live(batcher, number, stream) for number, stream in enumerate(streams)]
            await asyncio.gather(*lives)
            await asyncio.sleep(1)
            assert batcher.tickets == batcher.rows == 0

    run_virtually(work())
    assert not engine.scripted
    assert budget.free_bytes == budget.limit_bytes
    assert max(map(len, engine.together), default=0) <= places
    if nbytes is None and not any(stream.is_bound for stream in streams):
        inside = sum(stream.choices for stream in streams)
        assert max(engine.waits().values(), default=0) <= inside * RUN
