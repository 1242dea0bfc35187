"""The KV of rows: counted before they join; rows that do not fit wait."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway import metrics
from gateway.errors import NoRoom, PromptTooLarge
from gateway.jobs.chat import Grammar, Sampling
from gateway.jobs.steps import DraftCost, KvCost, SequenceParams
from gateway.serving.budget import LEAST_PREFIXES, Budget, PrefixShare
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.choice import Choice
from gateway.serving.generation.memory import KV_STEP, MASK_BYTES, Layout, RowCosts, RowMemory
from gateway.serving.generation.policy import GenerationLimits
from gateway.serving.generation.scheduler import Scheduler
from gateway.serving.lane import Lane
from tests.fakes import ScriptedChat, generate_job
from tests.serving.generation.harness import asking, asking_together, batching, deltas, joined
from tests.waiting import until

pytestmark = pytest.mark.anyio


def row(prompt: int, max_tokens: int, *, is_open: bool = False) -> SequenceParams:
    return SequenceParams(
        prompt=[1] * prompt, max_tokens=max_tokens, sampling=Sampling(), is_open=is_open
    )


def costs(token: int = 1, most: int = 10**9, **given: Any) -> RowCosts:
    return RowCosts(KvCost(token), most=lambda: most, **given)


def test_rows_that_decode_together_are_a_rectangle_and_rows_apart_are_not() -> None:
    """Rows times longest; each may hold a step more than it uses, as the caches grow, and one slot
    in eight may be free.
    """
    assert Layout().nbytes(costs()) == 0
    assert Layout([1]).nbytes(costs()) == 1 + KV_STEP
    assert Layout([3000] + [100] * 6).nbytes(costs()) == 7 * (3000 + KV_STEP)
    assert Layout([3000] + [100] * 7).nbytes(costs()) == 9 * (3000 + KV_STEP)
    assert Layout([], [3000] + [100] * 7).nbytes(costs()) == 3700 + 8 * KV_STEP
    assert Layout([10], [20]).nbytes(costs(chunk_tokens=50)) == 30 + 2 * KV_STEP + 50


def test_rows_wait_where_they_would_need_a_larger_buffer_than_there_can_be() -> None:
    """Metal refuses one beyond its bound, however much memory is free."""
    kv = KvCost(8, plane=2)  # two layers, each of keys and values
    bounded = RowCosts(kv, most=lambda: 10**9, largest=2 * 3 * (100 + KV_STEP))
    memory = RowMemory(Budget(10**9), bounded)
    assert memory.fits(Layout([100] * 3))
    assert not memory.fits(Layout([100] * 4))
    assert not memory.fits(Layout([100, 100, 101]))
    assert memory.fits(Layout([100] * 3, [100] * 9))  # each has buffers of its own
    assert memory.longest == 3 * (100 + KV_STEP) - KV_STEP
    assert memory.fits(Layout())
    assert RowMemory(Budget(10**9), RowCosts(kv, most=lambda: 10**9)).fits(Layout([100] * 999))


def test_a_draft_model_has_kv_of_few_rows() -> None:
    drafted = RowCosts(KvCost(1, draft=DraftCost(3, rows=4)), chunk_tokens=50)
    alone = costs(chunk_tokens=50)
    for rows in (1, 4, 32):
        more = 3 * (min(rows, 4) * (100 + KV_STEP) + 50)
        assert Layout([100] * rows).nbytes(drafted) == Layout([100] * rows).nbytes(alone) + more
    going_back = RowCosts(KvCost(1, draft=DraftCost(states=1000, rows=4)), chunk_tokens=50)
    for rows in (1, 4, 32):
        more = 1000 * min(rows, 4)
        assert Layout([100] * rows).nbytes(going_back) == Layout([100] * rows).nbytes(alone) + more
    mixed = Layout([100, 50], [400])
    assert mixed.nbytes(drafted) == mixed.nbytes(alone) + 3 * (3 * (400 + KV_STEP) + 50)


def test_a_mask_that_images_open_takes_bytes_for_each_query_and_key() -> None:
    """A pass reads a chunk, in which images open the masks of all keys or of a window's."""
    blind, seeing = costs(chunk_tokens=50), costs(chunk_tokens=50, image_chunk=40)
    windowed = costs(chunk_tokens=50, image_chunk=40, image_window=70)
    for layout in (Layout([100, 9], image_tokens=4), Layout([9], [100], image_tokens=4)):
        alone = layout.nbytes(blind)
        assert layout.nbytes(seeing) == alone + MASK_BYTES * 50 * (100 + 50)
        assert layout.nbytes(windowed) == alone + MASK_BYTES * 50 * (70 + 50)
        text = replace(layout, image_tokens=0)
        assert text.nbytes(seeing) == text.nbytes(blind)
    short = Layout([9], image_tokens=4)
    assert short.nbytes(windowed) == short.nbytes(seeing)


def test_windows_and_states_are_counted_as_they_are_held() -> None:
    """A window no longer than it is, and a chunk more while a prompt is read; a state whole."""
    kv = KvCost(token=2, windows=((3, 100), (1, 1000)), constant=7)
    assert kv.of(10) == 7 + 10 * (2 + 3 + 1)
    assert kv.of(500) == 7 + 2 * 500 + 3 * 100 + 500
    assert kv.of(500, beyond=50) == 7 + 2 * 500 + 3 * 150 + 500
    assert kv
    assert not KvCost()


def test_a_row_is_counted_by_what_it_has_and_a_usual_answer() -> None:
    """max_tokens is only a bound; a preempted row has room for more each time."""
    memory = RowMemory(Budget(10**9), costs(answer_tokens=500))
    assert memory.grant_length(100, 16_484, 0) == 600
    assert memory.grant_length(100, 180, 0) == 180
    assert memory.grant_length(100, 16_484, 2) == 2100
    small = RowMemory(Budget(700), costs(most=700, answer_tokens=500))
    assert small.longest == 700 - KV_STEP
    assert small.grant_length(100, 16_484, 0) == 700 - KV_STEP
    assert small.grant_length(600, 16_484, 1) == 601


def test_a_prompt_that_never_fits_is_refused_and_no_other() -> None:
    memory = RowMemory(Budget(1000), costs(most=1000))
    memory.check("m", row(743, 90_000))
    with pytest.raises(PromptTooLarge, match=r"744 tokens .* at most 743") as refused:
        memory.check("m", row(744, 1))
    assert (refused.value.status, refused.value.code) == (507, "insufficient_memory")
    RowMemory(Budget(0), RowCosts()).check("m", row(10**6, 10**6))
    most = [1000]
    memory = RowMemory(Budget(1000), RowCosts(KvCost(1), most=lambda: most[0]))
    memory.check("m", row(700, 1))
    most[0] = 900  # a model that is pinned has been loaded
    with pytest.raises(PromptTooLarge):
        memory.check("m", row(700, 1))


def test_a_model_larger_than_it_seemed_has_room_for_the_rows_its_share_includes() -> None:
    """The model's weights alone overdraw the budget here."""
    memory = RowMemory(Budget(0), costs(included=4 * KV_STEP, most=-1000))
    memory.check("m", row(100, 100))
    assert memory.fits(Layout([100] * 2))
    assert not memory.fits(Layout([2 * KV_STEP] * 2))


def test_a_model_whose_kv_is_unknown_counts_nothing() -> None:
    memory = RowMemory(Budget(0), RowCosts())
    assert memory.fits(Layout([10**6] * 99))
    assert memory.grant_length(5, 10**6, 0) == 261


def test_a_share_holds_what_its_rows_take_and_gives_it_back() -> None:
    budget = Budget(10**6)
    memory = RowMemory(budget, costs(10, included=2 * KV_STEP * 10))
    memory.hold(Layout([KV_STEP]))
    assert budget.free_bytes == 10**6
    memory.hold(Layout([KV_STEP] * 3))
    assert budget.free_bytes == 10**6 - 4 * KV_STEP * 10
    memory.hold(Layout())
    assert budget.free_bytes == 10**6
    other = budget.share()
    other.resize(10**6 - 2 * KV_STEP * 10)
    assert memory.fits(Layout([KV_STEP]))
    assert not memory.fits(Layout([KV_STEP + 1] * 2))
    other.resize(10**6 + 1)  # it was larger than it seemed
    assert not memory.fits(Layout([KV_STEP + 1]))


async def test_rows_beyond_the_budget_wait_and_are_all_answered() -> None:
    budget = Budget(3 * (28 + KV_STEP))
    engine = ScriptedChat()
    async with batching(engine, RowMemory(budget, costs())) as batcher:
        jobs = [generate_job(f"number {i}", max_tokens=20) for i in range(10)]
        answers = await asyncio.gather(*await asking_together(batcher, jobs))
    assert [joined(answer) for answer in answers] == [f"number {i}" for i in range(10)]
    assert max(engine.steps) == 3
    assert budget.free_bytes == budget.limit_bytes


class Models:
    """Models that would be evicted for rows."""

    def __init__(self, evict: Callable[[int, bool], None]) -> None:
        self._evict = evict
        self.nbytes = 0

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        self._evict(nbytes, is_pressing)

    def pinned_bytes(self, *, without: str) -> int:
        return 0

    def model_bytes(self) -> int:
        return self.nbytes


async def test_a_row_joins_when_another_holder_gives_bytes_back() -> None:
    """Nothing of its own model runs, so nothing else would wake it."""
    budget = Budget(13 + KV_STEP)
    other = budget.share()
    other.resize(1)
    cleared: list[int] = []

    def evict(nbytes: int, is_pressing: bool) -> None:
        assert is_pressing, "no row runs"
        cleared.append(nbytes)

    budget.attach(Models(evict))
    memory = RowMemory(budget, costs(most=2 * KV_STEP))
    async with batching(ScriptedChat(), memory) as batcher:
        waiting = asking(batcher, "late", max_tokens=9)
        await until(lambda: cleared)
        assert not waiting.done()
        assert set(cleared) == {13 + KV_STEP}, "so much must be free, not so much more"
        other.release()
        assert await asyncio.wait_for(waiting, 60) == "late"


async def test_a_row_joins_when_another_model_that_gives_way_becomes_idle() -> None:
    """No byte has come back by then: whoever waits must look again."""
    budget = Budget(13 + KV_STEP)
    other = budget.share()
    other.resize(1)
    is_idle, asked = False, 0

    def evict(_nbytes: int, _is_pressing: bool) -> None:
        nonlocal asked
        asked += 1
        if is_idle:
            other.release()

    budget.attach(Models(evict))
    memory = RowMemory(budget, costs(most=2 * KV_STEP))
    async with batching(ScriptedChat(), memory) as batcher:
        waiting = asking(batcher, "late", max_tokens=9)
        await until(lambda: asked)
        is_idle = True
        budget.notify()
        assert await asyncio.wait_for(waiting, 60) == "late"


async def test_a_row_that_waits_for_others_alone_is_told_so_in_time() -> None:
    """Otherwise two models' rows could wait for ever, each for the other model's memory."""
    budget = Budget(4 * KV_STEP)
    other = budget.share()
    other.resize(2 * KV_STEP)
    memory = RowMemory(budget, costs(most=4 * KV_STEP))
    engine = ScriptedChat(max_context=1000)
    async with batching(engine, memory, memory_wait_s=0.05) as batcher:
        big = asking(batcher, "b" * 200, max_tokens=80)
        assert await asking(batcher, "small", max_tokens=9) == "small", "it did fit"
        with pytest.raises(NoRoom):
            await big
        other.release()
        assert len(await asking(batcher, "b" * 200, max_tokens=80)) == 80
    assert budget.free_bytes == budget.limit_bytes


async def test_a_waiting_models_claim_is_freed_of_kept_prompts() -> None:
    """Exactly the claimed bytes are freed, though no row runs; prompts kept later stay."""
    budget = Budget(10**6)
    engine = ScriptedChat(prefix_bytes=1000)
    async with batching(engine, RowMemory(budget, costs(most=10**6))) as batcher:
        await asking(batcher, "one", max_tokens=9)
        await until(lambda: budget.free_bytes == budget.limit_bytes - 1000)  # the row has ended
        budget.claim(budget.limit_bytes - 400)
        await until(lambda: engine.prefix_bytes == 400 and budget.spare_bytes == 0)
        budget.claim(0)
        engine.prefix_bytes = 500
        await asking(batcher, "two", max_tokens=9)
        assert engine.prefix_bytes == 500


async def test_kept_prompts_give_way_to_rows() -> None:
    """Kept prompts only save time, so they go before a model does, and no more than need be."""
    budget, evicted = Budget(3 * KV_STEP), list[int]()
    budget.attach(Models(lambda nbytes, _: evicted.append(nbytes)))
    engine = ScriptedChat(prefix_bytes=3 * KV_STEP)
    async with batching(engine, RowMemory(budget, costs(most=3 * KV_STEP))) as batcher:
        answer = await asyncio.wait_for(asking(batcher, "now", max_tokens=9), 60)
    assert answer == "now"
    assert 0 < engine.prefix_bytes == 2 * KV_STEP - len("now") - 9
    assert not evicted


async def test_a_growing_row_takes_kept_prompts_before_another_rows_place() -> None:
    """Nobody is preempted while there are prefixes."""
    budget = Budget(2 * (300 + KV_STEP))
    engine = ScriptedChat(max_context=1000, prefix_bytes=10**6)
    memory = RowMemory(budget, costs(answer_tokens=9))
    async with batching(engine, memory) as batcher:
        jobs = [generate_job("x" * 130, max_tokens=130) for _ in range(2)]
        answers = await asyncio.gather(*await asking_together(batcher, jobs))
    assert [len(joined(answer)) for answer in answers] == [130, 130]
    assert not engine.preempted
    assert engine.prefix_bytes < budget.limit_bytes


async def test_prompts_kept_in_a_models_own_room_give_way_to_anothers_row() -> None:
    """Those models give it back in a turn of theirs, before a model is evicted."""
    budget, evicted = Budget(2 * KV_STEP), list[int]()
    budget.attach(Models(lambda nbytes, _: evicted.append(nbytes)))
    keeper = ScriptedChat(prefix_bytes=2 * KV_STEP)
    memories = [RowMemory(budget, costs(most=2 * KV_STEP)) for _ in range(2)]
    memories[0].note_prefixes(keeper.prefix_bytes)
    async with (
        Lane() as lane,
        batching(keeper, memories[0], lane=lane),
        batching(ScriptedChat(), memories[1], lane=lane) as batcher,
    ):
        answer = await asyncio.wait_for(asking(batcher, "now", max_tokens=9), 60)
        assert answer == "now"
        assert 0 < keeper.prefix_bytes < KV_STEP
    assert not evicted
    assert budget.free_bytes == budget.limit_bytes


@pytest.mark.parametrize("rows", [1, 2])
async def test_an_idle_models_kept_prompts_give_way_to_rows_that_grow(rows: int) -> None:
    """None of them is cut or preempted for it."""
    budget = Budget(2 * 10**6)
    keeper, grower = ScriptedChat(prefix_bytes=2000), ScriptedChat(max_context=1000)
    memories = [RowMemory(budget, costs(answer_tokens=9)) for _ in range(2)]
    memories[0].note_prefixes(2000)
    budget.limit_bytes = rows * (150 + KV_STEP) + 2000 + 10
    async with (
        Lane() as lane,
        batching(keeper, memories[0], lane=lane),
        batching(grower, memories[1], lane=lane) as batcher,
    ):
        jobs = [generate_job("x" * 130, max_tokens=130) for _ in range(rows)]
        answers = await asyncio.gather(*await asking_together(batcher, jobs))
    assert [len(joined(answer)) for answer in answers] == [130] * rows
    assert not grower.preempted
    assert keeper.prefix_bytes < 2000


def test_rooms_give_in_turn_and_no_more_than_is_wanted() -> None:
    """The second gives only the bytes that the first lacks."""
    budget = Budget(1000)
    one, two = PrefixShare(budget, 1000), PrefixShare(budget, 1000)
    with one.in_use(), two.in_use():
        one.note(300)
        two.note(700)
        budget.claim(400)
        assert (one.excess_bytes, two.excess_bytes) == (300, 100)
        assert [one.allowed(0), two.allowed(0)] == [0, 600]
        one.shrink_to(0)
        two.shrink_to(600)
        assert budget.spare_bytes == 0
    assert budget.free_bytes == 1000, "of a model that is gone nothing is left"


def test_the_room_for_kept_prompts_is_sized_by_models_and_a_row() -> None:
    """It is at most its bound, and at least LEAST_PREFIXES where models leave as much."""
    least = LEAST_PREFIXES
    for limit, models, row, expected in (
        (40 * least, 20 * least, 5 * least, 10 * least),  # a quarter of the machine
        (30 * least, 20 * least, 5 * least, 5 * least),
        (22 * least, 20 * least, 5 * least, least),
        (20 * least, 20 * least, 5 * least, 0),
    ):
        budget = Budget(limit)
        loaded = Models(lambda nbytes, _: None)
        loaded.nbytes = models
        budget.attach(loaded)
        budget.share().resize(models)
        assert PrefixShare(budget, 10 * least, leaves_room=True).allowed(row) == expected


async def test_a_row_that_fits_passes_one_that_others_keep_waiting() -> None:
    """It waits for another model, whose end nobody knows; those behind it must not."""
    budget = Budget(4 * KV_STEP)
    other = budget.share()
    other.resize(2 * KV_STEP)
    async with batching(ScriptedChat(max_context=1000), RowMemory(budget, costs())) as batcher:
        big = asking(batcher, "b" * 200, max_tokens=80)
        await until(lambda: batcher.tickets)
        small = asking(batcher, "small", max_tokens=9)
        assert await asyncio.wait_for(small, 60) == "small"
        assert not big.done()
        other.release()
        assert len(await asyncio.wait_for(big, 60)) == 80


@pytest.mark.parametrize("max_tokens", [None, 16_384])
async def test_a_row_that_cannot_grow_though_it_is_alone_ends_with_length(
    max_tokens: int | None,
) -> None:
    budget = Budget(240 + KV_STEP)
    engine = ScriptedChat(max_context=20_000)
    memory = RowMemory(budget, costs(answer_tokens=90))
    async with batching(engine, memory) as batcher:
        job = generate_job("a" * 150, max_tokens=max_tokens)
        answer = await asyncio.wait_for(deltas(batcher, job), 60)
    assert joined(answer) == "a" * 90
    assert answer[-1].finish_reason == "length"
    assert engine.preempted == []
    assert budget.free_bytes == budget.limit_bytes


@pytest.mark.parametrize("max_tokens", [None, 16_384])
async def test_when_memory_ends_the_youngest_gives_way_and_says_it_all_later(
    max_tokens: int | None,
) -> None:
    budget = Budget(2 * (260 + KV_STEP))
    engine = ScriptedChat(max_context=20_000)
    counted = metrics.of(metrics.PREEMPTIONS, "m")._value
    before = counted.get()
    jobs = [generate_job(letter * 150, max_tokens=max_tokens) for letter in "ab"]
    async with batching(engine, RowMemory(budget, costs(answer_tokens=90))) as batcher:
        asked = await asking_together(batcher, jobs)
        answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
    assert [joined(answer) for answer in answers] == ["a" * 150, "b" * 150]
    assert [answer[-1].finish_reason for answer in answers] == ["stop", "stop"]
    assert max(engine.steps) == 2
    assert engine.preempted == [2]
    assert counted.get() - before == 1
    assert [job.caller.timings.preemptions for job in jobs] == [0, 1]
    assert budget.free_bytes == budget.limit_bytes


async def test_a_row_that_gave_way_and_finds_no_memory_again_ends_with_its_text() -> None:
    """It ends with `length`, and never with an error: its caller has begun to read."""
    budget = Budget(2 * (260 + KV_STEP))
    other = budget.share()
    engine = ScriptedChat(max_context=20_000)
    memory = RowMemory(budget, costs(answer_tokens=90))
    async with batching(engine, memory, memory_wait_s=0.05) as batcher:
        asked = await asking_together(batcher, [generate_job(letter * 150) for letter in "ab"])
        await until(lambda: engine.preempted)
        other.resize(budget.limit_bytes - 600)  # the first has what it needs, and no more
        answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
    assert joined(answers[0]) == "a" * 150
    assert answers[1][-1].finish_reason == "length"
    assert 0 < len(joined(answers[1])) < 150


@pytest.mark.parametrize("seed", range(4))
async def test_no_answer_is_lost_when_memory_ends_again_and_again(seed: int) -> None:
    """Rows of all lengths in little memory, some whose clients leave; none gives way thrice."""
    chance = random.Random(seed)
    budget = Budget(chance.choice([1500, 2500, 4000]))
    engine = ScriptedChat(max_context=20_000)
    memory = RowMemory(budget, costs(answer_tokens=chance.choice([16, 64])))
    bound = chance.choice([1, 2])

    async def ask(batcher: GenerationBatcher, number: int) -> None:
        words = chr(65 + number) * chance.choice([5, 60, 200, 400])
        await asyncio.sleep(chance.choice([0, 0, 0.01, 0.05]))
        job = generate_job(words, n=chance.choice([1, 1, 3]), max_tokens=16_384)
        if chance.random() < 0.4:
            job = replace(job, grammar=Grammar("choice", '["a"]'))
        asking = asyncio.create_task(deltas(batcher, job))
        if chance.random() < 0.2:
            await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        answer = await asking
        for index in range(job.n):
            mine = [delta for delta in answer if delta.index == index]
            assert joined(mine) == words
            assert mine[-1].finish_reason == "stop"

    async with batching(engine, memory, structured_rows=bound) as batcher, asyncio.timeout(30):
        await asyncio.gather(*(ask(batcher, number) for number in range(20)))
        assert batcher.tickets == 0
    assert max(Counter(engine.preempted).values(), default=0) <= 2
    assert engine.rows == 0
    assert not engine.scripted
    assert budget.free_bytes == budget.limit_bytes


async def test_forty_calls_with_a_huge_bound_run_as_many_as_really_fit() -> None:
    """Graphiti sends such calls: at most 16,384 tokens each, 200 written, with room for 16."""
    prompt, answer = 800, 200
    budget = Budget(16 * (prompt + answer + KV_STEP))
    engine = ScriptedChat(max_context=20_000, script=[{"text": "x", "tokens": 1}] * answer)
    engine.script[-1] = {"text": "x", "tokens": 1, "finish_reason": "stop"}
    async with batching(engine, RowMemory(budget, costs())) as batcher, asyncio.timeout(30):
        jobs = [generate_job("p" * prompt, max_tokens=16_384) for _ in range(40)]
        answers = await asyncio.gather(*await asking_together(batcher, jobs))
    assert [joined(each) for each in answers] == ["x" * answer] * 40
    assert max(engine.steps) >= 12
    assert sum(engine.steps) / len(engine.steps) >= 12


def test_rows_that_leave_after_a_shortage_make_room_for_others() -> None:
    """However they leave; once none is left, as many may run as before."""
    scheduler = Scheduler(
        "m",
        GenerationLimits(max_batch_size=32, prefill_chunk_tokens=512),
        RowMemory(Budget(0), RowCosts()),
    )
    choices = [Choice(row(1, 9), asyncio.Queue()) for _ in range(9)]
    for number, choice in enumerate(choices, 1):
        choice.id = number
    for choice in choices[:8]:
        scheduler._enter(choice)
    scheduler.shed()
    assert scheduler.bearable == 4
    scheduler.drop(choices[:2])
    assert scheduler.bearable == 6
    scheduler.note_end(3)
    assert scheduler.bearable == 7
    scheduler.drop(choices[3:8])
    assert scheduler.bearable is None
    scheduler._enter(choices[8])
    scheduler.shed()
    scheduler.end_running(NoRoom("m", ()))
    assert scheduler.bearable is None
