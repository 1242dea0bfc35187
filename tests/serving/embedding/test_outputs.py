"""Dense, sparse and multi-vector outputs of one model: what shares a pass, and who gets what."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway import metrics
from gateway.errors import BadRequest, ContextLengthExceeded, EngineFailed, Overloaded
from gateway.jobs.embed import Embedded, Output, TextOutputs
from gateway.serving.embedding import batcher as embedding_batcher
from gateway.serving.embedding.batcher import EmbeddingBatcher, max_sims
from tests.fakes import ScriptedEmbedder, embed_job, rerank_job
from tests.serving.embedding.harness import batching, held
from tests.waiting import until

pytestmark = pytest.mark.anyio
ALL: tuple[Output, ...] = ("dense", "sparse", "multi_vector")


def three_headed(**given: Any) -> ScriptedEmbedder:
    return ScriptedEmbedder(outputs=ALL, token_dimensions=8, **given)


def colbert(**given: Any) -> ScriptedEmbedder:
    return ScriptedEmbedder(outputs=("multi_vector",), token_dimensions=8, prompts={}, **given)


def asking_for(
    batcher: EmbeddingBatcher, *texts: str, outputs: tuple[Output, ...] = (), **given: Any
) -> "asyncio.Task[Embedded]":
    job = replace(embed_job(*texts), outputs=outputs, **given)
    return asyncio.create_task(batcher.embed(job))


def has(answer: Embedded) -> set[str]:
    found = {"dense": answer.vectors.size, "sparse": answer.sparse}
    found["multi_vector"] = answer.multi_vector
    return {name for name, value in found.items() if value}


async def test_requests_for_different_outputs_share_a_pass_and_each_gets_its_own() -> None:
    engine = three_headed()
    async with batching(engine) as batcher:
        first = await held(batcher, engine, "a")
        sparse = asking_for(batcher, "bb", outputs=("sparse",))
        dense = asking_for(batcher, "ccc", outputs=("dense",))
        both = asking_for(batcher, "d", "dd", outputs=("dense", "multi_vector"))
        await until(lambda: batcher.tickets == 3)
        engine.gate.open()
        answers = await asyncio.gather(first, sparse, dense, both)
    assert engine.batches == [[1], [1, 2, 2, 3]]
    assert engine.passes == [{"dense"}, {*ALL}]
    assert [has(answer) for answer in answers] == [
        {"dense"}, {"sparse"}, {"dense"}, {"dense", "multi_vector"},
    ]  # fmt: skip
    assert answers[1].sparse[0].ids.tolist() == [ord("b")]
    assert answers[1].sparse[0].weights.tolist() == pytest.approx([2 / 3])
    assert [matrix.shape for matrix in answers[3].multi_vector] == [(1, 8), (2, 8)]
    assert answers[3].vectors[:, 0].tolist() == [1, 2]


async def test_a_row_does_not_keep_what_others_in_its_pass_asked_for() -> None:
    """Beside multi-vectors, 2,048 dense rows would hold gigabytes until the last is computed."""
    engine = three_headed()
    async with batching(engine) as batcher:
        first = await held(batcher, engine, "a")
        dense = asking_for(batcher, "b", outputs=("dense",))
        await until(lambda: batcher.tickets == 1)
        waiting = batcher._waiting[-1]
        many = asking_for(batcher, "c", outputs=("multi_vector",))
        await until(lambda: batcher.tickets == 2)
        engine.gate.open()
        await asyncio.gather(first, dense, many)
        [kept] = waiting.results.result()
    assert isinstance(kept, TextOutputs)
    assert kept.dense is not None
    assert (kept.sparse, kept.multi_vector) == (None, None)


async def test_dense_vectors_alone_take_the_shorter_way() -> None:
    class Dense(ScriptedEmbedder):
        def embed_outputs(self, rows: Any, outputs: Any) -> Any:
            raise AssertionError("there is nothing but dense vectors to compute")

    async with batching(Dense()) as batcher:
        answer = await asking_for(batcher, "a", "bb", outputs=("dense",))
    assert answer.vectors.shape == (2, 4)


@pytest.mark.parametrize(
    ("has_outputs", "given"), [(ALL, "dense"), (("sparse",), "sparse"), (("multi_vector",),) * 2]
)
async def test_who_names_no_output_gets_the_models_first(has_outputs: Any, given: Any) -> None:
    engine = ScriptedEmbedder(outputs=has_outputs, token_dimensions=8)
    async with batching(engine) as batcher:
        answer = await batcher.embed(embed_job("abc"))
    assert has(answer) == {given[0] if isinstance(given, tuple) else given}


@pytest.mark.parametrize("missing", ["sparse", "multi_vector"])
async def test_an_output_that_a_model_has_not_is_refused_with_those_it_has(missing: Any) -> None:
    engine = ScriptedEmbedder()
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match=f"no `{missing}` output; it has `dense`") as refusal:
            await asking_for(batcher, "a", outputs=("dense", missing))
    assert (refusal.value.part, refusal.value.code) == ("output", "unsupported_model")
    assert engine.batches == []


async def test_the_cache_keeps_dense_vectors_alone_and_gives_them_for_nothing_else() -> None:
    engine = three_headed()
    async with batching(engine, cache_size=9) as batcher:
        for outputs in (("sparse",), ("dense", "sparse"), ("dense",), ("dense",), ("sparse",)):
            answer = await asking_for(batcher, "a", outputs=outputs)
            assert has(answer) == {*outputs}
            assert answer.prompt_tokens == 1
    assert engine.passes == [{"sparse"}, {"dense", "sparse"}, {"dense"}, {"sparse"}]


async def test_a_kept_vector_does_not_keep_its_pass() -> None:
    async with batching(three_headed(), cache_size=9) as batcher:
        await asking_for(batcher, "a", "b", outputs=("dense",))
        kept = batcher._cache.get("a", "", truncate=False)
    assert kept is not None
    assert kept.outputs.dense is not None
    assert kept.outputs.dense.base is None


async def test_a_row_at_fault_fails_alone_whatever_is_asked_of_it() -> None:
    engine = three_headed(poison="!")
    async with batching(engine) as batcher:
        first = await held(batcher, engine, "a")
        good = asking_for(batcher, "bb", outputs=("sparse",))
        bad = asking_for(batcher, "c", "!", outputs=("multi_vector",))
        await until(lambda: batcher.tickets == 2)
        engine.gate.open()
        results = await asyncio.gather(first, good, bad, return_exceptions=True)
    assert isinstance(results[1], Embedded)
    assert has(results[1]) == {"sparse"}
    assert isinstance(results[2], EngineFailed)


async def test_a_request_that_is_given_up_costs_no_further_pass() -> None:
    engine = three_headed()
    async with batching(engine) as batcher:
        first = await held(batcher, engine, "a")
        asked = asking_for(batcher, "b", outputs=("multi_vector",))
        await until(lambda: batcher.tickets == 1)
        asked.cancel()
        await asyncio.wait([asked])
        engine.gate.open()
        await first
    assert engine.passes == [{"dense"}]


async def test_multi_vectors_that_are_too_many_are_refused_before_a_pass() -> None:
    engine = three_headed()
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match=r"have 11 tokens .* those of 10 tokens") as refusal:
            await asking_for(batcher, "x" * 6, "y" * 5, outputs=("multi_vector",), max_numbers=87)
        assert refusal.value.part == "prompt"
        assert engine.batches == []
        await asking_for(batcher, "x" * 5, "y" * 5, outputs=("multi_vector",), max_numbers=80)
        await asking_for(batcher, "x" * 6, "y" * 5, outputs=("dense", "sparse"), max_numbers=1)


async def test_texts_are_counted_by_the_outputs_asked_for() -> None:
    counts = [metrics.EMBEDDING_OUTPUTS.labels("m", output) for output in ALL]
    before = [count._value.get() for count in counts]
    async with batching(three_headed(), cache_size=9) as batcher:
        await asking_for(batcher, "a", "b", outputs=("dense",))
        await asking_for(batcher, "a", outputs=("dense",))  # from the cache
        await asking_for(batcher, "a", outputs=("sparse", "multi_vector"))
    changes = [count._value.get() - old for count, old in zip(counts, before, strict=True)]
    assert changes == [3, 1, 1]


async def test_a_prompt_name_makes_colberts_texts_queries() -> None:
    """Its prompts may have no such name; other models' queries are but prompts."""
    engine = colbert()
    async with batching(engine) as batcher:
        for name, tokens in (("query", 3), ("document", 2), (None, 2)):
            answer = await asking_for(batcher, "ab", prompt_name=name)
            assert answer.prompt_tokens == tokens
        with pytest.raises(BadRequest, match="no prompt `passage`"):
            await asking_for(batcher, "ab", prompt_name="passage")
    async with batching(three_headed()) as batcher:
        answer = await asking_for(batcher, "ab", prompt_name="query", outputs=("multi_vector",))
        assert answer.prompt_tokens == 3  # the prompt is "?"
        with pytest.raises(BadRequest, match="no prompt `document`"):
            await asking_for(batcher, "ab", prompt_name="document")


async def test_colberts_scores_are_sums_of_maxima_or_between_0_and_1() -> None:
    """Token vectors are equal if tokens are, modulo eight: the marker 1 as `a`, `y`; `b` as `z`."""
    engine = colbert()
    async with batching(engine) as batcher:
        raw = await batcher.rerank(rerank_job("bc", "abc", "bbb", "xyz", is_raw=True))
        scaled = await batcher.rerank(rerank_job("bc", "abc", "bbb", "xyz"))
    assert raw.scores.tolist() == [3, 1, 2]
    assert scaled.scores.tolist() == pytest.approx([1, 2 / 3, 5 / 6])
    assert raw.prompt_tokens == 3 + 9
    assert engine.passes == [{"multi_vector"}] * 2


async def test_each_document_may_have_a_query_of_its_own() -> None:
    queries = ["b", "c"]
    async with batching(colbert()) as batcher:
        answer = await batcher.rerank(
            replace(rerank_job("", "bbb", "bbb", is_raw=True), queries=queries)
        )
    assert answer.scores.tolist() == [1, 0]


async def test_colberts_documents_are_cut_where_asked() -> None:
    engine = colbert(max_tokens=10)
    async with batching(engine) as batcher:
        short = await batcher.rerank(rerank_job("b", "aab", "b", max_tokens_per_doc=2, is_raw=True))
        assert (short.truncated, short.scores.tolist()) == (1, [1, 1])
        long = await batcher.rerank(rerank_job("b", "x" * 11, "b"))
        assert (long.truncated, long.prompt_tokens) == (1, 2 + 10 + 1)
        with pytest.raises(ContextLengthExceeded, match="your documents resulted in") as refusal:
            await batcher.rerank(rerank_job("b", "x" * 11, truncate=False))
        assert refusal.value.part == "documents"
        with pytest.raises(ContextLengthExceeded, match="your input resulted in"):
            await batcher.rerank(rerank_job("x" * 11, "b", truncate=False))


async def test_colberts_queries_are_cut_to_their_own_length_and_it_is_told() -> None:
    async with batching(colbert(query_length=4)) as batcher:
        short = await asking_for(batcher, "ab", "abc", prompt_name="query")
        assert (short.truncated, short.prompt_tokens) == (0, 7)
        long = await asking_for(batcher, "abc", "abcde", prompt_name="query", truncate=True)
        assert (long.truncated, long.prompt_tokens) == (1, 8)
        with pytest.raises(ContextLengthExceeded, match="length is 4 tokens"):
            await asking_for(batcher, "abcde", prompt_name="query")
        assert (await asking_for(batcher, "abcde")).truncated == 0  # a document
        ranked = await batcher.rerank(rerank_job("abcde", "x"))
        assert (ranked.truncated, ranked.prompt_tokens) == (1, 5)
        with pytest.raises(ContextLengthExceeded) as refusal:
            await batcher.rerank(rerank_job("abcde", "x", truncate=False))
        assert refusal.value.part == "prompt"


async def test_documents_with_too_many_vectors_are_refused_before_a_pass() -> None:
    engine = colbert(max_tokens=10)
    async with batching(engine) as batcher:
        with pytest.raises(BadRequest, match=r"have 22 tokens .* those of 21 tokens") as refusal:
            await batcher.rerank(rerank_job("b", "x" * 50, "y" * 50, max_numbers=21 * 8))
        assert refusal.value.part == "documents"
        assert engine.batches == []
        await batcher.rerank(rerank_job("b", "x" * 50, "y" * 50, max_numbers=22 * 8))


async def test_vectors_of_several_requests_are_bounded_together_until_each_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue's tokens bounded them alone: two million, of a kilobyte and more each."""
    monkeypatch.setattr(embedding_batcher, "HELD_NUMBERS", 30 * 8)
    engine = colbert(max_tokens=50)
    most = 40 * 8
    large = rerank_job("b", "x" * 38, max_numbers=most)
    small = rerank_job("b", "x" * 10, max_numbers=most)
    async with batching(engine) as batcher:
        engine.gate.close()
        first = asyncio.create_task(batcher.rerank(large))
        assert await asyncio.to_thread(engine.gate.reached.wait, 60)
        for refused in (
            batcher.rerank(small),
            asking_for(batcher, "a", outputs=("multi_vector",), max_numbers=most),
        ):
            with pytest.raises(Overloaded, match="vectors of 40 tokens in memory") as told:
                await refused
            assert told.value.retry_after_s
        engine.gate.open()
        await first  # more than all may have together, since no other had any
        left, *others = (asyncio.create_task(batcher.rerank(small)) for _ in range(2))
        left.cancel()
        await asyncio.gather(*others)
        await asking_for(batcher, "a" * 30, outputs=("multi_vector",), max_numbers=most)
    assert batcher._numbers == 0


async def test_models_with_dense_vectors_rerank_by_their_cosines() -> None:
    engine = three_headed()
    async with batching(engine) as batcher:
        await batcher.rerank(rerank_job("b", "c", max_numbers=1))
    assert engine.passes == [{"dense"}]


async def test_a_model_of_sparse_vectors_alone_does_not_rerank() -> None:
    async with batching(ScriptedEmbedder(outputs=("sparse",))) as batcher:
        with pytest.raises(BadRequest, match="no `dense` output; it has `sparse`"):
            await batcher.rerank(rerank_job("b", "c"))


def test_max_sim_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(5)

    def matrix(rows: int) -> Any:
        vectors = rng.normal(size=(rows, 16))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    query, documents = matrix(7), [matrix(rows) for rows in (1, 3, 20)]
    right = [
        sum(max(float(q @ d) for d in document) for q in query.astype(float))
        for document in documents
    ]
    assert max_sims([query], documents, is_mean=False) == pytest.approx(right, abs=1e-5)
    means = max_sims([query] * 3, documents, is_mean=True)
    assert means == pytest.approx(np.array(right) / 7, abs=1e-6)
    assert max_sims([query], [query], is_mean=True).tolist() == pytest.approx([1])
    assert max_sims([query], [query[:0]], is_mean=True).tolist() == [-1]
