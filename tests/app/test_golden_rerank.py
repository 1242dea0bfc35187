"""The golden scores of sentence-transformers' CrossEncoder, through HTTP and the batcher."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
GOLDEN = Path(__file__).parents[1] / "golden"
PAIRS: list[tuple[str, str]] = json.loads((GOLDEN / "pairs.json").read_text("utf-8"))
QUERIES, DOCUMENTS = ([pair[side] for pair in PAIRS] for side in (0, 1))
ONE_LABEL = ["bert-reranker", "modernbert-cls-reranker", "modernbert-mean-reranker"]


async def scores(client: httpx2.AsyncClient, **body: Any) -> list[float]:
    answer = await client.post("/v1/score", json={"model": "judge", **body})
    assert answer.status_code == 200, answer.text
    return [each["score"] for each in answer.json()["data"]]


def models(folder: Path, name: str) -> Any:
    spec = {"kind": "rerank", "source": f"path:{GOLDEN / name}"}
    return catalog(folder, {"judge": spec})


@pytest.mark.parametrize("name", ONE_LABEL)
async def test_scores_through_http_are_those_of_sentence_transformers(
    tmp_path: Path, name: str
) -> None:
    expected = np.load(GOLDEN / name / "scores.npy")[:, 0]
    by_query = defaultdict(list)
    for index, query in enumerate(QUERIES):
        by_query[query].append(index)
    async with served(models(tmp_path, name), cpu_engines()) as client:
        together = await scores(client, text_1=QUERIES, text_2=DOCUMENTS, use_activation=False)
        singles = await asyncio.gather(
            *(scores(client, text_1=one, text_2=two, raw_scores=True) for one, two in PAIRS)
        )
        for query, places in by_query.items():
            documents = [DOCUMENTS[place] for place in places]
            body = {"query": query, "documents": documents}
            results = (await client.post("/v2/rerank", json=body)).json()["results"]
            probabilities = [1 / (1 + np.exp(-expected[places[each["index"]]])) for each in results]
            found = [each["relevance_score"] for each in results]
            assert found == pytest.approx(probabilities, abs=1e-5)
            assert found == sorted(found, reverse=True)
    assert np.abs(np.array(together) - expected).max() <= 1e-5
    assert np.abs(np.array(singles)[:, 0] - expected).max() <= 1e-5


async def test_the_last_of_three_labels_is_relevance(tmp_path: Path) -> None:
    logits = np.load(GOLDEN / "xlm-roberta-reranker" / "scores.npy").astype(np.float64)
    expected = np.exp(logits[:, -1]) / np.exp(logits).sum(axis=1)
    engines = cpu_engines()
    async with served(models(tmp_path, "xlm-roberta-reranker"), engines) as client:
        found = await scores(client, text_1=QUERIES, text_2=DOCUMENTS)
        long = await client.post("/rerank", json={"query": "hello", "documents": ["a b c" * 999]})
        too_long = await client.post("/rerank", json={"query": "a b" * 999, "documents": ["c"]})
    assert np.abs(np.array(found) - expected).max() <= 1e-5
    assert long.headers["x-gateway-truncated"] == "1"
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert too_long.json()["error"]["param"] == "query"
