"""The generation batcher: rows join, are told their deltas, and leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from gateway import clock
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    GatewayError,
    Overloaded,
)
from gateway.jobs import Tier
from gateway.jobs.chat import Delta, Grammar
from gateway.serving.generation.policy import QUANTUM
from gateway.serving.generation.scheduler import STEPS_PER_TURN
from gateway.serving.lane import Lane, Turn
from tests.fakes import ScriptedChat, generate_job
from tests.serving.generation.harness import (
    asking,
    asking_bound,
    asking_together,
    batching,
    deltas,
    joined,
    reached,
    text,
)
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_late_row_joins_the_running_batch() -> None:
    engine = ScriptedChat()
    async with batching(engine) as batcher:
        engine.gate.close()
        first = asking(batcher, "a" * 50)
        await reached(engine)
        second = asking(batcher, "bb")
        await until(lambda: batcher.tickets == 1)
        engine.gate.open()
        assert await second == "bb"
        assert await first == "a" * 50
    assert max(engine.steps) == 2


PASS_S = 0.03


class OneByOne(ScriptedChat):
    """Reads one prompt a pass, which takes as long as a step by a clock that only passes move."""

    now_s = 0.0

    def prefill(self, token_budget: int) -> list[Delta]:
        self.now_s += PASS_S
        _, *others = self.inside("reading").values()
        for row in others:
            row.state = "parked"
        ended = super().prefill(token_budget)
        for row in others:
            row.state = "reading"
        return ended

    def decode(self) -> list[Delta]:
        self.now_s += PASS_S
        return super().decode()

    def time(self) -> float:
        return self.now_s


class Asked(Lane):
    """A lane that says who has asked for it: each waits from then on, until it is its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    @asynccontextmanager
    async def turn(self, kind: str, owner: str = "") -> AsyncIterator[Turn]:
        self.kinds.append(kind)
        async with super().turn(kind, owner) as turn:
            yield turn


async def steps_of_a_burst(limit_s: float, prompt: str, max_tokens: int | None) -> list[int]:
    """Let eight requests come while a ninth is being answered: rows a step, until all have begun
    or, if they write nothing, have ended.
    """
    engine, lane = OneByOne(max_context=2000), Asked()
    with patch.object(clock, "now", engine.time):
        async with lane, batching(engine, lane=lane, pass_limit_s=limit_s) as batcher:
            engine.gate.close()
            first = asking(batcher, "a" * 60)
            await reached(engine)
            asked = len(lane.kinds)
            burst = [asking(batcher, prompt, max_tokens=max_tokens) for _ in range(8)]
            # A turn that nobody is seen to wait for goes on for many steps.
            await until(lambda: batcher.tickets == 8 and lane.kinds[asked:] == ["prefill"])
            engine.gate.open()
            assert await asyncio.gather(*burst) == [prompt[:max_tokens]] * 8
            meanwhile = len(engine.steps)
            await first
    return engine.steps[: engine.steps.index(9) if 9 in engine.steps else meanwhile]


async def test_a_burst_is_mostly_read_before_its_first_steps() -> None:
    """Steps of two rows and three would each cost nearly as much as steps of nine."""
    steps = await steps_of_a_burst(5, "x" * 12, None)
    assert sum(1 < rows < 5 for rows in steps) <= 1


@pytest.mark.parametrize(
    ("pass_limit_s", "prompt", "max_tokens"),
    [(0, "x" * 12, None), (PASS_S / 2, "x" * 12, None), (5, "x" * 1200, 12), (5, "x" * 12, 0)],
    ids=["no limit", "two limits", "long prompts", "prompts that are only scored"],
)
async def test_rows_that_run_do_not_wait_long_for_a_burst(
    pass_limit_s: float, prompt: str, max_tokens: int | None
) -> None:
    """Long prompts would take many passes, and prompts that are only scored never share a step."""
    steps = await steps_of_a_burst(pass_limit_s, prompt, max_tokens)
    if max_tokens == 0:
        assert len(steps) >= 5
    else:
        assert sum(1 < rows < 5 for rows in steps) > 1


async def test_no_more_rows_run_than_the_limit() -> None:
    engine = ScriptedChat()
    async with batching(engine, max_batch_size=3) as batcher:
        asked = await asking_together(batcher, [generate_job("abc") for _ in range(8)])
        assert [joined(answer) for answer in await asyncio.gather(*asked)] == ["abc"] * 8
    assert max(engine.steps) == 3


async def test_a_caller_who_leaves_takes_its_row_along() -> None:
    """The row leaves within a step, and its neighbour goes on."""
    engine = ScriptedChat()
    async with batching(engine) as batcher:
        engine.gate.close()
        jobs = [generate_job("a" * 90), generate_job("b" * 9)]
        leaving, staying = await asking_together(batcher, jobs)
        await reached(engine)
        leaving.cancel()
        await asyncio.wait([leaving])
        engine.gate.open()
        assert joined(await staying) == "b" * 9
        await until(lambda: len(engine.left) == 1)
        assert len(engine.steps) < 20
        assert not engine.inside("decoding")


async def test_a_caller_who_leaves_while_waiting_never_joins() -> None:
    engine = ScriptedChat()
    async with batching(engine, max_batch_size=1) as batcher:
        engine.gate.close()
        running = asking(batcher, "a" * 5)
        await reached(engine)
        waiting = asking(batcher, "b")
        await until(lambda: batcher.tickets == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        engine.gate.open()
        await running
    assert engine.joined == [1]


async def test_refusals_come_before_any_delta() -> None:
    """Refusals by the template, the context or the grammar are known on entering."""
    engine = ScriptedChat(max_context=10)
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match="template"):
            await deltas(batcher, generate_job("refuse me"))
        with pytest.raises(ContextLengthExceeded):
            await deltas(batcher, generate_job("far too long a prompt"))
        with pytest.raises(BadRequest, match="bad"):
            await deltas(batcher, replace(generate_job("hi"), grammar=Grammar("regex", "bad")))
    assert engine.joined == []


async def test_a_full_queue_answers_overloaded_and_recovers() -> None:
    """The bound counts the tokens of prompts, those of running rows too."""
    engine = ScriptedChat()
    async with batching(engine, queue_max_tokens=4) as batcher:
        engine.gate.close()
        held = [asking(batcher, "ab") for _ in range(2)]
        await until(lambda: batcher.rows + batcher.tickets == 2)
        with pytest.raises(Overloaded):
            await asking(batcher, "c")
        engine.gate.open()
        await asyncio.gather(*held)
        assert await asking(batcher, "c") == "c"


async def test_a_deadline_ends_an_answer_under_way() -> None:
    engine, job = ScriptedChat(), generate_job("a" * 9)
    soon = replace(job, caller=replace(job.caller, deadline=clock.now() + 0.2))
    async with batching(engine) as batcher:
        engine.gate.close()
        with pytest.raises(DeadlineExceeded):
            async with batcher.generate(soon) as generation:
                await anext(generation.deltas)
        engine.gate.open()
        await until(lambda: engine.left == engine.joined)
        assert await asking(batcher, "next") == "next"


async def test_an_engine_that_raises_fails_its_rows_and_serves_the_next() -> None:
    async with batching(ScriptedChat(fail_at_step=2)) as batcher:
        with pytest.raises(EngineFailed, match="the step failed"):
            await asking(batcher, "abc")
        assert await asking(batcher, "next") == "next"


async def test_rows_that_run_when_the_model_goes_are_told() -> None:
    engine = ScriptedChat()
    async with batching(engine, max_batch_size=1) as batcher:
        engine.gate.close()
        asked = await asking_together(batcher, [generate_job("a" * 9) for _ in range(2)])
        await reached(engine)
        asyncio.get_running_loop().call_later(0.05, engine.gate.open)
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(answer, GatewayError)


@pytest.mark.parametrize("bound", [1, 3])
async def test_bound_rows_run_within_their_limit_while_free_rows_go_on(bound: int) -> None:
    engine = ScriptedChat()
    async with batching(engine, structured_rows=bound) as batcher:
        engine.gate.close()
        held = [asking_bound(batcher, "g" * 20) for _ in range(5)]
        await reached(engine)
        free = asking(batcher, "free")
        await until(lambda: batcher.rows + batcher.tickets == 6)
        engine.gate.open()
        assert await free == "free"
        assert not all(task.done() for task in held)
        assert await asyncio.gather(*held) == ["g" * 20] * 5
    assert max(engine.steps) == bound + 1


async def test_a_priority_row_joins_before_those_that_came_first() -> None:
    """A flex row joins after later ones, while there is no room for all."""
    engine = ScriptedChat()
    order: list[str] = []

    async def ask(name: str, tier: Tier) -> None:
        job = generate_job(name)
        await text(batcher, replace(job, caller=replace(job.caller, tier=tier)))
        order.append(name)

    async with batching(engine, max_batch_size=1) as batcher:
        engine.gate.close()
        tiers = {"first": Tier.DEFAULT, "flex": Tier.FLEX, "default": Tier.DEFAULT}
        asked = [asyncio.create_task(ask(*each)) for each in tiers.items()]
        await reached(engine)
        asked.append(asyncio.create_task(ask("priority", Tier.PRIORITY)))
        await until(lambda: batcher.tickets == 3)
        engine.gate.open()
        await asyncio.gather(*asked)
    assert order == ["first", "priority", "default", "flex"]


async def test_embeddings_get_their_turn_between_steps() -> None:
    """An answer under way gives the lane up when another's turn is due, and loses nothing."""
    engine = ScriptedChat(max_context=200)

    async def embed() -> int:
        async with lane.turn("embedding"):
            return len(engine.steps)

    async with Lane() as lane, batching(engine, lane=lane) as batcher:
        engine.gate.close()
        answer = asking(batcher, "a" * 90)
        await reached(engine)
        steps_before = asyncio.create_task(embed())
        await asyncio.sleep(0)  # it asks for the lane
        engine.gate.open()
        assert await steps_before < 20
        assert await answer == "a" * 90


async def test_a_worker_that_breaks_tells_those_inside_and_works_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise later callers would wait for a task that has ended."""
    errors = [RuntimeError("a bug of ours")]

    def stumble() -> None:
        if errors:
            raise errors.pop()

    async with batching(ScriptedChat()) as batcher, asyncio.timeout(60):
        monkeypatch.setattr(batcher, "note_batching", stumble)
        with pytest.raises(EngineFailed, match="a bug of ours"):
            await asking(batcher, "first")
        assert await asking(batcher, "second") == "second"


async def test_a_request_of_many_choices_keeps_nobody_waiting() -> None:
    """Another's row joins with the next place, not behind thousands."""
    engine = ScriptedChat()
    async with batching(engine, max_batch_size=4) as batcher:
        big = asking(batcher, "x" * 20, n=1000)
        await until(lambda: len(engine.joined) >= 8)
        engine.gate.close()
        await reached(engine)
        before, waiting = len(engine.joined), batcher.tickets
        small = asking(batcher, "small")
        await until(lambda: batcher.tickets > waiting)
        engine.gate.open()
        assert await small == "small"
        assert len(engine.joined) - before < 20
        big.cancel()
        await asyncio.gather(big, return_exceptions=True)
        await until(lambda: batcher.tickets == 0)


async def test_choices_are_counted_against_the_queue() -> None:
    """One request alone may have any number; beside it only as many as there is room for."""
    engine = ScriptedChat()
    async with batching(engine, max_batch_size=4, queue_limit=8) as batcher:
        engine.gate.close()
        alone = asking(batcher, "ab", n=20)
        await reached(engine)
        with pytest.raises(Overloaded, match="20 choices waiting"):
            await asking(batcher, "ab")
        engine.gate.open()
        await alone
        assert await asking(batcher, "ab") == "ab"


async def test_the_prompts_of_one_request_leave_others_half_of_the_queue() -> None:
    """Its first is let in as any request; more of them only while half is free."""
    engine = ScriptedChat()
    async with batching(engine, max_batch_size=4, queue_limit=8) as batcher:
        engine.gate.close()
        first = generate_job("ab", n=3)
        asked = [asyncio.create_task(deltas(batcher, first))]
        await reached(engine)
        with pytest.raises(Overloaded):
            await deltas(batcher, replace(first, n=2))
        asked.append(asyncio.create_task(deltas(batcher, replace(first, n=1))))
        await until(lambda: batcher.rows + batcher.tickets == 4)
        other = asking(batcher, "ab", n=4)
        await until(lambda: batcher.rows + batcher.tickets == 8)
        engine.gate.open()
        await asyncio.gather(*asked, other)


@pytest.mark.parametrize("others", [1, 4])
async def test_a_short_bound_answer_waits_a_quantum_of_each_long_one(others: int) -> None:
    """It does not wait for their ends: they take turns though only one runs at a time."""
    engine = ScriptedChat(max_context=10_000)
    async with batching(engine) as batcher:
        long = [asking_bound(batcher, "g" * 4000) for _ in range(others)]
        await until(lambda: len(engine.steps) > 10)
        engine.gate.close()
        await reached(engine)
        began, waiting = len(engine.steps), batcher.tickets
        short = asking_bound(batcher, "12345")
        await until(lambda: batcher.tickets > waiting)
        engine.gate.open()
        assert await short == "12345"
        waited = len(engine.steps) - began
        assert waited <= others * (QUANTUM + STEPS_PER_TURN) + 2 * STEPS_PER_TURN
        assert max(engine.steps) == 1
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)


async def test_bound_rows_that_wait_have_read_their_prompts() -> None:
    """Their turn begins with a token, not with a prompt; those who leave meanwhile are gone."""
    engine = ScriptedChat(max_context=10_000)
    async with batching(engine) as batcher:
        asked = [asking_bound(batcher, "g" * 2000) for _ in range(5)]
        await until(lambda: len(engine.inside("parked")) == batcher.tickets == 4)
        assert engine.rows == 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: not engine.rows and not batcher.tickets)
        assert not engine.inside("parked")
