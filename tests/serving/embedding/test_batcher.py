"""The embedding batcher: how requests share a pass, the refusals, and the cost of a failure."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway import clock, metrics
from gateway.engine.device import Device
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    EngineFailed,
    Fault,
    GatewayError,
    Overloaded,
    Unavailable,
)
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.embed import EmbedJob, Output, TextOutputs
from gateway.serving.admission import Arrivals
from gateway.serving.embedding.batcher import EmbeddingBatcher, fit_to_context
from gateway.serving.faults import DeviceHealth
from gateway.serving.lane import LEAST_TOKENS, START_TOKENS, Lane
from tests.engine.embedding.harness import GOLDEN
from tests.fakes import ScriptedEmbedder, caller, embed_job, rerank_job
from tests.serving.embedding.harness import Asked, asking, batching, held
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_waiting_inputs_share_one_pass() -> None:
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        first = await held(batcher, engine, "a")
        others = [asking(batcher, "b" * n) for n in range(1, 21)]
        await until(lambda: batcher.tickets == 20)
        engine.gate.open()
        await asyncio.gather(first, *others)
    assert [len(batch) for batch in engine.batches] == [1, 20]


async def test_a_request_that_is_still_being_read_is_waited_for() -> None:
    engine, arrivals = ScriptedEmbedder(), Arrivals()
    async with batching(engine, arrivals, batch_window_s=5) as batcher:
        with arrivals.expect() as second, arrivals.expect():
            first = asking(batcher, "a")
            await until(lambda: batcher.tickets == 1)
            assert engine.batches == []
            await batcher.embed(embed_job("bb"), second)
        await first
    assert engine.batches == [[1, 2]]


async def test_a_request_whose_bytes_are_here_is_waited_for_too() -> None:
    """It counts only once its socket, its reader and itself have had a round of the loop each."""
    engine = ScriptedEmbedder()

    async def next_in_the_sockets() -> None:
        for _ in range(2):
            await asyncio.sleep(0)
        await batcher.embed(embed_job("bb"))

    async with batching(engine) as batcher:
        await asyncio.gather(batcher.embed(embed_job("a")), next_in_the_sockets())
    assert engine.batches == [[1, 2]]


async def test_a_request_alone_waits_for_nobody() -> None:
    counted = metrics.FAST_PATH.labels("m")._value.get()
    engine = ScriptedEmbedder()
    async with batching(engine, batch_window_s=600, batch_deadline_s=600) as batcher:
        async with asyncio.timeout(60):
            for _ in range(3):
                await batcher.embed(embed_job("a"))
    assert metrics.FAST_PATH.labels("m")._value.get() == counted + 3


async def test_one_who_never_arrives_is_waited_for_no_longer_than_the_window() -> None:
    engine, arrivals = ScriptedEmbedder(), Arrivals()
    async with batching(engine, arrivals) as batcher:
        with arrivals.expect():
            async with asyncio.timeout(60):
                await batcher.embed(embed_job("a"))
                await batcher.embed(embed_job("a"))


async def test_a_huge_request_leaves_room_for_small_ones() -> None:
    """They are in the next batch, however much of it still waits."""
    engine = ScriptedEmbedder()
    async with batching(engine, max_batch_size=8) as batcher:
        huge = await held(batcher, engine, *["x" * 3] * 40)
        small = [asking(batcher, "y" * n) for n in (1, 2)]
        await until(lambda: batcher.tickets == 3)
        engine.gate.open()
        await asyncio.gather(*small)
        assert not huge.done()
        answer = await huge
    assert engine.batches[1] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert answer.vectors[:, 0].tolist() == [3] * 40


async def test_a_mixed_request_is_cut_by_length_and_answered_in_order() -> None:
    engine = ScriptedEmbedder()
    lengths = [9, 1, 8, 2, 9, 1]
    async with batching(engine, max_batch_size=3) as batcher:
        answer = await batcher.embed(embed_job(*("x" * n for n in lengths)))
    assert engine.batches == [[1, 1, 2], [8, 9, 9]]
    assert answer.vectors[:, 0].tolist() == lengths


async def test_a_text_seen_before_is_answered_from_the_cache() -> None:
    engine = ScriptedEmbedder()
    async with batching(engine, cache_size=2) as batcher:
        await batcher.embed(embed_job("a", "bb"))
        answer = await batcher.embed(embed_job("bb", "ccc", "a"))
        assert engine.batches == [[1, 2], [3]]
        assert answer.vectors[:, 0].tolist() == [2, 3, 1]
        assert answer.prompt_tokens == 6
        await batcher.embed(embed_job("bb"))  # made room for ccc
    assert engine.batches == [[1, 2], [3], [2]]


async def test_a_text_of_other_callers_is_embedded_again() -> None:
    """They could tell by the time that somebody has asked for it."""
    engine = ScriptedEmbedder()
    async with batching(engine, cache_size=9) as batcher:
        for salt in ("key-1", "key-2", "key-1", ""):
            job = embed_job("a")
            await batcher.embed(replace(job, caller=replace(job.caller, cache_salt=salt)))
    assert engine.batches == [[1], [1], [1]]


async def test_a_cut_text_in_the_cache_is_still_refused_to_who_wants_no_cut() -> None:
    engine = ScriptedEmbedder(max_tokens=5)
    async with batching(engine, cache_size=9) as batcher:
        await batcher.embed(embed_job("too long", truncate=True))
        with pytest.raises(ContextLengthExceeded):
            await batcher.embed(embed_job("too long"))
        assert (await batcher.embed(embed_job("too long", truncate=True))).truncated == 1
    assert engine.batches == [[5]]


async def test_a_tokenizer_that_fails_on_one_text_fails_its_request_alone() -> None:

    class Fussy(ScriptedEmbedder):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            self.gate.pass_through()
            if any("!" in text for text in texts):
                raise BadRequest("No shouting.", part="prompt")
            return super().encode(texts)

    engine = Fussy(max_tokens=5000)  # texts may be so long that a thread tokenizes them
    async with batching(engine) as batcher:
        engine.gate.close()
        asked = [asking(batcher, text * 1001) for text in "ab!cd"]
        await asyncio.to_thread(engine.gate.reached.wait, 60)
        engine.gate.open()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers[2], BadRequest)
    assert sum(isinstance(answer, BaseException) for answer in answers) == 1


async def test_every_caller_gets_its_own_vectors_in_order() -> None:
    engine = ScriptedEmbedder()
    async with batching(engine, max_batch_size=3) as batcher:
        answers = await asyncio.gather(
            *(batcher.embed(embed_job("x" * n, "y" * (n + 1))) for n in range(1, 9))
        )
    for n, answer in enumerate(answers, start=1):
        assert answer.vectors[:, 0].tolist() == [n, n + 1]
        assert answer.prompt_tokens == 2 * n + 1


async def test_a_failed_batch_is_tried_row_by_row_so_neighbours_are_served() -> None:
    engine = ScriptedEmbedder(poison="!")
    async with batching(engine) as batcher:
        results = await asyncio.gather(
            *(batcher.embed(embed_job(text)) for text in ("good", "bad!", "fine")),
            return_exceptions=True,
        )
    assert isinstance(results[1], EngineFailed)
    assert "poisoned" in str(results[1])
    served = [result for result in results if not isinstance(result, BaseException)]
    assert [answer.vectors[0, 0] for answer in served] == [4, 4]


class ShortEmbedder(ScriptedEmbedder):
    """Gives one vector too few while it is broken."""

    is_broken = True

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        vectors = super().embed(rows)
        return vectors[:-1] if self.is_broken else vectors


async def test_an_engine_that_answers_short_fails_its_batch_and_nothing_after_it() -> None:
    engine = ShortEmbedder()
    async with batching(engine) as batcher, asyncio.timeout(60):
        answers = await asyncio.gather(
            *(batcher.embed(embed_job(text)) for text in ("a", "bb")), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [EngineFailed, EngineFailed]
        engine.is_broken = False
        assert (await batcher.embed(embed_job("ccc"))).vectors[0, 0] == 3


async def test_an_over_long_input_is_refused_unless_it_may_be_cut() -> None:
    engine = ScriptedEmbedder(max_tokens=5)
    async with batching(engine) as batcher:
        with pytest.raises(ContextLengthExceeded, match="5 tokens"):
            await batcher.embed(embed_job("short", "too long"))
        answer = await batcher.embed(embed_job("short", "too long", truncate=True))
    assert answer.truncated == 1
    assert answer.vectors[:, 0].tolist() == [5, 5]


@pytest.mark.parametrize("folder", ["bert", "xlm-roberta", "modernbert", "qwen3", "colbert-bert"])
@pytest.mark.parametrize("prompt", ["", "query: ", "Instruct: find it\nQuery:", "title: none | "])
async def test_a_cut_keeps_at_least_a_token_of_a_text_or_tells_how_much_does(
    folder: str, prompt: str
) -> None:
    engine = load_embedding(GOLDEN / folder, name="tiny", device=Device.CPU)
    texts = [prompt + words for words in ("water is wet and deep", "stone is dry and hard")]

    def cut(max_tokens: int) -> list[TokenIds]:
        rows, over = fit_to_context(
            list[TokenIds](engine.encode(texts)),
            engine,
            engine.max_tokens,
            truncate=True,
            max_tokens=max_tokens,
            prompts=[prompt],
        )
        assert over == {0, 1}
        assert all(len(row) <= max_tokens for row in rows)
        return rows

    with pytest.raises(BadRequest, match="of input 0: it should be at least") as caught:
        cut(1)
    assert caught.value.part == "max_tokens"
    least = int(str(caught.value).rsplit(maxsplit=1)[1].rstrip("."))
    for too_few in range(1, least):
        with pytest.raises(BadRequest, match=f"at least {least}"):
            cut(too_few)
    one, other = cut(least)
    assert one != other


async def test_a_model_whose_prompt_fills_its_limit_is_refused_by_that_name() -> None:
    engine = ScriptedEmbedder(max_tokens=5, prompts={"query": "12345", "document": "1234"})
    job = EmbedJob(caller=caller(), texts=["a"], prompt_name="query", truncate=True)
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match=r"model's limit is 5.*input 0.*at least 6"):
            await batcher.embed(job)
        for most in (None, 1):
            asked = rerank_job("q", "d", max_tokens_per_doc=most)
            with pytest.raises(BadRequest, match=r"model's limit is 5.*at least 6"):
                await batcher.rerank(asked)
    assert engine.batches == []


async def test_a_prompt_is_put_before_each_text_and_an_unknown_one_is_refused() -> None:
    engine = ScriptedEmbedder()
    job = EmbedJob(caller=caller(), texts=["abc"], prompt_name="query")
    wrong = EmbedJob(caller=caller(), texts=["abc"], prompt_name="nothing")
    async with batching(engine) as batcher:
        assert (await batcher.embed(job)).vectors[0].tolist() == [4, ord("?"), 0, 1]
        with pytest.raises(BadRequest, match="it has: query"):
            await batcher.embed(wrong)


async def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    engine = ScriptedEmbedder(vocab_size=10)
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match="0 to 9"):
            await batcher.embed(EmbedJob(caller=caller(), token_rows=[[3, 10]]))
        answer = await batcher.embed(EmbedJob(caller=caller(), token_rows=[[3, 9]]))
    assert np.array_equal(answer.vectors, [[2, 3, 0, 1]])


async def test_a_full_queue_answers_overloaded_and_recovers() -> None:
    engine = ScriptedEmbedder()
    async with batching(engine, queue_max_tokens=2) as batcher:
        engine.gate.close()
        held = [asking(batcher, "a") for _ in range(2)]
        await asyncio.to_thread(engine.gate.reached.wait, 60)
        with pytest.raises(Overloaded) as refusal:
            await batcher.embed(embed_job("b"))
        assert refusal.value.headers["retry-after"] == "1"
        engine.gate.open()
        await asyncio.gather(*held)
        await batcher.embed(embed_job("c"))


async def test_a_caller_who_left_is_not_computed() -> None:
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        first = await held(batcher, engine, "a")
        left = asking(batcher, "bb")
        stayed = asking(batcher, "ccc")
        await until(lambda: batcher.tickets == 2)
        left.cancel()
        await asyncio.wait([left])
        engine.gate.open()
        await asyncio.gather(first, stayed)
    assert engine.batches == [[1], [3]]


async def test_a_deadline_ends_the_wait() -> None:
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        with pytest.raises(DeadlineExceeded):
            await batcher.embed(embed_job("a", deadline=clock.now() + 0.05))
        engine.gate.open()


async def test_what_waits_when_the_model_goes_is_told() -> None:
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        waiting = [asking(batcher, "a" * n) for n in (1, 2, 3)]
        await asyncio.to_thread(engine.gate.reached.wait, 60)
        asyncio.get_running_loop().call_later(0.05, engine.gate.open)
    for answer in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(answer, GatewayError)


class Paced(ScriptedEmbedder):
    """Takes a tenth of a millisecond for each padded token."""

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        time.sleep(0.0001 * len(rows) * max(map(len, rows)))
        return super().embed(rows)


async def test_a_batch_that_would_take_long_is_cut_and_others_have_the_lane_between() -> None:
    """The cut follows the measured times; every input still has its own vector."""
    engine, order = Paced(), list[str]()
    limits: dict[str, Any] = {"max_batch_size": 64, "max_batch_tokens": 16_384}
    texts = [chr(ord("a") + n % 26) * (40 + n) for n in range(60)]

    async def decode(lane: Lane) -> None:
        while True:
            async with lane.turn("decode"):
                order.append(f"after {len(engine.batches)}")
                await asyncio.sleep(0.002)

    async with Lane() as lane, batching(engine, lane=lane, pass_limit_s=0.05, **limits) as batcher:
        beside = asyncio.create_task(decode(lane))
        embedded = await batcher.embed(embed_job(*texts))
        beside.cancel()
        await asyncio.wait([beside])
    assert [int(vector[0]) for vector in embedded.vectors] == [len(text) for text in texts]
    assert len(engine.batches) > 4
    assert all(len(rows) * max(rows) <= 2 * START_TOKENS for rows in engine.batches)
    between = {f"after {done}" for done in range(1, len(engine.batches))}
    assert between <= set(order), "decoding had its turn between any two passes"


SLOW: dict[str, Any] = {
    "token_s": 1.0,
    "steps": 5,
}  # a row of more than 32 tokens is computed in steps
LONG = "a" * 40


async def test_a_row_that_takes_long_gives_the_lane_back_between_its_steps() -> None:
    engine, seen = ScriptedEmbedder(**SLOW), set[int]()
    async with Lane() as lane, batching(engine, lane=lane, pass_limit_s=1e-9) as batcher:
        asked = await held(batcher, engine, LONG)
        beside = asyncio.create_task(look(lane, engine, seen))
        await asyncio.sleep(0)
        engine.gate.open()
        embedded = await asked
        beside.cancel()
        await asyncio.wait([beside])
    assert embedded.vectors.tolist() == [[40, ord("a"), 0, 1]]
    assert {1, 2, 3, 4} <= seen, "another had its turn after each step"
    assert engine.stepped == [0, 1, 2, 3, 4]
    assert engine.batches == [[40]]
    assert engine.freed_on == "lane"


async def look(lane: Lane, engine: ScriptedEmbedder, seen: set[int]) -> None:
    """Have turns of another kind, and note how many steps were made before each."""
    while True:
        async with lane.turn("decode"):
            seen.add(len(engine.stepped))
        await asyncio.sleep(0)


async def test_steps_within_the_limit_share_a_turn() -> None:
    engine, seen = ScriptedEmbedder(**SLOW), set[int]()
    async with Lane() as lane, batching(engine, lane=lane, pass_limit_s=30) as batcher:
        asked = await held(batcher, engine, LONG)
        beside = asyncio.create_task(look(lane, engine, seen))
        await asyncio.sleep(0)
        engine.gate.open()
        await asked
        beside.cancel()
        await asyncio.wait([beside])
    assert seen <= {5}


async def test_a_client_who_leaves_ends_its_row_between_two_steps() -> None:
    """What the row took is freed on the lane, and the pace keeps what was measured before."""
    engine = ScriptedEmbedder(**SLOW)
    async with Lane() as lane, batching(engine, lane=lane, pass_limit_s=1e-9) as batcher:
        asked = await held(batcher, engine, LONG)
        asked.cancel()
        await asyncio.wait([asked])
        engine.gate.open()
        assert (await batcher.embed(embed_job("b"))).vectors[0][1] == ord("b")
        assert batcher._pace.tokens <= 4 * LEAST_TOKENS
    assert engine.stepped == [0]
    assert engine.freed_on == "lane"


class FailsLate(ScriptedEmbedder):
    """Fails in a long row's last step."""

    def in_steps(
        self, rows: Sequence[TokenIds], outputs: Collection[Output]
    ) -> Generator[list[TextOutputs] | None]:
        yield from itertools.islice(super().in_steps(rows, outputs), self.steps)
        raise RuntimeError("poisoned")


async def test_a_step_that_fails_fails_its_row_alone() -> None:
    engine = FailsLate(**SLOW)
    async with batching(engine, pass_limit_s=1e-9) as batcher:
        asked = await held(batcher, engine, LONG)
        other = asking(batcher, "b")
        engine.gate.open()
        with pytest.raises(EngineFailed):
            await asked
        assert (await other).vectors[0][1] == ord("b")


async def test_a_model_that_goes_while_a_row_waits_for_the_lane_tells_who_asked() -> None:
    engine, lane = ScriptedEmbedder(**SLOW), Lane()
    async with lane:
        async with batching(engine, lane=lane, pass_limit_s=1e-9) as batcher:
            asked = await held(batcher, engine, LONG)
            entered, leaving = asyncio.Event(), asyncio.Event()

            async def keep() -> None:
                async with lane.turn("decode"):
                    entered.set()
                    await leaving.wait()

            keeping = asyncio.create_task(keep())
            await asyncio.sleep(0)
            engine.gate.open()
            await entered.wait()
        with pytest.raises(Unavailable, match="unloaded"):
            await asked
        assert engine.freed_on == "lane"
        leaving.set()
        await keeping
        async with lane.turn("decode"):
            pass


@asynccontextmanager
async def resting(
    batcher: EmbeddingBatcher, engine: ScriptedEmbedder, lane: Lane, ending: Callable[[], None]
) -> AsyncIterator[tuple[Asked, Callable[[], None]]]:
    """Let a long row rest while another's call runs, and give a function that lets `ending` go."""
    asked = await held(batcher, engine, LONG)
    entered, leaving = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def call() -> None:
        loop.call_soon_threadsafe(entered.set)
        leaving.wait(10)
        ending()

    async def keep() -> None:
        async with lane.turn("decode") as turn:
            await turn(call)

    keeping = asyncio.create_task(keep())
    await asyncio.sleep(0)
    engine.gate.open()
    await entered.wait()
    yield asked, leaving.set
    assert isinstance((await asyncio.gather(keeping, return_exceptions=True))[0], GatewayError)


def end_thread() -> None:
    raise SystemExit


async def test_a_lane_that_dies_while_a_row_rests_tells_who_asked() -> None:
    engine = ScriptedEmbedder(**SLOW)
    async with (
        Lane() as lane,
        batching(engine, lane=lane, pass_limit_s=1e-9) as batcher,
        resting(batcher, engine, lane, end_thread) as (asked, leave),
    ):
        leave()
        with pytest.raises(Unavailable, match="stopped"):
            await asyncio.wait_for(asked, 10)
    assert engine.stepped == [0]


async def test_a_lane_that_dies_as_a_model_goes_holds_no_unload_and_no_shutdown() -> None:
    """The row's end was queued, and the thread that would have run it had ended."""
    engine = ScriptedEmbedder(**SLOW)
    async with asyncio.timeout(10), Lane() as lane, AsyncExitStack() as unload:
        model = batching(engine, lane=lane, pass_limit_s=1e-9)
        batcher = await unload.enter_async_context(model)
        async with resting(batcher, engine, lane, end_thread) as (asked, leave):
            unloading = asyncio.create_task(unload.pop_all().aclose())
            await until(lambda: lane._work.qsize() == 1)
            leave()
            await unloading
        with pytest.raises(Unavailable):
            await asked


async def test_a_device_that_is_lost_while_a_row_rests_ends_the_row() -> None:
    engine, health = ScriptedEmbedder(**SLOW), DeviceHealth(lambda _: Fault.FATAL)
    async with (
        Lane(health=health) as lane,
        batching(engine, lane=lane, pass_limit_s=1e-9) as batcher,
        resting(batcher, engine, lane, lambda: [][0]) as (asked, leave),
    ):
        leave()
        with pytest.raises(DeviceLost):
            await asyncio.wait_for(asked, 10)
    assert engine.stepped == [0], "no step was tried on a device that is lost"
    assert engine.freed_on == "lane"


async def test_a_models_first_pass_is_sized_by_an_estimate() -> None:
    engine = ScriptedEmbedder(token_s=0.005)
    async with batching(engine, pass_limit_s=0.25) as batcher:
        await batcher.embed(embed_job(*(chr(ord("a") + n) * 10 for n in range(20))))
    assert engine.batches[0] == [10] * 5
