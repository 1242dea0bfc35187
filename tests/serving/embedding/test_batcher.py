"""The embedding batcher: who shares a pass, who is refused, what a failure costs."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway import clock, metrics
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    GatewayError,
    Overloaded,
)
from gateway.jobs import EmbedJob, Stage, TokenIds, Vectors
from gateway.serving.admission import Arrivals
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.embedding.policy import EmbeddingLimits
from gateway.serving.lane import START_TOKENS, Lane
from gateway.serving.tokenize import ThreadPools
from tests.fakes import ScriptedEmbedder, caller, embed_job
from tests.waiting import until

pytestmark = pytest.mark.anyio


LIMITS = EmbeddingLimits(max_batch_size=32, max_batch_tokens=1000, batch_window_s=0.05)


@asynccontextmanager
async def batching(
    engine: ScriptedEmbedder, arrivals: Arrivals | None = None, **limits: Any
) -> AsyncIterator[EmbeddingBatcher]:
    with ThreadPools() as pool:
        async with Lane() as lane:
            batcher = EmbeddingBatcher(
                "m", engine, lane, pool, replace(LIMITS, **limits), arrivals or Arrivals()
            )
            async with batcher.running():
                yield batcher


async def test_waiting_inputs_share_one_pass() -> None:
    """Inputs that queue while the lane is busy are embedded together."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        first = asyncio.create_task(batcher.embed(embed_job("a")))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        others = [asyncio.create_task(batcher.embed(embed_job("b" * n))) for n in range(1, 21)]
        await until(lambda: batcher.tickets == 20)
        engine.gate.open()
        await asyncio.gather(first, *others)
    assert [len(batch) for batch in engine.batches] == [1, 20]


async def test_a_burst_at_an_idle_lane_shares_one_pass() -> None:
    """Requests that are still being tokenised are waited for, within the window."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        await asyncio.gather(*(batcher.embed(embed_job("text")) for _ in range(20)))
    assert len(engine.batches) <= 3


async def test_a_request_that_is_still_being_read_is_waited_for() -> None:
    """The window is for a burst of which only the first has arrived."""
    engine, arrivals = ScriptedEmbedder(), Arrivals()
    async with batching(engine, arrivals, batch_window_s=5) as batcher:
        with arrivals.expect() as second, arrivals.expect():
            first = asyncio.create_task(batcher.embed(embed_job("a")))
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
    """The fast path: an idle lane, and no other on its way. A window of minutes costs nothing."""
    counted = metrics.FAST_PATH.labels("m")._value.get()
    engine = ScriptedEmbedder()
    async with batching(engine, batch_window_s=600, batch_deadline_s=600) as batcher:
        async with asyncio.timeout(5):
            for _ in range(3):
                await batcher.embed(embed_job("a"))
    assert metrics.FAST_PATH.labels("m")._value.get() == counted + 3


async def test_one_who_never_arrives_is_waited_for_no_longer_than_the_window() -> None:
    """A slow client's body must not hold everybody up."""
    engine, arrivals = ScriptedEmbedder(), Arrivals()
    async with batching(engine, arrivals) as batcher:
        with arrivals.expect():
            async with asyncio.timeout(5):
                await batcher.embed(embed_job("a"))
                await batcher.embed(embed_job("a"))


async def test_a_batch_below_the_minimum_waits_the_window_out_and_then_goes() -> None:
    """With nobody else in sight."""
    engine = ScriptedEmbedder()
    async with batching(engine, min_batch_size=2, batch_window_s=600) as batcher:
        first = asyncio.create_task(batcher.embed(embed_job("a")))
        await until(lambda: batcher.tickets == 1)
        assert engine.batches == []
        await asyncio.gather(first, batcher.embed(embed_job("bb")))
        batcher.adopt(replace(LIMITS, min_batch_size=2, batch_window_s=0.05))
        await batcher.embed(embed_job("ccc"))
    assert engine.batches == [[1, 2], [3]]


async def test_a_huge_request_leaves_room_for_small_ones() -> None:
    """They are in the next batch, however much of it still waits."""
    engine = ScriptedEmbedder()
    async with batching(engine, max_batch_size=8) as batcher:
        engine.gate.close()
        huge = asyncio.create_task(batcher.embed(embed_job(*["x" * 3] * 40)))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        small = [asyncio.create_task(batcher.embed(embed_job("y" * n))) for n in (1, 2)]
        await until(lambda: batcher.tickets == 3)
        engine.gate.open()
        await asyncio.gather(*small)
        assert not huge.done()
        answer = await huge
    assert engine.batches[1] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert answer.vectors[:, 0].tolist() == [3] * 40


async def test_a_mixed_request_is_cut_by_length_and_answered_in_order() -> None:
    """Short with short, long with long: little is padded."""
    engine = ScriptedEmbedder()
    lengths = [9, 1, 8, 2, 9, 1]
    async with batching(engine, max_batch_size=3) as batcher:
        answer = await batcher.embed(embed_job(*("x" * n for n in lengths)))
    assert engine.batches == [[1, 1, 2], [8, 9, 9]]
    assert answer.vectors[:, 0].tolist() == lengths


async def test_where_the_time_went_is_written_down() -> None:
    """By stage, and together no more than all of it."""
    engine = ScriptedEmbedder()
    job = embed_job("a", "b")
    async with batching(engine, max_batch_size=1) as batcher:
        await batcher.embed(job)
    timings = job.caller.timings
    assert set(timings.seconds) == {Stage.TOKENISE, Stage.QUEUE, Stage.LANE, Stage.INFERENCE}
    assert all(seconds >= 0 for seconds in timings.seconds.values())
    assert sum(timings.seconds.values()) <= clock.now() - timings.started
    assert (timings.model, timings.tokens_in) == ("m", 2)


async def test_a_wait_for_the_lane_is_counted_once_however_many_passes_follow() -> None:
    """A turn may have several, while others wait for the lane."""
    engine = ScriptedEmbedder()
    with ThreadPools() as pool:
        async with Lane(weights={"embedding": 1000.0}) as lane:
            limits = replace(LIMITS, max_batch_size=1)
            async with EmbeddingBatcher("m", engine, lane, pool, limits).running() as batcher:
                job = embed_job(*"abcdefghij")
                async with lane.turn("decode") as turn:
                    asked = asyncio.create_task(batcher.embed(job))
                    while not turn.is_contended:
                        await asyncio.sleep(0.001)
                    await asyncio.sleep(0.05)
                    others = [asyncio.create_task(_a_turn(lane)) for _ in range(3)]
                    await asyncio.sleep(0)
                await asyncio.gather(asked, *others)
    seconds = job.caller.timings.seconds
    assert seconds[Stage.LANE] >= 0.04
    assert sum(seconds.values()) <= clock.now() - job.caller.timings.started


async def _a_turn(lane: Lane) -> None:
    async with lane.turn("decode"):
        pass


async def test_a_text_seen_before_is_answered_from_the_cache() -> None:
    """Only what is new is embedded; the answer is whole, and counts every token."""
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
    """And counted as cut for who does."""
    engine = ScriptedEmbedder(max_tokens=5)
    async with batching(engine, cache_size=9) as batcher:
        await batcher.embed(embed_job("too long", truncate=True))
        with pytest.raises(ContextLengthExceeded):
            await batcher.embed(embed_job("too long"))
        assert (await batcher.embed(embed_job("too long", truncate=True))).truncated == 1
    assert engine.batches == [[5]]


async def test_a_tokenizer_that_fails_on_one_text_fails_its_request_alone() -> None:
    """Texts of many requests share a call; an error is not shared."""

    class Fussy(ScriptedEmbedder):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            self.gate.pass_through()
            if any("!" in text for text in texts):
                raise BadRequest("No shouting.", part="prompt")
            return super().encode(texts)

    engine = Fussy(max_tokens=5000)  # for texts so long that they are tokenised on a thread
    async with batching(engine) as batcher:
        engine.gate.close()
        asked = [asyncio.create_task(batcher.embed(embed_job(text * 1001))) for text in "ab!cd"]
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        engine.gate.open()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers[2], BadRequest)
    assert sum(isinstance(answer, BaseException) for answer in answers) == 1


async def test_every_caller_gets_its_own_vectors_in_order() -> None:
    """Whatever the batch looked like."""
    engine = ScriptedEmbedder()
    async with batching(engine, max_batch_size=3) as batcher:
        answers = await asyncio.gather(
            *(batcher.embed(embed_job("x" * n, "y" * (n + 1))) for n in range(1, 9))
        )
    for n, answer in enumerate(answers, start=1):
        assert answer.vectors[:, 0].tolist() == [n, n + 1]
        assert answer.prompt_tokens == 2 * n + 1


async def test_size_one_turns_batching_off() -> None:
    """And no window is waited for."""
    engine = ScriptedEmbedder()
    async with batching(engine, max_batch_size=1) as batcher:
        await batcher.embed(embed_job("a", "b", "c"))
    assert engine.batches == [[1], [1], [1]]


async def test_a_failed_batch_is_tried_row_by_row_so_neighbours_are_served() -> None:
    """Only the poisoned row's caller hears of it."""
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
    """Nobody is given another's vector, and nobody hangs."""
    engine = ShortEmbedder()
    async with batching(engine) as batcher, asyncio.timeout(5):
        answers = await asyncio.gather(
            *(batcher.embed(embed_job(text)) for text in ("a", "bb")), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [EngineFailed, EngineFailed]
        engine.is_broken = False
        assert (await batcher.embed(embed_job("ccc"))).vectors[0, 0] == 3


async def test_an_over_long_input_is_refused_unless_it_may_be_cut() -> None:
    """Never a silent cut: the answer counts what was truncated."""
    engine = ScriptedEmbedder(max_tokens=5)
    async with batching(engine) as batcher:
        with pytest.raises(ContextLengthExceeded, match="5 tokens"):
            await batcher.embed(embed_job("short", "too long"))
        answer = await batcher.embed(embed_job("short", "too long", truncate=True))
    assert answer.truncated == 1
    assert answer.vectors[:, 0].tolist() == [5, 5]


async def test_a_prompt_is_put_before_each_text_and_an_unknown_one_is_refused() -> None:
    """e5 and Qwen3 want queries and documents told apart."""
    engine = ScriptedEmbedder()
    job = EmbedJob(caller=caller(), texts=["abc"], prompt_name="query")
    wrong = EmbedJob(caller=caller(), texts=["abc"], prompt_name="nothing")
    async with batching(engine) as batcher:
        assert (await batcher.embed(job)).vectors[0].tolist() == [4, ord("?"), 0, 1]
        with pytest.raises(BadRequest, match="it has: query"):
            await batcher.embed(wrong)


async def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    """MLX would read past its table."""
    engine = ScriptedEmbedder(vocab_size=10)
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match="0 to 9"):
            await batcher.embed(EmbedJob(caller=caller(), token_rows=[[3, 10]]))
        answer = await batcher.embed(EmbedJob(caller=caller(), token_rows=[[3, 9]]))
    assert np.array_equal(answer.vectors, [[2, 3, 0, 1]])


async def test_a_full_queue_answers_overloaded_and_recovers() -> None:
    """The bound counts tokens; a refused request costs nothing."""
    engine = ScriptedEmbedder()
    async with batching(engine, queue_max_tokens=2) as batcher:
        engine.gate.close()
        held = [asyncio.create_task(batcher.embed(embed_job("a"))) for _ in range(2)]
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        with pytest.raises(Overloaded) as refusal:
            await batcher.embed(embed_job("b"))
        assert refusal.value.headers["retry-after"] == "1"
        engine.gate.open()
        await asyncio.gather(*held)
        await batcher.embed(embed_job("c"))


async def test_a_caller_who_left_is_not_computed() -> None:
    """Its inputs are skipped when the batch is taken."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        first = asyncio.create_task(batcher.embed(embed_job("a")))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        left = asyncio.create_task(batcher.embed(embed_job("bb")))
        stayed = asyncio.create_task(batcher.embed(embed_job("ccc")))
        await until(lambda: batcher.tickets == 2)
        left.cancel()
        await asyncio.wait([left])
        engine.gate.open()
        await asyncio.gather(first, stayed)
    assert engine.batches == [[1], [3]]


async def test_a_deadline_ends_the_wait() -> None:
    """With 504, which is not worth a retry."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        with pytest.raises(DeadlineExceeded):
            await batcher.embed(embed_job("a", deadline=clock.now() + 0.05))
        engine.gate.open()


async def test_what_waits_when_the_model_goes_is_told() -> None:
    """No future is left hanging."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        waiting = [asyncio.create_task(batcher.embed(embed_job("a" * n))) for n in (1, 2, 3)]
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        asyncio.get_running_loop().call_later(0.05, engine.gate.open)
    for answer in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(answer, GatewayError)


class Paced(ScriptedEmbedder):
    """Takes a tenth of a millisecond for each padded token."""

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        time.sleep(0.0001 * len(rows) * max(map(len, rows)))
        return super().embed(rows)


async def test_a_batch_that_would_take_long_is_cut_and_others_have_the_lane_between() -> None:
    """By what was measured; every input has its own vector all the same."""
    engine, order = Paced(), list[str]()
    limits = replace(LIMITS, max_batch_size=64, max_batch_tokens=16_384, pass_limit_s=0.05)
    texts = [chr(ord("a") + n % 26) * (40 + n) for n in range(60)]
    with ThreadPools() as pool:
        async with Lane() as lane:
            async with EmbeddingBatcher("m", engine, lane, pool, limits).running() as batcher:

                async def decode() -> None:
                    while True:
                        async with lane.turn("decode"):
                            order.append(f"after {len(engine.batches)}")
                            await asyncio.sleep(0.002)

                beside = asyncio.create_task(decode())
                embedded = await batcher.embed(embed_job(*texts))
                beside.cancel()
                await asyncio.wait([beside])
    assert [int(vector[0]) for vector in embedded.vectors] == [len(text) for text in texts]
    assert len(engine.batches) > 4
    assert all(len(rows) * max(rows) <= 2 * START_TOKENS for rows in engine.batches)
    between = {f"after {done}" for done in range(1, len(engine.batches))}
    assert between <= set(order), "decoding had its turn between any two passes"
