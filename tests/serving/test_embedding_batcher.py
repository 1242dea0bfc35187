"""The embedding batcher: who shares a pass, who is refused, what a failure costs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import metrics
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    GatewayError,
    Overloaded,
)
from gateway.jobs import EmbedJob, TokenIds, Vectors
from gateway.serving.embedding_batcher import EmbeddingBatcher, EmbeddingLimits, take_batch
from gateway.serving.lane import Lane
from gateway.serving.tokens import TokenPool
from tests.fakes import ScriptedEmbedder, caller, embed_job

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def batching(
    engine: ScriptedEmbedder, *, rows: int = 32, tokens: int = 1000, queue: int = 256
) -> AsyncIterator[EmbeddingBatcher]:
    limits = EmbeddingLimits(
        max_batch_size=rows,
        max_batch_tokens=tokens,
        batch_window_s=0.05,
        queue_limit=queue,
    )
    with TokenPool() as pool:
        async with Lane() as lane:
            async with EmbeddingBatcher("m", engine, lane, pool, limits).running() as batcher:
                yield batcher


class TestTakeBatch:
    """The decision, with numbers."""

    def test_rows_are_taken_while_the_padded_batch_fits(self) -> None:
        """Four rows of ten are forty tokens; a fifth would be fifty."""
        assert take_batch([10] * 9, 32, 40) == 4

    def test_a_long_row_makes_every_row_before_it_long(self) -> None:
        """Padding counts: 3 x 20 is too much where 2 x 5 was little."""
        assert take_batch([5, 5, 20], 32, 40) == 2

    def test_an_over_long_row_is_served_alone(self) -> None:
        """Rather than never."""
        assert take_batch([500, 1], 32, 40) == 1

    def test_rows_are_bounded_too(self) -> None:
        """However short they are."""
        assert take_batch([1] * 50, 8, 1000) == 8

    @given(
        st.lists(st.integers(1, 600), min_size=1, max_size=60),
        st.integers(1, 40),
        st.integers(1, 4000),
    )
    def test_a_batch_never_exceeds_its_bounds_nor_stalls(
        self, lengths: list[int], rows: int, budget: int
    ) -> None:
        """At least one row, at most the rows, within the budget unless it is one row."""
        taken = take_batch(lengths, rows, budget)
        assert 1 <= taken <= min(rows, len(lengths))
        assert taken == 1 or max(lengths[:taken]) * taken <= budget


async def test_waiting_inputs_share_one_pass() -> None:
    """Inputs that queue while the lane is busy are embedded together."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        first = asyncio.create_task(batcher.embed(embed_job("a")))
        await asyncio.to_thread(engine.gate.reached.wait, 5)
        others = [asyncio.create_task(batcher.embed(embed_job("b" * n))) for n in range(1, 21)]
        await asyncio.sleep(0.1)
        engine.gate.open()
        await asyncio.gather(first, *others)
    assert [len(batch) for batch in engine.batches] == [1, 20]


async def test_a_burst_at_an_idle_lane_shares_one_pass() -> None:
    """Requests that are still being tokenised are waited for, within the window."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        await asyncio.gather(*(batcher.embed(embed_job("text")) for _ in range(20)))
    assert len(engine.batches) <= 3


async def test_every_caller_gets_its_own_vectors_in_order() -> None:
    """Whatever the batch looked like."""
    engine = ScriptedEmbedder()
    async with batching(engine, rows=3) as batcher:
        answers = await asyncio.gather(
            *(batcher.embed(embed_job("x" * n, "y" * (n + 1))) for n in range(1, 9))
        )
    for n, answer in enumerate(answers, start=1):
        assert answer.vectors[:, 0].tolist() == [n, n + 1]
        assert answer.prompt_tokens == 2 * n + 1


async def test_size_one_turns_batching_off() -> None:
    """And no window is waited for."""
    engine = ScriptedEmbedder()
    async with batching(engine, rows=1) as batcher:
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
    """The bound counts requests; a refused one costs nothing."""
    engine = ScriptedEmbedder()
    async with batching(engine, queue=2) as batcher:
        engine.gate.close()
        held = [asyncio.create_task(batcher.embed(embed_job("a"))) for _ in range(2)]
        await asyncio.sleep(0.05)
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
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.sleep(0)
        engine.gate.open()
        await asyncio.gather(first, stayed)
    assert engine.batches == [[1], [3]]


async def test_a_deadline_ends_the_wait() -> None:
    """With 504, which is not worth a retry."""
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        engine.gate.close()
        with pytest.raises(DeadlineExceeded):
            await batcher.embed(embed_job("a", deadline=metrics.now() + 0.05))
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
