"""POST /v1/embeddings over a socket, with a scripted engine."""

import base64
import re
from typing import Any

import numpy as np
import orjson
import pytest
from httpx2 import AsyncClient, Response

from gateway.jobs.embed import Embedded
from gateway.wire.embeddings import NUMBER_BYTES, PIECE_FLOATS, write_pieces, write_vectors
from tests.api.harness import error_of
from tests.fakes import ScriptedEngines

pytestmark = pytest.mark.anyio


async def post(client: AsyncClient, **body: Any) -> Response:
    return await client.post("/v1/embeddings", json={"model": "org/embed", **body})


async def test_a_string_and_a_list_of_strings_are_answered(client: AsyncClient) -> None:
    one = (await post(client, input="abc")).json()
    assert one.pop("id").startswith("embd-")
    assert one == {
        "object": "list",
        "model": "org/embed",
        "data": [{"object": "embedding", "index": 0, "embedding": [3.0, 97.0, 0.0, 1.0]}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    many = (await post(client, input=["bb", "a", "cccc"])).json()
    assert [item["embedding"][0] for item in many["data"]] == [2, 1, 4]
    assert [item["index"] for item in many["data"]] == [0, 1, 2]


async def test_an_alias_answers_by_its_own_name_and_brings_its_prompt(client: AsyncClient) -> None:
    """The engine and the cache know only the id."""
    answer = (await post(client, model="embed-query", input="abc")).json()
    assert answer["model"] == "embed-query"
    assert answer["data"][0]["embedding"][:2] == [4.0, float(ord("?"))]


@pytest.mark.parametrize(
    ("model", "asked", "length"),
    [("org/embed", 4, 4), ("shortenable", 2, 2), ("any-size", 1, 1), ("shortenable", 4, 4)],
)
async def test_dimensions_shorten_where_the_model_was_trained_for_it(
    client: AsyncClient, model: str, asked: int, length: int
) -> None:
    answer = await post(client, model=model, input="abc", dimensions=asked)
    assert len(answer.json()["data"][0]["embedding"]) == length


@pytest.mark.parametrize(
    ("model", "asked", "fitting"),
    [
        ("org/embed", 2, "4"),
        ("org/embed", 1536, "4"),
        ("shortenable", 1, "2 or 3 or 4"),
        ("any-size", 9, "at most 4"),
    ],
)
async def test_dimensions_are_refused_elsewhere_with_those_to_send(
    client: AsyncClient, model: str, asked: int, fitting: str
) -> None:
    """Cut vectors of another model are plausible garbage."""
    answer = await post(client, model=model, input="abc", dimensions=asked)
    error = error_of(answer, 400)
    assert error["param"] == "dimensions"
    assert error["message"] == (
        f"Vectors of the model `{model}` have 4 dimensions, and cannot have {asked}: "
        f"send {fitting}, or leave the field out."
    )
    in_teis = await client.post("/embed", json={"model": model, "inputs": "a", "dimensions": asked})
    assert (in_teis.status_code, in_teis.json()["error"]) == (422, error["message"])


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_every_answer_has_an_id_of_its_own(client: AsyncClient, encoding: str) -> None:
    """Mistral's SDK refuses one without; TEI's form has no place for it."""
    body = {"input": "abc", "encoding_format": encoding}
    ids = {(await post(client, **body)).json()["id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("embd-[0-9a-f]{24}", each) for each in ids)
    assert isinstance((await client.post("/embed", json={"inputs": "abc"})).json()[0], list)


async def test_token_ids_are_served_where_the_model_says_so(client: AsyncClient) -> None:
    one = (await post(client, model="shortenable", input=[5, 6, 7])).json()
    assert one["data"][0]["embedding"][:2] == [3.0, 5.0]
    two = (await post(client, model="shortenable", input=[[5], [6, 7]])).json()
    assert [item["embedding"][0] for item in two["data"]] == [1.0, 2.0]


async def test_token_ids_are_refused_elsewhere_with_a_hint(client: AsyncClient) -> None:
    """LangChain sends another tokenizer's."""
    answer = await post(client, input=[[5, 6]])
    assert "check_embedding_ctx_length=False" in error_of(answer, 400)["message"]


async def test_over_long_input_is_refused_in_openais_words(client: AsyncClient) -> None:
    """litellm and langchain read the sentence."""
    answer = await post(client, input="x" * 101)
    told = error_of(answer)
    assert answer.status_code == 400
    assert told["code"] == "context_length_exceeded"
    assert told["message"].startswith("This model's maximum context length is 100 tokens.")


async def test_over_long_input_is_cut_when_asked_and_told(client: AsyncClient) -> None:
    """The request asks for it, or models.yaml does; the request wins."""
    cut = await post(client, input=["x" * 101, "y"], truncate=True)
    assert cut.headers["x-gateway-truncated"] == "1"
    assert cut.json()["usage"]["prompt_tokens"] == 101
    by_model = await post(client, model="shortenable", input="x" * 101)
    assert by_model.headers["x-gateway-truncated"] == "1"
    refused = await post(client, model="shortenable", input="x" * 101, truncate=False)
    assert refused.status_code == 400
    assert "x-gateway-truncated" not in (await post(client, input="x")).headers


@pytest.mark.parametrize(
    "given",
    [
        "", [], [""], ["a", ""], ["a", 1], [[]], [["a"]], [[1], []], [[1, -2]], [1.5], [None],
        {"a": 1}, 7, True, [True], ["a"] * 2049, [[1]] * 2049,
    ],
)  # fmt: skip
async def test_input_that_is_no_input_is_refused(client: AsyncClient, given: Any) -> None:
    answer = await post(client, input=given, model="shortenable")
    assert error_of(answer, 400)["param"] == "input"


async def test_a_failed_row_is_a_500_that_names_the_model(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    engines.embedder.poison = "!"
    answer = await post(client, input="bad!")
    assert "org/embed" in error_of(answer, 500)["message"]
    assert answer.headers["x-request-id"]
    assert (await post(client, input="good")).status_code == 200


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("rows", [1, 3, 2048])
def test_a_large_answer_is_written_in_pieces(encoding: str, rows: int) -> None:
    """None of which keeps everybody else waiting; together they are the answer."""
    vectors = (np.arange(rows * 1000).reshape(rows, 1000) / 7).astype(np.float32)
    answer = Embedded(vectors=vectors, prompt_tokens=5, truncated=0)
    pieces = list(write_pieces(answer, name="embd-1", model="m", encoding=encoding))
    assert max(map(len, pieces)) < 25 * PIECE_FLOATS
    told = orjson.loads(b"".join(pieces))
    assert told["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert (told["object"], told["model"], len(told["data"])) == ("list", "m", rows)
    assert told["id"] == "embd-1"
    assert [each["index"] for each in told["data"]] == list(range(rows))
    last = told["data"][-1]["embedding"]
    if encoding == "base64":
        last = np.frombuffer(base64.b64decode(last), dtype="<f4")
    assert np.array_equal(np.array(last, dtype=np.float32), vectors[-1])


@pytest.mark.parametrize("encoding", ["float", "base64", "TEI's"])
def test_no_answer_is_larger_than_what_is_counted_for_it(encoding: str) -> None:
    """The count holds for the longest numbers there are, and for small and large ones."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    longest = np.full(1000, -np.finfo(np.float32).tiny, np.float32)
    usable = bits[np.abs(bits) < 1e15]  # their squares have a sum; a NaN is not less
    vectors = np.concatenate([usable[:99_000], longest]).reshape(100, 1000)
    answer = Embedded(vectors=vectors, prompt_tokens=5, truncated=0)
    pieces = write_vectors(answer)
    if encoding != "TEI's":
        pieces = write_pieces(answer, name="embd-1", model="m", encoding=encoding)
    number_bytes = NUMBER_BYTES.get(encoding, NUMBER_BYTES["float"])
    assert sum(map(len, pieces)) <= vectors.size * number_bytes
