"""The KV of rows: counted before they join, so that what does not fit waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gateway.errors import BadRequest, NoRoom
from gateway.jobs import Delta, GenerateJob, RowJob, Sampling
from gateway.serving.budget import Budget
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.batches import GenerationLimits
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.memory import GROWTH, KV_STEP, RowCosts, RowMemory, rectangle
from gateway.serving.lane import Lane
from gateway.serving.tokens import TokenPool
from tests.fakes import ScriptedWriter, generate_job

pytestmark = pytest.mark.anyio
LIMITS = GenerationLimits(max_batch_size=32, prefill_chunk_tokens=512)


def row(prompt: int, max_tokens: int, *, is_open: bool = False) -> RowJob:
    return RowJob(prompt=[1] * prompt, max_tokens=max_tokens, sampling=Sampling(), is_open=is_open)


def test_kv_is_a_rectangle_of_the_longest_row() -> None:
    """Rows times longest, rounded up as the caches grow, and one row more for joining."""
    assert rectangle([]) == 0
    assert rectangle([1]) == 2 * 256
    assert rectangle([256, 257]) == 3 * 512
    assert rectangle([3000] + [100] * 7) == 9 * 3072


def test_a_bounded_row_is_counted_whole_and_an_open_one_as_it_may_well_be() -> None:
    """Who sets no bound mostly gets a short answer."""
    memory = RowMemory(Budget(10**9), RowCosts(1, most=10**9, answer_tokens=500))
    assert memory.counted(row(100, 9000)) == 9100
    assert memory.counted(row(100, 9000, is_open=True)) == 600
    assert memory.counted(row(100, 80, is_open=True)) == 180


def test_a_row_that_never_fits_is_refused_and_an_open_one_made_to_fit() -> None:
    """Alone it would take two rows of its length."""
    memory = RowMemory(Budget(20_480), RowCosts(10, most=20_480))
    assert memory.admitted(row(24, 1000)).max_tokens == 1000
    with pytest.raises(BadRequest, match="more memory than the gateway may use") as refused:
        memory.admitted(row(25, 1000))
    assert (refused.value.code, refused.value.param) == ("insufficient_memory", "max_tokens")
    assert memory.admitted(row(24, 90_000, is_open=True)).max_tokens == 1000
    with pytest.raises(BadRequest):
        memory.admitted(row(1024, 1, is_open=True))


def test_a_model_larger_than_it_seemed_has_room_for_the_rows_its_share_includes() -> None:
    """Though with its weights alone the budget is overdrawn."""
    memory = RowMemory(Budget(0), RowCosts(1, included=4 * KV_STEP, most=-1000))
    assert memory.admitted(row(100, 100)).max_tokens == 100
    assert memory.fitting([], [200]) == 1
    with pytest.raises(BadRequest, match="together they can be 512 here"):
        memory.admitted(row(100, 1000))


def test_where_the_cost_of_a_token_is_not_known_nothing_is_counted() -> None:
    """A config in other words than usual must not stop a model from working."""
    memory = RowMemory(Budget(0), RowCosts())
    assert memory.admitted(row(10**6, 10**6)).max_tokens == 10**6
    assert memory.fitting([10**6], [10**6, 10**6]) == 2
    memory.hold([10**6])
    assert memory.grown(10, [], 5000) == 10 + GROWTH


def test_as_many_join_as_fit_and_nobody_is_overtaken() -> None:
    """Beside those that run, with what the model's own share includes for them."""
    budget = Budget(5 * KV_STEP * 10)
    memory = RowMemory(budget, RowCosts(10, included=2 * KV_STEP * 10))
    assert memory.fitting([], [200] * 10) == 6
    assert memory.fitting([200, 200], [200] * 10) == 4
    assert memory.fitting([200, 200], [2000, 10]) == 0
    memory.hold([200] * 6)
    assert budget.free_bytes == 0
    memory.hold([200])
    assert budget.free_bytes == budget.limit_bytes
    memory.kept = KV_STEP * 10
    assert memory.fitting([], [200] * 10) == 5
    memory.hold([200] * 5)
    assert budget.free_bytes == 0
    memory.release()
    assert budget.free_bytes == budget.limit_bytes


def test_bytes_that_others_hold_are_not_there() -> None:
    """Nor are those that nobody has: what was larger than it seemed overdraws a budget."""
    budget = Budget(4 * KV_STEP)
    other = budget.share()
    memory = RowMemory(budget, RowCosts(1))
    other.state(2 * KV_STEP)
    assert memory.fitting([], [1, 1, 1]) == 1
    other.state(9 * KV_STEP)
    assert memory.fitting([], [1]) == 0
    assert memory.grown(KV_STEP, [], 10_000) == KV_STEP


def test_an_open_row_grows_while_there_is_memory() -> None:
    """At most to its whole length."""
    budget = Budget(2 * (KV_STEP + GROWTH))
    memory = RowMemory(budget, RowCosts(1))
    assert memory.grown(KV_STEP, [], 10_000) == KV_STEP + GROWTH
    assert memory.grown(KV_STEP, [], KV_STEP + 10) == KV_STEP + 10
    assert memory.grown(KV_STEP, [KV_STEP], 10_000) == KV_STEP


@asynccontextmanager
async def batching(
    engine: ScriptedWriter, memory: RowMemory, limits: GenerationLimits = LIMITS
) -> AsyncIterator[GenerationBatcher]:
    with TokenPool() as pool:
        grammars = GrammarCache("m", engine.compile, pool.run)
        async with Lane() as lane:
            batcher = GenerationBatcher("m", engine, lane, pool, limits, grammars, memory)
            async with batcher.running():
                yield batcher


async def said(batcher: GenerationBatcher, job: GenerateJob) -> list[Delta]:
    async with batcher.generate(job) as generation:
        return [delta async for delta in generation.deltas]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_rows_beyond_the_budget_wait_and_are_all_answered() -> None:
    """Three at once, where four rows' rectangle is what fits."""
    budget = Budget(4 * KV_STEP)
    engine = ScriptedWriter()
    async with batching(engine, RowMemory(budget, RowCosts(1, most=4 * KV_STEP))) as batcher:
        answers = await asyncio.gather(
            *(said(batcher, generate_job(f"number {i}", max_tokens=20)) for i in range(10))
        )
    assert [text(answer) for answer in answers] == [f"number {i}" for i in range(10)]
    assert max(engine.steps) == 3
    assert budget.free_bytes == budget.limit_bytes


async def test_a_row_joins_when_another_holder_gives_bytes_back() -> None:
    """Nothing of its own model runs, so nothing else would wake it."""
    budget = Budget(2 * KV_STEP)
    other = budget.share()
    other.state(1)
    cleared: list[int] = []
    memory = RowMemory(budget, RowCosts(1, most=2 * KV_STEP), cleared.append)
    async with batching(ScriptedWriter(), memory) as batcher:
        waiting = asyncio.create_task(said(batcher, generate_job("late", max_tokens=9)))
        while not cleared:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        assert set(cleared) == {2 * KV_STEP}, "so much must be free, not so much more"
        other.release()
        assert text(await asyncio.wait_for(waiting, 5)) == "late"


async def test_a_row_joins_when_another_model_that_gives_way_becomes_idle() -> None:
    """No byte has come back by then: whoever waits must look again."""
    budget = Budget(2 * KV_STEP)
    other = budget.share()
    other.state(1)
    is_idle, asked = False, 0

    def clear(_: int) -> None:
        nonlocal asked
        asked += 1
        if is_idle:
            other.release()

    memory = RowMemory(budget, RowCosts(1, most=2 * KV_STEP), clear)
    async with batching(ScriptedWriter(), memory) as batcher:
        waiting = asyncio.create_task(said(batcher, generate_job("late", max_tokens=9)))
        while not asked:
            await asyncio.sleep(0.001)
        is_idle = True
        budget.announce()
        assert text(await asyncio.wait_for(waiting, 5)) == "late"


async def test_a_row_that_waits_for_others_alone_is_told_so_in_time() -> None:
    """Else two models' rows, each of which needs what the other's model holds, wait for ever."""
    budget = Budget(4 * KV_STEP)
    other = budget.share()
    other.state(2 * KV_STEP)
    memory = RowMemory(budget, RowCosts(1, most=4 * KV_STEP))
    limits = replace(LIMITS, memory_wait_s=0.05)
    async with batching(ScriptedWriter(max_context=1000), memory, limits) as batcher:
        big = generate_job("b" * 200, max_tokens=80)
        answers = await asyncio.gather(
            said(batcher, big),
            said(batcher, generate_job("small", max_tokens=9)),
            return_exceptions=True,
        )
        assert isinstance(answers[0], NoRoom)
        assert isinstance(answers[1], list), "it did fit"
        assert text(answers[1]) == "small"
        other.release()
        assert len(text(await said(batcher, big))) == 80
    assert budget.free_bytes == budget.limit_bytes


async def test_who_waits_for_rows_of_its_own_model_waits_on() -> None:
    """They give back what they hold, however long it takes them."""
    engine = ScriptedWriter()
    memory = RowMemory(Budget(2 * KV_STEP), RowCosts(1, most=2 * KV_STEP))
    async with batching(engine, memory, replace(LIMITS, memory_wait_s=0.01)) as batcher:
        engine.gate.close()
        rows = [asyncio.create_task(said(batcher, generate_job(word))) for word in ("one", "two")]
        await asyncio.to_thread(engine.gate.reached.wait, 20)
        await asyncio.sleep(0.1)
        engine.gate.open()
        assert [text(await asyncio.wait_for(row, 5)) for row in rows] == ["one", "two"]


async def test_what_is_kept_of_prompts_goes_when_others_are_short() -> None:
    """Once: what is kept after that stays, though nobody runs."""
    budget = Budget(10**6)
    engine = ScriptedWriter(kept_bytes=1000)
    async with batching(engine, RowMemory(budget, RowCosts(1, most=10**6))) as batcher:
        await said(batcher, generate_job("one", max_tokens=9))
        while budget.free_bytes != budget.limit_bytes - 1000:
            await asyncio.sleep(0.001)  # the row's own bytes are on their way back
        budget.recall()
        while budget.free_bytes < budget.limit_bytes:
            await asyncio.sleep(0.001)
        assert engine.kept_bytes == 0
        engine.kept_bytes = 500
        await said(batcher, generate_job("two", max_tokens=9))
        assert engine.kept_bytes == 500


async def test_what_is_kept_of_prompts_never_overdraws_the_budget_for_long() -> None:
    """The engine bounds it by a setting of its own, which may be more than there is."""
    budget = Budget(2 * KV_STEP)
    engine = ScriptedWriter(kept_bytes=10**6)
    async with batching(engine, RowMemory(budget, RowCosts(1, most=2 * KV_STEP))) as batcher:
        assert text(await said(batcher, generate_job("one", max_tokens=9))) == "one"
        while budget.free_bytes < 0:
            await asyncio.sleep(0.001)
    assert engine.kept_bytes == 0


async def test_what_is_kept_of_prompts_gives_way_to_rows() -> None:
    """Prefixes only save time."""
    budget = Budget(2 * KV_STEP)
    engine = ScriptedWriter(kept_bytes=KV_STEP)
    memory = RowMemory(budget, RowCosts(1, most=2 * KV_STEP))
    memory.keep(KV_STEP)
    async with batching(engine, memory) as batcher:
        answer = await asyncio.wait_for(said(batcher, generate_job("now", max_tokens=9)), 5)
    assert text(answer) == "now"
    assert engine.kept_bytes == 0


async def test_a_cancelled_row_gives_its_bytes_back() -> None:
    """While it waits, and while it runs."""
    budget = Budget(2 * KV_STEP)
    engine = ScriptedWriter()
    async with batching(engine, RowMemory(budget, RowCosts(1, most=2 * KV_STEP))) as batcher:
        engine.gate.close()
        first, second, third = (
            asyncio.create_task(said(batcher, generate_job(word, max_tokens=20)))
            for word in ("first", "second", "third")
        )
        while not engine._running:
            await asyncio.sleep(0.001)
        second.cancel()
        first.cancel()
        engine.gate.open()
        assert text(await asyncio.wait_for(third, 5)) == "third"
        await asyncio.gather(first, second, return_exceptions=True)
    assert budget.free_bytes == budget.limit_bytes


async def test_open_rows_without_memory_to_grow_end_where_it_does() -> None:
    """With `length`, as if they had been bounded; those that fit are not."""
    budget = Budget(3 * KV_STEP)
    engine = ScriptedWriter(max_context=1000)
    costs = RowCosts(1, most=10**6, answer_tokens=90)
    async with batching(engine, RowMemory(budget, costs)) as batcher:
        jobs = [generate_job(letter * 150) for letter in "ab"]
        answers = await asyncio.wait_for(asyncio.gather(*(said(batcher, job) for job in jobs)), 10)
    assert engine.curtailed == {1: 90, 2: 90}
    assert [text(answer) for answer in answers] == ["a" * 90, "b" * 90]
    assert [answer[-1].finish_reason for answer in answers] == ["length", "length"]
    assert budget.free_bytes == budget.limit_bytes


async def test_an_open_row_with_memory_to_grow_says_it_all() -> None:
    """It has asked for more before it needs it."""
    budget = Budget(2 * (KV_STEP + GROWTH))
    engine = ScriptedWriter(max_context=1000)
    costs = RowCosts(1, most=2 * (KV_STEP + GROWTH), answer_tokens=90)
    async with batching(engine, RowMemory(budget, costs)) as batcher:
        answer = await asyncio.wait_for(said(batcher, generate_job("a" * 150)), 10)
    assert text(answer) == "a" * 150
    assert engine.curtailed == {}
