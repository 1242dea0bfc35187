"""The golden outputs of FlagEmbedding's formulas, through HTTP and the batcher."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.cpu_engines import cpu_engines
from tests.engine.embedding.harness import GOLDEN, TEXTS
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
FOLDER = GOLDEN / "bge-m3"
FEW = TEXTS[:10] + TEXTS[28:31]  # as in make_outputs_golden.py
ASKED = [index for index, text in enumerate(FEW) if text]  # nobody may send an empty one
SPEC = {"kind": "embedding", "source": f"path:{FOLDER}", "overflow": "truncate", "preload": True}


async def ask(client: httpx2.AsyncClient, path: str = "/v1/embeddings", **body: Any) -> Any:
    answer = await client.post(path, json={"model": "m3", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_outputs_through_http_are_those_of_flag_embedding(tmp_path: Path) -> None:
    dense = np.load(FOLDER / "vectors.npy")
    sparse = json.loads((FOLDER / "sparse.json").read_text())
    tokens = np.load(FOLDER / "tokens.npz")
    texts = [FEW[index] for index in ASKED]
    names = ["dense", "sparse", "multi_vector"]
    async with served(catalog(tmp_path, {"m3": SPEC}), cpu_engines()) as client:
        answers = [ask(client, input=texts, output=names, encoding_format="base64")]
        answers += [ask(client, input=texts, output=name) for name in names]
        answers += [ask(client, "/embed_sparse", inputs=texts)]
        answers += [ask(client, "/pooling", input=texts, task="token_embed")]
        together, *alone, weights, pooled = await asyncio.gather(*answers)
        ranked = await ask(client, "/v1/rerank", query=texts[0], documents=texts)
    for place, index in enumerate(ASKED):
        entry, matrix = together["data"][place], tokens[sorted(tokens)[index]]
        vector = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
        assert np.abs(vector - dense[index]).max() <= 1e-5
        assert entry["multi_vector_shape"] == [*matrix.shape]
        numbers = np.frombuffer(base64.b64decode(entry["multi_vector"]), "<f4")
        assert np.abs(numbers.reshape(matrix.shape) - matrix).max() <= 1e-5
        for found in (entry["sparse"], alone[1]["data"][place]["sparse"]):
            assert found["indices"] == sparse[index][0]
            assert found["values"] == pytest.approx(sparse[index][1], abs=1e-5)
        assert [each["index"] for each in weights[place]] == sparse[index][0]
        assert np.abs(np.array(alone[0]["data"][place]["dense"]) - dense[index]).max() <= 1e-5
        for vectors in (alone[2]["data"][place]["multi_vector"], pooled["data"][place]["data"]):
            assert np.abs(np.array(vectors) - matrix).max() <= 1e-5
    assert ranked["results"][0]["index"] == 0


async def test_a_splade_model_gives_its_weights_and_refuses_dense_vectors(tmp_path: Path) -> None:
    folder = GOLDEN / "splade-bert"
    sparse = json.loads((folder / "sparse.json").read_text())
    texts = [FEW[index] for index in ASKED]
    spec = {**SPEC, "source": f"path:{folder}"}
    async with served(catalog(tmp_path, {"m3": spec}), cpu_engines(), warm_up=True) as client:
        found = await ask(client, "/embed_sparse", inputs=texts)
        plain = await client.post("/v1/embeddings", json={"model": "m3", "input": texts})
    assert plain.status_code == 400
    assert "it has `sparse`" in plain.json()["error"]["message"]
    for index, weights in zip(ASKED, found, strict=True):
        assert [each["index"] for each in weights] == sparse[index][0]
        values = [each["value"] for each in weights]
        assert values == pytest.approx(sparse[index][1], abs=1e-5)


@pytest.mark.parametrize("name", ["colbert-bert", "colbert-pylate", "colbert-stanford"])
async def test_colbert_ranks_by_max_sim_of_its_golden_vectors(tmp_path: Path, name: str) -> None:
    folder = GOLDEN / name
    documents, queries = (np.load(folder / f"{role}.npz") for role in ("documents", "queries"))
    keys, texts = sorted(documents), [FEW[index] for index in ASKED]
    spec = {**SPEC, "source": f"path:{folder}"}
    async with served(catalog(tmp_path, {"m3": spec}), cpu_engines(), warm_up=True) as client:
        body = {"query": texts[0], "documents": texts}
        raw = (await ask(client, "/v1/rerank", **body, raw_scores=True))["results"]
        scaled = (await ask(client, "/v1/rerank", **body))["results"]
        asked = await ask(
            client, input=texts, output="multi_vector", prompt_name="query", truncate=True
        )
        pooled = await ask(client, "/pooling", input=texts, truncate=True)
    query = queries[keys[ASKED[0]]]
    sums = [(query @ documents[keys[index]].T).max(axis=1).sum() for index in ASKED]
    for result in raw:
        assert result["relevance_score"] == pytest.approx(sums[result["index"]], abs=1e-4)
    for result in scaled:
        mean = sums[result["index"]] / len(query)
        assert result["relevance_score"] == pytest.approx((1 + mean) / 2, abs=1e-5)
    for index, entry, document in zip(ASKED, asked["data"], pooled["data"], strict=True):
        assert np.abs(np.array(entry["multi_vector"]) - queries[keys[index]]).max() <= 1e-5
        assert np.abs(np.array(document["data"]) - documents[keys[index]]).max() <= 1e-5
