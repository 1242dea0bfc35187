"""Cohere's /v2/embed and /v1/embed over a socket, with a scripted engine."""

import base64
import struct
from typing import Any

import numpy as np
import pytest
from httpx2 import AsyncClient, Response

from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
PATHS = ["/v2/embed", "/v1/v2/embed", "/v1/embed", "/embed"]


async def post(client: AsyncClient, path: str = "/v2/embed", **body: Any) -> Response:
    return await client.post(path, json={"model": "any-size", **body})


async def floats(client: AsyncClient, path: str = "/v2/embed", **body: Any) -> Any:
    answer = await post(client, path, embedding_types=["float"], **body)
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["embeddings"]["float"])


def unit(*numbers: float) -> Any:
    return pytest.approx(np.array(numbers) / np.linalg.norm(numbers))


@pytest.mark.parametrize("path", PATHS)
async def test_texts_become_vectors_by_type(client: AsyncClient, path: str) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    texts = ["bb", "a"]
    answer = await post(client, path, texts=texts, embedding_types=types, truncate="END")
    assert answer.status_code == 200, answer.text
    assert "x-gateway-ignored" not in answer.headers
    body = answer.json()
    assert body.pop("id").startswith("embd-")
    vectors = body.pop("embeddings")
    assert body == {
        "texts": texts,
        "response_type": "embeddings_by_type",
        "meta": {
            "api_version": {"version": "2" if "v2" in path else "1"},
            "billed_units": {"input_tokens": 3},
        },
    }
    assert list(vectors) == types
    assert vectors["float"][0] == unit(2, ord("b"), 0, 1)
    assert vectors["float"][1] == unit(1, ord("a"), 0, 1)
    assert vectors["int8"] == [[round(127 * each) for each in row] for row in vectors["float"]]
    assert vectors["uint8"] == [[each + 128 for each in row] for row in vectors["int8"]]
    assert vectors["ubinary"] == [[0b11010000], [0b11010000]]
    assert vectors["binary"] == [[0b11010000 - 128], [0b11010000 - 128]]
    decoded = [struct.unpack("<4f", base64.b64decode(each)) for each in vectors["base64"]]
    assert np.array(decoded) == pytest.approx(np.array(vectors["float"]))


@pytest.mark.parametrize("path", ["/v1/embed", "/embed"])
async def test_version_1_without_types_answers_with_lists(client: AsyncClient, path: str) -> None:
    body = (await post(client, path, texts=["a"])).json()
    assert body["response_type"] == "embeddings_floats"
    assert body["embeddings"][0] == unit(1, ord("a"), 0, 1)


async def test_version_2_without_types_answers_with_floats(client: AsyncClient) -> None:
    body = (await post(client, texts=["a"])).json()
    assert list(body["embeddings"]) == ["float"]


async def test_a_text_in_parts_is_one_text(client: AsyncClient) -> None:
    content = [{"type": "text", "text": text} for text in ("ab", "c")]
    inputs = [{"content": content}, {"content": content[:1]}]
    body = (await post(client, inputs=inputs)).json()
    assert body["texts"] == ["ab\nc", "ab"]
    assert body["embeddings"]["float"][0] == unit(4, ord("a"), 0, 1)


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
async def test_an_input_type_is_the_models_prompt_of_that_use(
    client: AsyncClient, engines: ScriptedEngines, path: str
) -> None:
    engines.embedder.prompts = {"query": "?", "passage": ">>", "separation": "#", "odd": "!!!"}
    engines.embedder.default_prompt_name = "odd"
    for input_type, prompt in (
        ("search_query", "?"),
        ("search_document", ">>"),
        ("clustering", "#"),
        ("classification", ""),  # the model has no prompt for it
        (None, "!!!"),
    ):
        (vector,) = await floats(client, path, texts=["a"], input_type=input_type)
        text = f"{prompt}a"
        assert vector == unit(len(text), ord(text[0]), 0, 1), input_type


async def test_an_input_type_counts_more_than_an_aliases_prompt(client: AsyncClient) -> None:
    (by_alias,) = await floats(client, model="embed-query", texts=["a"])
    assert by_alias == unit(2, ord("?"), 0, 1)
    (document,) = await floats(
        client, model="embed-query", texts=["a"], input_type="search_document"
    )
    assert document == unit(1, ord("a"), 0, 1)


async def test_texts_are_cut_at_the_lower_of_two_limits(client: AsyncClient) -> None:
    answer = await post(client, texts=["abcd", "ab"], max_tokens=3)
    assert answer.headers["x-gateway-truncated"] == "1"
    assert answer.json()["embeddings"]["float"][0] == unit(3, ord("a"), 0, 1)
    # The short form isn't kept as the text's vector, nor the other way round.
    assert (await floats(client, texts=["abcd"]))[0] == unit(4, ord("a"), 0, 1)
    assert (await floats(client, texts=["abcd"], max_tokens=2))[0] == unit(2, ord("a"), 0, 1)
    assert (await floats(client, texts=["abcd"], max_tokens=900))[0] == unit(4, ord("a"), 0, 1)
    long = await post(client, texts=["a" * 101])
    assert long.headers["x-gateway-truncated"] == "1"


async def test_a_shorter_vector_has_length_one(client: AsyncClient) -> None:
    (vector,) = await floats(client, texts=["a"], output_dimension=2)
    assert vector == unit(1, ord("a"))


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"texts": ["a" * 101], "truncate": "NONE"}, 400, "maximum context length is 100"),
        ({"texts": ["abc"], "truncate": "NONE", "max_tokens": 2}, 400, "has 3 tokens"),
        ({"texts": ["a"], "truncate": "START"}, 400, "'NONE' or 'END'"),
        ({"texts": ["a"], "images": ["data:image/png;base64,AA"]}, 400, "'images'"),
        ({"texts": ["a"], "input_type": "image"}, 400, "input_type"),
        ({"texts": ["a"], "output_dimension": 9}, 400, "at most 4"),
        ({"texts": ["a"], "model": "nobody"}, 404, "nobody"),
        ({"texts": ["a"], "model": "writer"}, 400, "chat model"),
        ({"texts": ["a!"]}, 500, "any-size"),
    ],
)
async def test_an_error_has_coheres_message(
    client: AsyncClient,
    engines: ScriptedEngines,
    path: str,
    fields: dict[str, Any],
    status: int,
    told: str,
) -> None:
    engines.embedder.poison = "!"
    answer = await post(client, path, **fields)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert told in body["message"]
    assert body["error"]["message"] == body["message"]


async def test_what_is_neither_texts_nor_inputs_is_missing(client: AsyncClient) -> None:
    both: dict[str, Any] = {
        "texts": ["a"],
        "inputs": [{"content": [{"type": "text", "text": "a"}]}],
    }
    for body in ({}, both):
        answer = await post(client, **body)
        assert answer.status_code == 400
        assert answer.json()["message"] == "Send either 'texts' or 'inputs'."


async def test_an_image_in_an_input_is_refused_by_its_place(client: AsyncClient) -> None:
    text = {"type": "text", "text": "a"}
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    answer = await post(client, inputs=[{"content": [text, image]}])
    assert answer.status_code == 400
    assert "inputs[0].content[1].type" in answer.json()["message"]
    assert "it should be 'text'" in answer.json()["message"]


async def test_version_1_with_images_alone_is_refused_by_their_name(client: AsyncClient) -> None:
    answer = await post(client, "/v1/embed", images=["data:"])
    assert answer.status_code == 422
    assert "'images'. Images are not embedded" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v2/embed", "/v1/v2/embed"])
async def test_an_error_before_the_body_is_read_has_coheres_message(
    models: Catalog, engines: ScriptedEngines, path: str
) -> None:
    async with served(models, engines, api_keys="right") as client:
        headers = {"authorization": "Bearer wrong"}
        answer = await client.post(path, json={"texts": ["a"]}, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["message"] == answer.json()["error"]["message"]


async def test_version_1_with_inputs_is_teis(client: AsyncClient) -> None:
    answer = await post(client, "/v1/embed", inputs=["a"], texts=["a"])
    assert isinstance(answer.json(), list)


async def test_a_limit_that_leaves_nothing_of_a_text_is_refused(client: AsyncClient) -> None:
    """All texts had the same vector, since only the prompt was left of them."""
    for path in PATHS:
        asked = {"texts": ["ab", "cd"], "input_type": "search_query"}
        refused = await post(client, path, max_tokens=1, **asked)
        assert refused.status_code == 400
        message = refused.json()["message"]
        assert message.startswith("'max_tokens' is 1, which leaves only"), message
        assert message.endswith("input 0: it should be at least 2."), message
        assert (await post(client, path, max_tokens=2, **asked)).status_code == 200
