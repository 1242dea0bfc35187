import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.engine.device import Device
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.embedding.loading import read_embedding_context
from gateway.errors import BadRequest, ContextLengthExceeded, ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, rewrite, tiny
from tests.engine.embedding.test_outputs import (
    FEW,
    load,
    require_equal,
    require_vectors,
    rows_of,
)
from tests.fakes import embed_job
from tests.serving.embedding.harness import batching

COLBERTS = ["colbert-bert", "colbert-pylate", "colbert-stanford"]


def vectors(engine: EmbeddingEngine, rows: list[list[int]]) -> Any:
    return engine.embed_outputs(rows, ["multi_vector"])


def queries_of(engine: EmbeddingEngine) -> list[list[int]]:
    most = engine.query_tokens
    rows = engine.encode_query(FEW)
    return [engine.truncate(row, most) if len(row) > most else row for row in rows]


@pytest.mark.parametrize("device", [Device.CPU, Device.METAL])
@pytest.mark.parametrize("name", COLBERTS)
def test_documents_and_queries_get_the_vectors_of_sentence_transformers(
    name: str, device: Device
) -> None:
    """Queries and documents share a pass: each row's own tokens say what it is."""
    engine = load(GOLDEN / name, device)
    assert engine.outputs == ("multi_vector",)
    assert (engine.dimensions, engine.token_dimensions) == (0, 16)
    found = vectors(engine, rows_of(engine) + queries_of(engine))
    require_vectors(found[: len(FEW)], GOLDEN / name / "documents.npz")
    require_vectors(found[len(FEW) :], GOLDEN / name / "queries.npz")
    for text in found:
        assert np.allclose(np.linalg.norm(text.multi_vector, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("name", COLBERTS)
def test_a_batch_gives_each_row_what_it_gets_alone(name: str) -> None:
    engine = load(GOLDEN / name)
    pairs = zip(rows_of(engine), queries_of(engine), strict=True)
    rows = [row for pair in pairs for row in pair]
    for row, text in zip(rows, vectors(engine, rows), strict=True):
        [alone] = vectors(engine, [row])
        require_equal(text, alone)


@pytest.mark.parametrize(
    ("name", "query", "document"),
    [("colbert-bert", 12, 40), ("colbert-pylate", 8, 50), ("colbert-stanford", 16, 40)],
)
def test_queries_have_one_length_and_documents_a_limit(
    name: str, query: int, document: int
) -> None:
    engine = load(GOLDEN / name)
    assert engine.max_tokens == document
    assert read_embedding_context(GOLDEN / name, None, None, None) == document
    long = "a long text of many words " * 30
    assert engine.query_tokens == query
    short, whole = engine.encode_query(["a", long])
    assert len(short) == query < len(whole)
    [row] = engine.encode([long])
    assert len(row) > document
    cut = engine.truncate(row)
    assert len(cut) == document
    assert (cut[:5], cut[-1]) == (row[:5], row[-1])
    [start] = engine.encode_start([long])
    assert engine.truncate(start) == cut
    assert engine.truncate(row, 10) == [*row[:9], row[-1]]


def test_the_models_own_prompts_go_before_its_markers_or_are_them(tmp_path: Path) -> None:
    """sentence-transformers saves the markers as prompts, which must not come twice."""
    assert load(GOLDEN / "colbert-bert").prompts == {}
    folder = tiny(tmp_path, "colbert-pylate")
    rewrite(folder / "config_sentence_transformers.json", prompts={"query": "search: "})
    assert load(folder).prompts == {"query": "search: "}


def test_queries_are_not_expanded_if_the_model_says_so(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "colbert-pylate")
    rewrite(folder / "config_sentence_transformers.json", do_query_expansion=False)
    engine = load(folder)
    [short] = engine.encode_query(["a"])
    assert len(short) < 8
    [text] = vectors(engine, [short])
    assert text.multi_vector.shape == (len(short), 16)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config_sentence_transformers.json", {"query_prefix": "[X]"}, r"'\[X\]' is no token"),
        (
            "config_sentence_transformers.json",
            {"query_prefix": "[D] "},
            "may begin as its queries do",
        ),
        ("config_sentence_transformers.json", {"query_prefix": ""}, "may begin as"),
        ("config_sentence_transformers.json", {"query_length": 51}, "queries have 51 tokens"),
        ("config_sentence_transformers.json", {"query_length": "x"}, "invalid value"),
        ("tokenizer_config.json", {"mask_token": None}, "filled up with a token"),
        ("1_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "works on"),
    ],
)
def test_a_pylate_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    folder = tiny(tmp_path, "colbert-pylate")
    rewrite(folder / file, **changes)
    with pytest.raises(ModelLoadFailed, match=reason):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"skiplist_tasks": ["query"]}, "skiplist_tasks"),
        ({"keep_only_token_ids": [7]}, "keep_only_token_ids"),
    ],
)
def test_a_mask_that_is_not_of_documents_alone_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = tiny(tmp_path, "colbert-bert")
    rewrite(folder / "2_MultiVectorMask" / "config.json", **changes)
    with pytest.raises(ModelLoadFailed, match=reason):
        load(folder)


def test_models_yaml_cannot_make_a_colbert_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="it is a ColBERT"):
        load(GOLDEN / "colbert-stanford", pooling="mean", normalize=True)
    with pytest.raises(BadRequest, match="its output is multi_vector"):
        load(GOLDEN / "colbert-stanford").embed([[2, 9, 3]])
    folder = tiny(tmp_path, "qwen3")
    shutil.copytree(GOLDEN / "colbert-pylate" / "1_Dense", folder / "1_Dense")
    for name in ("modules.json", "config_sentence_transformers.json"):
        shutil.copy(GOLDEN / "colbert-pylate" / name, folder / name)
    with pytest.raises(ModelLoadFailed, match="ColBERT of `qwen3` is not supported"):
        load(folder)


def test_a_model_whose_documents_may_begin_as_its_queries_is_refused(tmp_path: Path) -> None:
    """A text such as "Q: …" would lose no punctuation, as if it were a query."""
    folder = tiny(tmp_path, "colbert-bert")
    prompts = {"document": "", "query": "q: "}
    rewrite(folder / "config_sentence_transformers.json", prompts=prompts)
    with pytest.raises(ModelLoadFailed, match=r"may begin as its queries do \('q: '\)"):
        load(folder)


@pytest.mark.anyio
async def test_a_query_is_cut_by_its_own_tokens_not_by_a_documents(tmp_path: Path) -> None:
    """The prompts of the two differ in length here."""
    folder = tiny(tmp_path, "colbert-bert")
    prompts = {"document": "the text of a document: ", "query": "q: "}
    rewrite(folder / "config_sentence_transformers.json", prompts=prompts)
    async with batching(load(folder)) as batcher:
        for words, is_cut in ((5, False), (6, False), (30, True)):
            job = embed_job("the " * words, truncate=True)
            job = replace(job, prompt_name="query", outputs=("multi_vector",))
            assert (await batcher.embed(job)).truncated == is_cut
            if is_cut:
                with pytest.raises(ContextLengthExceeded, match="length is 12 tokens"):
                    await batcher.embed(replace(job, truncate=False))
