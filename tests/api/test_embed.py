"""TEI's /embed and /info over a socket, with a scripted engine: the bytes that its clients send."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from httpx2 import AsyncClient

from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio


def lengths(vectors: Any) -> Any:
    return np.linalg.norm(np.array(vectors), axis=1)


@pytest.mark.parametrize("path", ["/embed", "/v1/embed"])
@pytest.mark.parametrize(
    "body",
    [
        {"inputs": ["bb", "a"], "truncate": True},  # llama-index's TextEmbeddingsInference
        {"inputs": ["bb", "a"]},  # chromadb's HuggingFaceEmbeddingServer
        {
            "inputs": ["bb", "a"],
            "normalize": True,
            "truncate": True,
            "truncation_direction": "right",
        },  # huggingface_hub's feature_extraction
        {"inputs": ["bb", "a"], "prompt_name": None, "model": "embed", "dimensions": None},
    ],
)
async def test_texts_become_a_bare_array_of_vectors(
    client: AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    vectors = answer.json()
    assert lengths(vectors) == pytest.approx([1, 1])
    asked = {"model": "embed", "input": ["bb", "a"]}
    right = [
        each["embedding"]
        for each in (await client.post("/v1/embeddings", json=asked)).json()["data"]
    ]
    right /= np.linalg.norm(np.array(right), axis=1, keepdims=True)
    assert np.array(vectors) == pytest.approx(right)


async def test_one_text_is_an_array_of_one(client: AsyncClient) -> None:
    answer = await client.post("/embed", json={"inputs": "abc", "prompt_name": "query"})
    vectors = answer.json()
    assert len(vectors) == 1
    assert vectors[0][1] / vectors[0][0] == pytest.approx(ord("?") / 4)


async def test_what_is_wrong_is_told_as_tei_tells_it(client: AsyncClient) -> None:
    for body, status, kind, told in (
        ({}, 422, "Validation", "inputs"),
        ({"inputs": []}, 400, "Empty", "inputs"),
        ({"inputs": ["a"], "normalize": False}, 422, "Validation", "/v1/embeddings"),
        ({"inputs": ["a"], "truncation_direction": "left"}, 422, "Validation", "at their end"),
        ({"inputs": "a" * 200, "truncate": False}, 422, "Validation", "maximum context length"),
        ({"inputs": ["a"], "model": "nobody"}, 422, "Validation", "nobody"),
        ({"inputs": ["a"], "model": "writer"}, 424, "Backend", "chat model"),
    ):
        answer = await client.post("/embed", json=body)
        assert answer.status_code == status, (body, answer.text)
        told_error = answer.json()
        assert told_error["error_type"] == kind
        assert told in told_error["error"]


@pytest.mark.usefixtures("engines")  # a gateway of its own
async def test_info_is_of_the_model_that_would_answer(client: AsyncClient) -> None:
    first = (await client.get("/info")).json()
    assert (first["model_id"], first["max_input_length"]) == ("any-size", None)
    assert first["model_type"] == {"embedding": {"pooling": None}}
    await client.post("/embed", json={"inputs": "a", "model": "shortenable"})
    loaded = (await client.get("/info")).json()
    assert loaded["model_id"] == "shortenable"
    assert loaded["max_input_length"] == 100
    assert loaded["auto_truncate"] is True
    assert (await client.post("/embed", json={"inputs": "a"})).status_code == 200


async def test_without_an_embedding_model_there_is_none_to_tell_of(
    tmp_path: Path, engines: ScriptedEngines
) -> None:
    models = catalog(tmp_path, {"writer": {"kind": "chat", "source": "path:.", "preload": False}})
    async with served(models, engines) as client:
        assert (await client.get("/info")).status_code == 400
        answer = await client.post("/embed", json={"inputs": "a"})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
