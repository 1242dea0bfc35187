"""The rerank batcher: how pairs share a pass, the refusals, and the cost of a failure."""

import asyncio

import numpy as np
import pytest

from gateway.clock import Stage
from gateway.errors import ContextLengthExceeded, EngineFailed, Overloaded
from gateway.serving.embedding.reranker import relevance
from gateway.serving.tokenize import SLICE_CHARS
from tests.fakes import ScriptedEmbedder, ScriptedReranker, rerank_job
from tests.serving.embedding.harness import batching, reranking
from tests.waiting import until

pytestmark = pytest.mark.anyio


def sigmoid(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


async def test_scores_are_in_the_order_of_the_documents() -> None:
    async with reranking(ScriptedReranker()) as batcher:
        raw = await batcher.rerank(rerank_job("abc", "a", "", "cab", is_raw=True))
        scaled = await batcher.rerank(rerank_job("abc", "a", "", "cab"))
    assert raw.scores.tolist() == [1, 0, 3]
    assert scaled.scores.tolist() == pytest.approx([sigmoid(1), 0.5, sigmoid(3)])
    assert raw.prompt_tokens == 3 * 5 + 4
    assert raw.truncated == 0


async def test_pairs_of_requests_that_wait_share_a_pass() -> None:
    engine = ScriptedReranker()
    async with reranking(engine) as batcher:
        engine.gate.close()
        first = asyncio.create_task(batcher.rerank(rerank_job("a", "b")))
        await asyncio.to_thread(engine.gate.reached.wait, 60)
        others = [
            asyncio.create_task(batcher.rerank(rerank_job("a", "b" * n, "a"))) for n in range(1, 11)
        ]
        await until(lambda: batcher.tickets == 10)
        engine.gate.open()
        answers = await asyncio.gather(first, *others)
    assert [len(batch) for batch in engine.batches] == [1, 20]
    assert engine.batches[1] == sorted(engine.batches[1])
    assert all(answer.scores.tolist() == [0.5, sigmoid(1)] for answer in answers[1:])


async def test_a_failure_is_that_of_the_request_with_the_pair_at_fault() -> None:
    engine = ScriptedReranker(poison="!", unsure="?")
    async with reranking(engine) as batcher:
        engine.gate.close()
        first = asyncio.create_task(batcher.rerank(rerank_job("a", "b")))
        await asyncio.to_thread(engine.gate.reached.wait, 60)
        jobs = [rerank_job("a", "a"), rerank_job("a", "a", "b!"), rerank_job("a", "a?")]
        tasks = [asyncio.create_task(batcher.rerank(job)) for job in jobs]
        await until(lambda: batcher.tickets == 3)
        engine.gate.open()
        await first
        good, poisoned, unsure = await asyncio.gather(*tasks, return_exceptions=True)
    assert not isinstance(good, BaseException)
    assert good.scores.tolist() == [sigmoid(1)]
    assert isinstance(poisoned, EngineFailed)
    assert isinstance(unsure, EngineFailed)
    assert "not finite" in unsure.message


async def test_the_tokens_of_all_pairs_count_against_the_queue() -> None:
    engine = ScriptedReranker()
    async with reranking(engine, queue_max_tokens=20) as batcher:
        engine.gate.close()
        first = asyncio.create_task(batcher.rerank(rerank_job("abc", *["abc"] * 2)))
        await asyncio.to_thread(engine.gate.reached.wait, 60)
        with pytest.raises(Overloaded):
            await batcher.rerank(rerank_job("abc", "abc"))
        engine.gate.open()
        await first
        await batcher.rerank(rerank_job("abc", "abc"))


async def test_documents_are_cut_to_fit_and_counted() -> None:
    async with reranking(ScriptedReranker(max_tokens=8)) as batcher:
        cut = await batcher.rerank(rerank_job("abc", "xxxabc", "abc", "abcd", is_raw=True))
        shorter = await batcher.rerank(rerank_job("abc", "abc", "a", max_tokens_per_doc=1))
        with pytest.raises(ContextLengthExceeded) as too_long:
            await batcher.rerank(rerank_job("abc", "abcd", truncate=False))
        with pytest.raises(ContextLengthExceeded) as no_room:
            await batcher.rerank(rerank_job("x" * 9, "a"))
        asked = rerank_job("abc", "abcd", truncate=False, max_tokens_per_doc=1)
        assert (await batcher.rerank(asked)).truncated == 1
    assert cut.scores.tolist() == [0, 3, 3]
    assert cut.truncated == 2
    assert shorter.truncated == 1
    assert (too_long.value.part, no_room.value.part) == ("documents", "prompt")


async def test_a_query_too_long_only_with_its_prompt_is_not_blamed_on_the_documents() -> None:
    async with batching(ScriptedEmbedder(max_tokens=8)) as batcher:
        assert batcher.engine.prompts == {"query": "?"}
        with pytest.raises(ContextLengthExceeded) as too_long:
            await batcher.rerank(rerank_job("x" * 8, "a", truncate=False))
    assert (too_long.value.part, too_long.value.tokens) == ("prompt", 9)


async def test_long_documents_are_tokenized_in_slices_off_the_loop() -> None:
    """Each call encodes the query once more, and holds its thread for a bounded time."""
    engine = ScriptedReranker()
    long = "x" * (SLICE_CHARS // 2 - 1)
    async with reranking(engine) as batcher:
        job = rerank_job("y", *[long] * 5, "y", is_raw=True)
        answer = await batcher.rerank(job)
    assert engine.queries == ["y"] * 3
    assert answer.scores.tolist() == [0] * 5 + [1]
    stages = job.caller.timings.seconds
    assert {Stage.TOKENIZE, Stage.QUEUE, Stage.LANE, Stage.INFERENCE} <= stages.keys()


async def test_each_document_may_have_a_query_of_its_own() -> None:
    job = rerank_job("", "ab", "cd", is_raw=True, queries=["a", "cd"])
    async with reranking(ScriptedReranker()) as batcher:
        assert (await batcher.rerank(job)).scores.tolist() == [1, 2]
    async with batching(ScriptedEmbedder()) as embedder:
        scores = (await embedder.rerank(job)).scores
    assert scores[1] > 0.999


async def test_of_several_labels_the_last_one_is_relevance() -> None:
    """Its score is its probability by a softmax over the labels."""
    logits = np.array([[1.0, 2.0, 3.0], [3.0, 0.0, -2.0]], dtype=np.float32)
    softmax = np.exp(logits[:, -1]) / np.exp(logits).sum(axis=1)
    assert relevance(logits, is_raw=False) == pytest.approx(softmax, abs=1e-6)
    raw = relevance(logits, is_raw=True)
    assert 1 / (1 + np.exp(-raw)) == pytest.approx(softmax, abs=1e-6)
    certain = np.array([[17.0], [18.0], [1000.0], [-1000.0]], dtype=np.float32)
    with np.errstate(over="raise"):
        scores = relevance(certain, is_raw=False)
    assert scores[0] < scores[1] < scores[2] == 1
    assert scores[3] == 0


class TestCosine:
    """An embedding model scores by cosine, with its prompts for queries and documents."""

    async def test_scores_keep_the_order_of_cosines_and_are_in_0_to_1(self) -> None:
        async with batching(ScriptedEmbedder(prompts={})) as batcher:
            raw = await batcher.rerank(rerank_job("abc", "abc", "z", "abc" * 9, is_raw=True))
            scaled = await batcher.rerank(rerank_job("abc", "abc", "z", "abc" * 9))
        assert raw.scores[0] == pytest.approx(1)
        assert scaled.scores == pytest.approx((1 + raw.scores) / 2)
        assert raw.prompt_tokens == 3 + 3 + 1 + 27

    @pytest.mark.parametrize("name", ["document", "passage"])
    async def test_texts_have_the_models_prompts(self, name: str) -> None:
        engine = ScriptedEmbedder(prompts={"query": "?" * 20, name: "!" * 30})
        async with batching(engine) as batcher:
            await batcher.rerank(rerank_job("a", "b", "c"))
        assert engine.batches == [[21, 31, 31]]

    async def test_without_such_prompts_the_default_one_is_used(self) -> None:
        engine = ScriptedEmbedder(prompts={"x": "...", "y": "."}, default_prompt_name="x")
        async with batching(engine) as batcher:
            await batcher.rerank(rerank_job("a", "b"))
            await batcher.rerank(rerank_job("a", "b", prompt_name="y"))
        assert engine.batches == [[4, 4], [2, 2]]

    async def test_documents_are_cut_and_their_prompt_does_not_count(self) -> None:
        engine = ScriptedEmbedder(prompts={"document": "!!"}, max_tokens=50)
        async with batching(engine, cache_size=10) as batcher:
            whole = await batcher.rerank(rerank_job("a", "b" * 60, "b"))
            cut = await batcher.rerank(rerank_job("a", "b" * 60, "bb", max_tokens_per_doc=4))
            far = await batcher.rerank(rerank_job("a", "b" * 60, "bb", max_tokens_per_doc=4096))
        assert (whole.truncated, cut.truncated, far.truncated) == (1, 1, 1)
        assert engine.batches == [[1, 3, 50], [1, 4, 6], [1, 4, 50]]
