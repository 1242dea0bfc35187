"""Sparse and multi-vector outputs over a socket, with a scripted engine of all three."""

import asyncio
import base64
from typing import Any

import numpy as np
import orjson
import pytest
from httpx2 import AsyncClient
from openai import AsyncOpenAI

from gateway.jobs.embed import Embedded, Output, SparseVector
from gateway.registry import Catalog
from gateway.wire.embeddings import (
    PIECE_FLOATS,
    EmbeddingsRequest,
    EmbedRequest,
    PoolingRequest,
    SparseRequest,
    count_bytes,
    write_outputs,
    write_pooled,
    write_sparse,
)
from tests.api.harness import error_of, held
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("engines")]  # a gateway of its own
ALL: tuple[Output, ...] = ("dense", "sparse", "multi_vector")
# The scripted vector of "ab", its weights, and its tokens' vectors: `a` is 97, and 1 modulo 4.
DENSE = [2.0, 97.0, 0.0, 1.0]
SPARSE = {"indices": [97, 98], "values": [0.33333334, 0.33333334]}
MATRIX = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]


@pytest.fixture
def engines() -> ScriptedEngines:
    engines = ScriptedEngines()
    engines.embedder.outputs, engines.embedder.token_dimensions = ALL, 4
    return engines


def only(engines: ScriptedEngines, *outputs: Output) -> None:
    engines.embedder.outputs = outputs


async def post(client: AsyncClient, path: str = "/v1/embeddings", **body: Any) -> Any:
    return await client.post(path, json={"model": "embed", "input": "ab", **body})


def numbers(data: str) -> Any:
    return np.frombuffer(base64.b64decode(data), "<f4")


@pytest.mark.parametrize(
    ("output", "fields"),
    [
        ("dense", {"embedding": DENSE, "dense": DENSE}),
        (["dense"], {"embedding": DENSE, "dense": DENSE}),
        ("sparse", {"embedding": [], "sparse": SPARSE}),
        ("multi_vector", {"embedding": [], "multi_vector": MATRIX}),
        (
            ["multi_vector", "dense", "sparse"],
            {"embedding": DENSE, "dense": DENSE, "sparse": SPARSE, "multi_vector": MATRIX},
        ),
        (["sparse", "sparse"], {"embedding": [], "sparse": SPARSE}),
        (None, {"embedding": DENSE}),
    ],
)
async def test_an_entry_has_a_field_for_each_output(
    client: AsyncClient, output: Any, fields: dict[str, Any]
) -> None:
    answer = (await post(client, output=output)).json()
    assert answer.pop("id").startswith("embd-")
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, **fields}],
        "model": "embed",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


async def test_many_texts_are_answered_in_their_order(client: AsyncClient) -> None:
    texts = ["ccc", "a", "bb"]
    data = (await post(client, input=texts, output=[*ALL])).json()["data"]
    assert [each["index"] for each in data] == [0, 1, 2]
    assert [each["dense"][0] for each in data] == [3, 1, 2]
    assert [each["sparse"]["indices"] for each in data] == [[99], [97], [98]]
    assert [len(each["multi_vector"]) for each in data] == [3, 1, 2]


async def test_base64_has_the_shape_of_a_matrix_beside_it(client: AsyncClient) -> None:
    answer = await post(client, output=[*ALL], encoding_format="base64")
    [entry] = answer.json()["data"]
    assert entry["embedding"] == entry["dense"]
    assert numbers(entry["dense"]).tolist() == DENSE
    assert entry["sparse"] == SPARSE
    assert entry["multi_vector_shape"] == [2, 4]
    assert numbers(entry["multi_vector"]).reshape(2, 4).tolist() == MATRIX


@pytest.mark.parametrize("output", [None, "dense", "sparse", "multi_vector"])
async def test_openais_client_reads_an_answer_without_a_dense_vector(
    client: AsyncClient, output: str | None
) -> None:
    """It asks for base64 by itself, and reads `embedding` of each entry."""
    openai = AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="-", max_retries=0)
    body = {} if output is None else {"output": output}
    async with openai:
        answer = await openai.embeddings.create(model="embed", input="ab", extra_body=body)
    assert answer.data[0].embedding == ([] if output in ("sparse", "multi_vector") else DENSE)


@pytest.mark.parametrize("outputs", [("sparse",), ("multi_vector",)])
async def test_who_reads_dense_vectors_is_told_what_a_model_has_instead(
    client: AsyncClient, engines: ScriptedEngines, outputs: tuple[Output, ...]
) -> None:
    """An empty vector, or one of another form, would end in an index unseen."""
    only(engines, *outputs)
    refusal = error_of(await post(client), 400)
    assert (refusal["param"], refusal["code"]) == ("output", "unsupported_model")
    assert refusal["message"] == (
        f"The model `org/embed` has no `dense` output; it has `{outputs[0]}`: ask for that with "
        "`output` at /v1/embeddings."
    )
    told = await client.post("/embed", json={"model": "embed", "inputs": "ab"})
    assert (told.status_code, told.json()["error_type"]) == (424, "Backend")
    assert told.json()["error"] == refusal["message"]
    assert (await post(client, output=outputs[0])).status_code == 200
    assert "dense" not in {output for each in engines.embedder.passes for output in each}


async def test_an_output_that_a_model_has_not_is_refused(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    only(engines, "dense")
    for body in ({"output": "sparse"}, {"output": ["dense", "sparse"]}):
        refusal = error_of(await post(client, **body), 400)
        assert "no `sparse` output; it has `dense`" in refusal["message"]
    told = await client.post("/embed_sparse", json={"model": "embed", "inputs": "ab"})
    assert (told.status_code, told.json()["error_type"]) == (424, "Backend")
    pooled = await post(client, "/pooling", task="token_embed")
    assert error_of(pooled, 400)["param"] == "task"


@pytest.mark.parametrize(
    "output",
    ["", "colbert", [], ["dense", 1], [["dense"]], {"dense": True}, True, 7, ["dense"] * 4, [None]],
)
async def test_an_output_that_is_none_is_refused(client: AsyncClient, output: Any) -> None:
    assert error_of(await post(client, output=output), 400)["param"].startswith("output")


async def test_dimensions_are_those_of_dense_vectors(client: AsyncClient) -> None:
    both = await post(client, model="any-size", output=[*ALL], dimensions=2)
    [entry] = both.json()["data"]
    assert [len(entry["dense"]), len(entry["multi_vector"][0])] == [2, 4]
    refusal = error_of(await post(client, model="any-size", output="sparse", dimensions=2), 400)
    assert (refusal["param"], refusal["message"]) == (
        "dimensions", "Only dense vectors have 'dimensions'.",
    )  # fmt: skip


@pytest.mark.parametrize("path", ["/embed_sparse", "/v1/embed_sparse"])
@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": ["ab", "c"], "truncate": True, "truncation_direction": "right"},
        {"inputs": ["ab", "c"], "prompt_name": None},
        {"inputs": ["ab", "c"], "model": "embed", "truncation_direction": "Right"},
    ],
)
async def test_teis_sparse_vectors_are_lists_of_weights(
    client: AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    answer = await client.post(path, json=fields)
    weight = 0.33333334
    assert answer.json() == [
        [{"index": 97, "value": weight}, {"index": 98, "value": weight}],
        [{"index": 99, "value": weight}],
    ]


@pytest.mark.parametrize(
    ("body", "status", "kind", "told"),
    [
        ({}, 422, "Validation", "inputs"),
        ({"inputs": []}, 400, "Empty", "inputs"),
        ({"inputs": "a", "truncation_direction": "left"}, 422, "Validation", "at their end"),
        ({"inputs": "a", "dimensions": 3}, 422, "Validation", "dimensions"),
        ({"inputs": "a" * 101}, 422, "Validation", "maximum context length"),
        ({"inputs": "a", "model": "nobody"}, 422, "Validation", "nobody"),
        ({"inputs": "a", "model": "writer"}, 424, "Backend", "chat model"),
        ({"inputs": [[5, 6]]}, 422, "Validation", "token ids"),
    ],
)
async def test_what_is_wrong_with_a_sparse_request_is_told_as_tei_tells_it(
    client: AsyncClient, body: dict[str, Any], status: int, kind: str, told: str
) -> None:
    answer = await client.post("/embed_sparse", json={"model": "embed", **body})
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text
    assert told in answer.json()["error"]


@pytest.mark.parametrize(
    ("task", "has_outputs", "data"),
    [
        ("embed", ALL, DENSE),
        ("token_embed", ALL, MATRIX),
        (None, ALL, DENSE),
        (None, ("multi_vector",), MATRIX),
        (None, ("sparse", "multi_vector"), MATRIX),
    ],
)
async def test_vllms_pooling_has_a_vector_or_those_of_the_tokens(
    client: AsyncClient, engines: ScriptedEngines, task: Any, has_outputs: Any, data: Any
) -> None:
    only(engines, *has_outputs)
    answer = (await post(client, "/pooling", task=task)).json()
    assert answer.pop("id").startswith("pool-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "list",
        "data": [{"index": 0, "object": "pooling", "data": data}],
        "model": "embed",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


async def test_poolings_base64_has_its_shape_beside_it(client: AsyncClient) -> None:
    for task, shape, right in (
        ("embed", None, DENSE),
        ("token_embed", [2, 4], [*MATRIX[0], *MATRIX[1]]),
    ):
        answer = await post(client, "/v1/pooling", task=task, encoding_format="base64")
        [entry] = answer.json()["data"]
        assert entry.get("data_shape") == shape
        assert numbers(entry["data"]).tolist() == right


async def test_a_model_of_sparse_vectors_pools_nothing(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    only(engines, "sparse")
    assert "it has `sparse`" in error_of(await post(client, "/pooling"), 400)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "token_classify"), ("task", "plugin"), ("messages", []), ("data", {}),
        ("dimensions", 2), ("normalize", True), ("use_activation", False),
        ("padding", "max_length"),
        ("add_special_tokens", False), ("truncate_prompt_tokens", 5), ("truncation_side", "left"),
        ("embed_dtype", "float16"), ("endianness", "big"), ("encoding_format", "bytes"),
    ],
)  # fmt: skip
async def test_what_pooling_does_not_do_is_refused_by_name(
    client: AsyncClient, field: str, value: Any
) -> None:
    assert error_of(await post(client, "/pooling", **{field: value}), 400)["param"] == field


async def test_poolings_usual_values_change_nothing(client: AsyncClient) -> None:
    answer = await post(
        client, "/pooling", model=None, user="u", priority=0, request_id="r", padding="do_not_pad",
        use_activation=True, add_special_tokens=True, truncation_side="right", endianness="native",
        embed_dtype="float32", encoding_format="float",
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert "x-gateway-ignored" not in answer.headers
    assert answer.json()["model"] == "any-size"


async def test_colbert_reranks_by_max_sim(client: AsyncClient, engines: ScriptedEngines) -> None:
    only(engines, "multi_vector")
    engines.embedder.prompts = {}
    body: dict[str, Any] = {"model": "embed", "query": "bc", "documents": ["x", "abc", "bb"]}
    raw = (await client.post("/v1/rerank", json={**body, "raw_scores": True})).json()["results"]
    assert [(each["index"], each["relevance_score"]) for each in raw] == [(1, 3), (2, 1), (0, 0)]
    scaled = (await client.post("/v1/rerank", json=body)).json()["results"]
    assert [each["relevance_score"] for each in scaled] == pytest.approx([1, 2 / 3, 1 / 2])
    pairs = {"model": "embed", "text_1": ["b", "c"], "text_2": ["b", "b"]}
    scores = (await client.post("/v1/score", json={**pairs, "use_activation": False})).json()
    assert [each["score"] for each in scores["data"]] == [1, 0]


async def test_who_leaves_before_a_pass_costs_none(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    gate = engines.embedder.gate
    async with held(gate, post(client)) as first:
        leaving = asyncio.create_task(post(client, input="x", output=["multi_vector"]))
        staying = asyncio.create_task(post(client, input="yy", output=["sparse"]))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        gate.open()
        await asyncio.gather(first, staying)
    assert {"multi_vector"} not in engines.embedder.passes


async def test_two_who_ask_at_once_have_each_their_own(client: AsyncClient) -> None:
    asked = [post(client, input=["ab"] * 9, output=[name]) for name in ALL * 3]
    for name, answer in zip(ALL * 3, await asyncio.gather(*asked), strict=True):
        others = {*ALL} - {name}
        assert all(name in each and not others & each.keys() for each in answer.json()["data"])


async def test_answers_have_bounds(models: Catalog, engines: ScriptedEngines) -> None:
    """They are known before the pass for vectors of tokens, and after it for weights."""
    many = "".join(map(chr, range(97, 97 + 90)))
    async with served(models, engines, max_bodies_bytes=6400) as client:
        asked = await post(client, input=["x" * 60, "y" * 41], output="multi_vector")
        refusal = error_of(asked, 400)
        assert refusal["param"] == "input"
        assert refusal["message"] == (
            "The texts have 101 tokens together, and a vector of 4 numbers each. A request may "
            "have those of 100 tokens: send fewer texts at once."
        )
        documents = {"model": "embed", "query": "q", "documents": ["x" * 99] * 5}
        only(engines, "multi_vector")
        refusal = error_of(await client.post("/rerank", json=documents), 400)
        assert refusal["param"] == "documents"
        assert "those of 400 tokens" in refusal["message"]
        assert engines.embedder.passes == []
        only(engines, *ALL)
        refusal = error_of(await post(client, input=[many] * 2, output="sparse"), 400)
        assert refusal["param"] == "input"
        assert "may have 6400: send fewer texts" in refusal["message"]
        told = await client.post("/embed_sparse", json={"model": "embed", "inputs": [many] * 2})
        assert (told.status_code, told.json()["error_type"]) == (422, "Validation")
        for encoding, status in (("float", 400), ("base64", 200)):
            body: dict[str, Any] = {
                "input": ["x" * 99] * 2,
                "encoding_format": encoding,
                "output": "multi_vector",
            }
            assert (await post(client, **body)).status_code == status


def some(rows: int, tokens: int, width: int) -> Embedded:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, rows * (tokens + 1) * width, dtype=np.uint32).view(np.float32)
    usable = np.where(np.isfinite(bits), bits, -np.finfo(np.float32).tiny)
    arrays = usable.reshape(rows, tokens + 1, width)
    weights = np.full(tokens, np.finfo(np.float32).tiny, np.float32)
    sparse = [SparseVector(np.arange(999_000, 999_000 + tokens, dtype=np.int32), weights)] * rows
    return Embedded(arrays[:, 0], 5, 0, sparse=sparse, multi_vector=[*arrays[:, 1:]])


def counted(answer: Embedded, request: EmbedRequest) -> int:
    return count_bytes(answer, number_bytes=request.number_bytes, copies=request.copies)


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("outputs", [ALL, ("sparse",), ("multi_vector",), ("dense",)])
@pytest.mark.parametrize("shape", [(1, 700, 300), (300, 1, 8), (3, 1, 70_000)])
def test_an_answer_is_written_in_pieces_and_no_larger_than_counted(
    encoding: str, outputs: tuple[Output, ...], shape: tuple[int, int, int]
) -> None:
    whole = some(*shape)
    vectors = whole.vectors if "dense" in outputs else np.zeros((shape[0], 0), np.float32)
    answer = Embedded(
        vectors, 5, 0,
        sparse=whole.sparse if "sparse" in outputs else (),
        multi_vector=whole.multi_vector if "multi_vector" in outputs else (),
    )  # fmt: skip
    asked = {"model": "m", "input": "a", "output": [*outputs], "encoding_format": encoding}
    request = EmbeddingsRequest.model_validate(asked)
    pieces = list(write_outputs(answer, outputs, name="embd-1", model="[]", encoding=encoding))
    assert max(map(len, pieces)) < 20 * max(PIECE_FLOATS, shape[2])
    assert sum(map(len, pieces)) <= counted(answer, request) + 1000
    told = orjson.loads(b"".join(pieces))
    assert (told["model"], len(told["data"])) == ("[]", shape[0])
    last = told["data"][-1]
    if "multi_vector" in outputs:
        matrix = last["multi_vector"]
        if encoding == "base64":
            matrix = numbers(matrix).reshape(last["multi_vector_shape"])
        assert np.array_equal(np.array(matrix, np.float32), whole.multi_vector[-1])
    if "dense" in outputs:
        dense = numbers(last["dense"]) if encoding == "base64" else last["dense"]
        assert np.array_equal(np.array(dense, np.float32), whole.vectors[-1])
    if "sparse" in outputs:
        assert last["sparse"]["indices"] == whole.sparse[-1].ids.tolist()


def test_poolings_and_teis_answers_are_no_larger_than_counted() -> None:
    whole = some(50, 20, 30)
    sparse = Embedded(np.zeros((50, 0), np.float32), 5, 0, sparse=whole.sparse)
    assert len(b"".join(write_sparse(sparse))) <= counted(sparse, SparseRequest(inputs="a"))
    matrices = Embedded(np.zeros((50, 0), np.float32), 5, 0, multi_vector=whole.multi_vector)
    for encoding in ("float", "base64"):
        pieces = write_pooled(matrices, model="[]", encoding=encoding)
        body = b"".join(pieces)
        request = PoolingRequest.model_validate({"input": "a", "encoding_format": encoding})
        assert len(body) <= counted(matrices, request) + 1000
        assert len(orjson.loads(body)["data"]) == 50
