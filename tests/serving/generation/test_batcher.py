"""The generation batcher: rows join, are told their deltas, and leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import structlog

from gateway import clock
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    GatewayError,
    Overloaded,
)
from gateway.jobs import Delta, GenerateJob, Grammar, Stage, Tier
from gateway.serving.admission import NO_BOUND
from gateway.serving.generation.batcher import STEPS_PER_TURN, GenerationBatcher
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.policy import QUANTUM, GenerationLimits
from gateway.serving.lane import Lane
from gateway.serving.tokenize import ThreadPools
from tests.fakes import ScriptedChat, generate_job
from tests.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def batching(
    engine: ScriptedChat,
    *,
    rows: int = 32,
    tokens: int = NO_BOUND,
    bound: int = 1,
    choices: int = NO_BOUND,
    pass_limit_s: float = 0.25,
    lane: Lane | None = None,
) -> AsyncIterator[GenerationBatcher]:
    limits = GenerationLimits(
        max_batch_size=rows,
        structured_rows=bound,
        prefill_chunk_tokens=512,
        queue_max_tokens=tokens,
        queue_limit=choices,
        pass_limit_s=pass_limit_s,
    )
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(Lane()) if lane is None else lane
        pool = stack.enter_context(ThreadPools())
        grammars = GrammarCache("m", engine.compile, pool.run)
        batcher = GenerationBatcher("m", engine, own, pool, limits, grammars)
        async with batcher.running():
            yield batcher


async def deltas(batcher: GenerationBatcher, job: GenerateJob) -> list[Delta]:
    async with batcher.generate(job) as generation:
        return [delta async for delta in generation.deltas]


async def text(batcher: GenerationBatcher, job: GenerateJob) -> str:
    return "".join(delta.text for delta in await deltas(batcher, job))


async def test_a_late_row_joins_the_running_batch() -> None:
    """Nobody waits for another's answer to end."""
    engine = ScriptedChat()
    async with batching(engine) as batcher:
        engine.gate.close()
        first = asyncio.create_task(text(batcher, generate_job("a" * 50)))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        second = asyncio.create_task(text(batcher, generate_job("bb")))
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
        others = dict(list(self._waiting.items())[1:])
        for row in others:
            del self._waiting[row]
        ended = super().prefill(token_budget)
        self._waiting.update(others)
        return ended

    def decode(self) -> list[Delta]:
        self.now_s += PASS_S
        return super().decode()

    def time(self) -> float:
        return self.now_s


async def steps_of_a_burst(
    pass_limit_s: float, prompt: str = "x" * 12, max_tokens: int | None = None
) -> list[int]:
    """Let eight requests come while a ninth is being answered: rows a step, until all run."""
    engine = OneByOne(max_context=2000)
    with patch.object(clock, "now", engine.time):
        return await _steps_of_a_burst(engine, pass_limit_s, prompt, max_tokens)


async def _steps_of_a_burst(
    engine: OneByOne, pass_limit_s: float, prompt: str, max_tokens: int | None
) -> list[int]:
    async with batching(engine, pass_limit_s=pass_limit_s) as batcher:
        engine.gate.close()
        first = asyncio.create_task(text(batcher, generate_job("a" * 30)))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        jobs = [generate_job(prompt, max_tokens=max_tokens) for _ in range(8)]
        burst = [asyncio.create_task(text(batcher, job)) for job in jobs]
        await until(lambda: batcher.tickets == 8)
        engine.gate.open()
        assert await asyncio.gather(first, *burst) == ["a" * 30, *[prompt[:max_tokens]] * 8]
    return engine.steps[: engine.steps.index(9)]


async def test_a_burst_is_mostly_read_before_its_first_steps() -> None:
    """Steps of two rows and three would each cost nearly as much as steps of nine."""
    steps = await steps_of_a_burst(pass_limit_s=5)
    assert sum(1 < rows < 5 for rows in steps) <= 1


@pytest.mark.parametrize("pass_limit_s", [0, PASS_S / 2])
async def test_rows_that_run_wait_for_a_burst_no_longer_than_two_limits(
    pass_limit_s: float,
) -> None:
    """Else a queue of prompts would stop every answer under way."""
    steps = await steps_of_a_burst(pass_limit_s=pass_limit_s)
    assert sum(1 < rows < 5 for rows in steps) > 1


async def test_a_long_prompt_is_not_waited_for() -> None:
    """It takes many passes, and those who have their answers under way would see each."""
    steps = await steps_of_a_burst(pass_limit_s=5, prompt="x" * 1200, max_tokens=12)
    assert sum(1 < rows < 5 for rows in steps) > 1


async def test_a_prompt_that_is_only_scored_is_not_waited_for() -> None:
    """It never shares a step."""
    engine = OneByOne()
    with patch.object(clock, "now", engine.time):
        await _ask_for_scores(engine)


async def _ask_for_scores(engine: OneByOne) -> None:
    async with batching(engine, pass_limit_s=5) as batcher:
        engine.gate.close()
        first = asyncio.create_task(text(batcher, generate_job("a" * 60)))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        jobs = [generate_job("x" * 12, max_tokens=0) for _ in range(8)]
        burst = [asyncio.create_task(text(batcher, job)) for job in jobs]
        await until(lambda: batcher.tickets == 8)
        engine.gate.open()
        await asyncio.gather(*burst)
        meanwhile = len(engine.steps)
        await first
    assert meanwhile >= 5


async def test_no_more_rows_run_than_the_limit() -> None:
    """The others wait their turn, and are served."""
    engine = ScriptedChat()
    async with batching(engine, rows=3) as batcher:
        answers = await asyncio.gather(*(text(batcher, generate_job("abc")) for _ in range(8)))
    assert answers == ["abc"] * 8
    assert max(engine.steps) == 3


async def test_choices_of_one_job_are_told_apart() -> None:
    """Each has its index and its own end."""
    async with batching(ScriptedChat()) as batcher:
        told = await deltas(batcher, generate_job("ab", n=3))
    for index in range(3):
        mine = [delta for delta in told if delta.index == index]
        assert "".join(delta.text for delta in mine) == "ab"
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["stop"]


async def test_an_answer_cut_by_its_limit_says_length() -> None:
    """Never stop."""
    async with batching(ScriptedChat()) as batcher:
        told = await deltas(batcher, generate_job("abcdef", max_tokens=3))
    assert "".join(delta.text for delta in told) == "abc"
    assert told[-1].finish_reason == "length"


async def test_a_caller_who_leaves_takes_its_row_along() -> None:
    """The row is gone within a step; the neighbour goes on."""
    engine = ScriptedChat()
    async with batching(engine) as batcher:
        engine.gate.close()
        leaving = asyncio.create_task(text(batcher, generate_job("a" * 90)))
        staying = asyncio.create_task(text(batcher, generate_job("b" * 9)))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        leaving.cancel()
        await asyncio.wait([leaving])
        engine.gate.open()
        assert await staying == "b" * 9
        await until(lambda: len(engine.left) == 1)
        assert len(engine.steps) < 20
        assert not engine.is_decoding


async def test_a_caller_who_leaves_while_waiting_never_joins() -> None:
    """Its place in the queue is given up."""
    engine = ScriptedChat()
    async with batching(engine, rows=1) as batcher:
        engine.gate.close()
        running = asyncio.create_task(text(batcher, generate_job("a" * 5)))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        waiting = asyncio.create_task(text(batcher, generate_job("b")))
        await until(lambda: batcher.tickets == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        engine.gate.open()
        await running
    assert engine.joined == [1]


async def test_refusals_come_before_any_delta() -> None:
    """What the template or the context refuses is known on entering."""
    async with batching(ScriptedChat(max_context=10)) as batcher:
        with pytest.raises(BadRequest, match="template"):
            await deltas(batcher, generate_job("refuse me"))
        with pytest.raises(ContextLengthExceeded):
            await deltas(batcher, generate_job("far too long a prompt"))


async def test_a_full_queue_answers_overloaded_and_recovers() -> None:
    """The bound counts the tokens of prompts, those of running rows too."""
    engine = ScriptedChat()
    async with batching(engine, tokens=4) as batcher:
        engine.gate.close()
        held = [asyncio.create_task(text(batcher, generate_job("ab"))) for _ in range(2)]
        await until(lambda: batcher.rows + batcher.tickets == 2)
        with pytest.raises(Overloaded):
            await deltas(batcher, generate_job("c"))
        engine.gate.open()
        await asyncio.gather(*held)
        assert await text(batcher, generate_job("c")) == "c"


async def test_a_deadline_ends_an_answer_under_way() -> None:
    """And its row leaves the batch."""
    engine = ScriptedChat()
    async with batching(engine) as batcher:
        engine.gate.close()
        with pytest.raises(DeadlineExceeded):
            await deltas(batcher, generate_job("a" * 9, deadline=clock.now() + 0.1))
        engine.gate.open()
        await until(lambda: engine.left)


async def test_a_request_that_is_given_up_knows_where_it_stood() -> None:
    """One that is answered, or whose rows have failed, stands nowhere."""
    engine = ScriptedChat(fail_at_step=4)
    async with batching(engine) as batcher:
        failing = generate_job("abcdef", n=2)
        with pytest.raises(EngineFailed):
            await deltas(batcher, failing)
        assert failing.caller.timings.stage is None
        answered = generate_job("a")
        await text(batcher, answered)
        assert answered.caller.timings.stage is None
        engine.gate.close()
        given_up = generate_job("b")
        leaving = asyncio.create_task(text(batcher, given_up))
        await until(lambda: given_up.caller.timings.stage is Stage.PREFILL)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert given_up.caller.timings.stage is Stage.PREFILL
        engine.gate.open()


async def test_a_batch_tells_the_rows_and_tokens_it_had() -> None:
    """Not those that wait or are still being read."""
    with structlog.testing.capture_logs() as lines:
        async with batching(ScriptedChat()) as batcher:
            await asyncio.gather(*(text(batcher, generate_job("x" * n)) for n in (2, 5)))
    batches = [line for line in lines if line["event"] == "batch"]
    told = [(each["kind"], each["rows"], each["padded_tokens"]) for each in batches]
    assert told[0] in {("prefill", 2, 10), ("prefill", 1, 2), ("prefill", 1, 5)}
    assert told[-1][:2] == ("decode", 1)
    assert all(rows <= 2 for _, rows, _ in told)


async def test_an_engine_that_raises_fails_its_rows_and_serves_the_next() -> None:
    """A dead batch must not become a dead server."""
    engine = ScriptedChat(fail_at_step=2)
    async with batching(engine) as batcher:
        with pytest.raises(EngineFailed, match="the step failed"):
            await deltas(batcher, generate_job("abc"))
        assert await text(batcher, generate_job("next")) == "next"


async def test_rows_that_run_when_the_model_goes_are_told() -> None:
    """No stream is left hanging."""
    engine = ScriptedChat()
    async with batching(engine, rows=1) as batcher:
        engine.gate.close()
        asked = [asyncio.create_task(text(batcher, generate_job("a" * 9))) for _ in range(2)]
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        asyncio.get_running_loop().call_later(0.05, engine.gate.open)
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(answer, GatewayError)


ANY = Grammar("json_schema", "{}")


@pytest.mark.parametrize(("bound", "most"), [(1, 1), (3, 3)])
async def test_bound_rows_run_within_their_limit_while_free_rows_go_on(
    bound: int, most: int
) -> None:
    """One at a time unless set otherwise; nobody free waits for them."""
    engine = ScriptedChat()
    async with batching(engine, bound=bound) as batcher:
        engine.gate.close()
        held = [
            asyncio.create_task(text(batcher, replace(generate_job("g" * 20), grammar=ANY)))
            for _ in range(5)
        ]
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        free = asyncio.create_task(text(batcher, generate_job("free")))
        await until(lambda: batcher.rows + batcher.tickets == 6)
        engine.gate.open()
        assert await free == "free"
        assert not all(task.done() for task in held)
        assert await asyncio.gather(*held) == ["g" * 20] * 5
    assert max(engine.steps) == most + 1


async def test_a_grammar_that_cannot_be_compiled_is_refused_before_any_delta() -> None:
    """And no row ever joins."""
    engine = ScriptedChat()
    job = replace(generate_job("hi"), grammar=Grammar("regex", "bad"))
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match="bad"):
            await deltas(batcher, job)
    assert engine.joined == []


async def test_a_priority_row_joins_before_those_that_came_first() -> None:
    """And a flex one after those that came later, while there is no room for all."""
    engine = ScriptedChat()
    order: list[str] = []

    async def ask(name: str, tier: Tier) -> None:
        job = generate_job(name)
        await text(batcher, replace(job, caller=replace(job.caller, tier=tier)))
        order.append(name)

    async with batching(engine, rows=1) as batcher:
        engine.gate.close()
        tiers = {"first": Tier.DEFAULT, "flex": Tier.FLEX, "default": Tier.DEFAULT}
        asked = [asyncio.create_task(ask(*each)) for each in tiers.items()]
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        asked.append(asyncio.create_task(ask("priority", Tier.PRIORITY)))
        await until(lambda: batcher.tickets == 3)
        engine.gate.open()
        await asyncio.gather(*asked)
    assert order == ["first", "priority", "default", "flex"]


async def test_where_the_time_went_is_written_down() -> None:
    """By stage; the first token's moment and the tokens too."""
    job = generate_job("hello")
    async with batching(ScriptedChat()) as batcher:
        await deltas(batcher, job)
    timings = job.caller.timings
    stages = (Stage.TOKENISE, Stage.QUEUE, Stage.LANE, Stage.PREFILL, Stage.DECODE)
    assert tuple(timings.seconds) == stages
    assert all(seconds >= 0 for seconds in timings.seconds.values())
    assert timings.first_token is not None
    assert timings.started < timings.first_token
    assert (timings.model, timings.tokens_in, timings.tokens_out) == ("m", 5, 6)


async def test_embeddings_get_their_turn_between_steps() -> None:
    """An answer under way gives the lane up when another's turn is due, and loses nothing."""
    engine = ScriptedChat(max_context=200)
    steps_before: list[int] = []
    with ThreadPools() as pool:
        grammars = GrammarCache("m", engine.compile, pool.run)
        async with Lane() as lane:
            limits = GenerationLimits(max_batch_size=4, prefill_chunk_tokens=512)
            batcher = GenerationBatcher("m", engine, lane, pool, limits, grammars)
            async with batcher.running():
                engine.gate.close()
                answer = asyncio.create_task(text(batcher, generate_job("a" * 90)))
                await asyncio.to_thread(engine.gate.reached.wait, 5)

                async def embed() -> None:
                    async with lane.turn("embedding"):
                        steps_before.append(len(engine.steps))

                waiting = asyncio.create_task(embed())
                await asyncio.sleep(0)  # it asks for the lane
                engine.gate.open()
                await waiting
                assert await answer == "a" * 90
    assert steps_before[0] < 20


async def test_a_worker_that_breaks_tells_those_inside_and_works_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else whoever comes later would wait for a task that has ended."""
    errors = [RuntimeError("a bug of ours")]

    def stumble() -> None:
        if errors:
            raise errors.pop()

    async with batching(ScriptedChat()) as batcher:
        monkeypatch.setattr(batcher, "note_batching", stumble)
        with pytest.raises(EngineFailed, match="a bug of ours"):
            await asyncio.wait_for(text(batcher, generate_job("first")), 5)
        assert await asyncio.wait_for(text(batcher, generate_job("second")), 5) == "second"


async def test_a_request_of_many_choices_keeps_nobody_waiting() -> None:
    """Another's row joins with the next place, not behind thousands."""
    engine = ScriptedChat()
    async with batching(engine, rows=4) as batcher:
        big = asyncio.create_task(deltas(batcher, generate_job("x" * 20, n=1000)))
        await until(lambda: len(engine.joined) >= 8)
        before = len(engine.joined)
        assert await text(batcher, generate_job("small")) == "small"
        assert len(engine.joined) - before < 20
        big.cancel()
        await asyncio.gather(big, return_exceptions=True)
        await until(lambda: batcher.tickets == 0)


async def test_choices_are_counted_against_the_queue() -> None:
    """One request alone may have any number; beside it only as many as there is room for."""
    engine = ScriptedChat()
    async with batching(engine, rows=4, choices=8) as batcher:
        engine.gate.close()
        alone = asyncio.create_task(deltas(batcher, generate_job("ab", n=20)))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        with pytest.raises(Overloaded, match="20 choices waiting"):
            await deltas(batcher, generate_job("ab"))
        engine.gate.open()
        await alone
        assert await text(batcher, generate_job("ab")) == "ab"


async def test_the_prompts_of_one_request_leave_others_half_of_the_queue() -> None:
    """Its first is let in as any request; more of them only while half is free."""
    engine = ScriptedChat()
    async with batching(engine, rows=4, choices=8) as batcher:
        engine.gate.close()
        first = generate_job("ab", n=3)
        second = replace(first, n=2)
        asked = [asyncio.create_task(deltas(batcher, first))]
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        with pytest.raises(Overloaded):
            await deltas(batcher, second)
        asked.append(asyncio.create_task(deltas(batcher, replace(first, n=1))))
        asked.append(asyncio.create_task(deltas(batcher, generate_job("ab", n=4))))
        await until(lambda: batcher.tickets + engine.rows == 8)
        engine.gate.open()
        await asyncio.gather(*asked)


@pytest.mark.parametrize("others", [1, 4])
async def test_a_short_bound_answer_waits_a_quantum_of_each_long_one(others: int) -> None:
    """Not for their ends: they take turns though only one runs at a time."""
    engine = ScriptedChat(max_context=10_000)
    async with batching(engine, bound=1) as batcher:
        long = [
            asyncio.create_task(text(batcher, replace(generate_job("g" * 4000), grammar=ANY)))
            for _ in range(others)
        ]
        await until(lambda: len(engine.steps) > 10)
        began = len(engine.steps)
        assert await text(batcher, replace(generate_job("12345"), grammar=ANY)) == "12345"
        waited = len(engine.steps) - began
        assert waited <= others * (QUANTUM + STEPS_PER_TURN) + 2 * STEPS_PER_TURN
        assert max(engine.steps) == 1
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)


async def test_bound_rows_that_take_turns_say_it_all() -> None:
    """Also those whose client leaves while they are parked."""
    engine = ScriptedChat(max_context=10_000)
    async with batching(engine, bound=2) as batcher:
        asked = [
            asyncio.create_task(text(batcher, replace(generate_job(c * 300), grammar=ANY)))
            for c in "abcdef"
        ]
        await until(lambda: len(engine.steps) > 100)
        asked[3].cancel()
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert [each for each in done if isinstance(each, str)] == [c * 300 for c in "abcef"]
        await until(lambda: not engine.rows and not batcher.tickets)
        assert not engine._parked
        assert max(engine.steps) == 2


async def test_bound_rows_that_wait_have_read_their_prompts() -> None:
    """Their turn begins with a token, not with a prompt."""
    engine = ScriptedChat(max_context=10_000)
    async with batching(engine, bound=1) as batcher:
        asked = [
            asyncio.create_task(text(batcher, replace(generate_job("g" * 2000), grammar=ANY)))
            for _ in range(5)
        ]
        await until(lambda: len(engine._parked) == batcher.tickets == 4)
        assert engine.rows == 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
