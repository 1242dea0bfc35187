"""/v1/rerank, /v2/rerank and /v1/score over a socket, with scripted engines."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from httpx2 import AsyncClient, Response

from gateway import metrics
from gateway.registry import Catalog
from tests.api.harness import error_of, held
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
DOCUMENTS = ["xx", "abc", "a"]
LOGITS = [0.0, 3.0, 1.0]
COMMON: dict[str, Any] = {"model": "judge", "query": "abc"}


def sigmoid(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


async def post(client: AsyncClient, path: str = "/v1/rerank", **body: Any) -> Response:
    return await client.post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize(
    "fields",
    [
        {"documents": DOCUMENTS, "top_n": 3, "max_tokens_per_doc": 4096, "priority": 0},
        {"documents": DOCUMENTS, "top_n": 3, "max_tokens_per_doc": None},
        {"documents": [{"text": each} for each in DOCUMENTS], "rank_fields": ["text"]},
        {"documents": DOCUMENTS, "return_documents": False, "raw_scores": False},
        {"documents": DOCUMENTS, "top_n": 0, "use_activation": True, "user": "u"},
        {"documents": DOCUMENTS, "top_n": None},
        {"documents": DOCUMENTS},
    ],
    ids=["cohere", "langchain", "cohere-v1", "infinity", "vllm", "dify", "llama.cpp"],
)
async def test_the_bodies_of_all_clients_are_understood(
    client: AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    answer = await post(client, path, **COMMON, **fields)
    assert answer.status_code == 200, answer.text
    assert "x-gateway-ignored" not in answer.headers
    body = answer.json()
    assert body.pop("id").startswith("rerank-")
    assert body == {
        "object": "list",
        "model": "judge",
        "results": [
            {"index": index, "relevance_score": pytest.approx(sigmoid(LOGITS[index]))}
            for index in (1, 2, 0)
        ],
        "usage": {"prompt_tokens": 21, "total_tokens": 21},
        "meta": {
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": 21, "output_tokens": 0},
        },
    }


@pytest.mark.parametrize("fields", [{"raw_scores": True}, {"use_activation": False}])
async def test_raw_scores_are_the_models_own(client: AsyncClient, fields: dict[str, Any]) -> None:
    answer = await post(client, **COMMON, documents=DOCUMENTS, **fields)
    assert [each["relevance_score"] for each in answer.json()["results"]] == [3, 1, 0]


async def test_what_is_not_used_is_named(client: AsyncClient) -> None:
    fields: dict[str, Any] = {
        "score_threshold": 0.8,
        "truncate_prompt_tokens": 5,
        "instruction": "Be kind.",
    }
    documents = [{"text": "xx", "title": "t"}, "abc", {"text": "a", "id": 1, "url": None}]
    answer = await post(client, **COMMON, documents=documents, **fields)
    named = ["documents[0].title", "documents[2].id", *fields]
    assert sorted(answer.headers["x-gateway-ignored"].split(",")) == sorted(named)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"documents": ["a" * 99, "a" * 96, "a"]}, "2"),
        ({"max_tokens_per_doc": 1}, "2"),
        ({"model": "short-judge"}, "1"),
        ({"model": "short-judge", "max_tokens_per_doc": 3}, None),
    ],
)
async def test_documents_that_were_cut_are_counted(
    client: AsyncClient, fields: dict[str, Any], count: str | None
) -> None:
    answer = await post(client, **{**COMMON, "documents": DOCUMENTS, **fields})
    assert answer.headers.get("x-gateway-truncated") == count


COSINE = {"model": "any-size", "truncate": False}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"query": "x" * 101}, "query", "context_length_exceeded"),
        ({"documents": ["x" * 99], "truncate": False}, "documents", "context_length_exceeded"),
        ({**COSINE, "query": "x" * 101}, "query", "context_length_exceeded"),
        ({**COSINE, "documents": ["x" * 101], "max_tokens_per_doc": 200}, "documents",
         "context_length_exceeded"),
        ({"documents": ["a"] * 2049}, "documents", "array_above_max_length"),
        ({"query": ""}, "query", "invalid_value"),
        ({"return_documents": "yes"}, "return_documents", "invalid_type"),
        ({"model": "writer"}, "model", "unsupported_model"),
    ],
)  # fmt: skip
async def test_what_cannot_be_judged_is_refused_by_its_name(
    client: AsyncClient, fields: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(await post(client, **{**COMMON, "documents": ["a"], **fields}))
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_rerank_model_does_nothing_else(
    client: AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await post(client, path, model="judge", **body)
    assert answer.status_code == 400
    assert "`judge` is a rerank model" in answer.json()["error"]["message"]


async def test_an_embedding_model_scores_by_cosine(client: AsyncClient) -> None:
    fields: dict[str, Any] = {"query": "aa", "documents": ["bb", "???", "z"], "model": "any-size"}
    scaled = (await post(client, **fields)).json()["results"]
    raw = (await post(client, **fields, raw_scores=True)).json()["results"]
    assert [each["index"] for each in scaled] == [each["index"] for each in raw]
    assert scaled[0]["index"] == 1
    for one, other in zip(scaled, raw, strict=True):
        assert one["relevance_score"] == pytest.approx((1 + other["relevance_score"]) / 2)


@pytest.mark.parametrize("document", ["bad!", "odd?"])
async def test_a_failed_pair_is_a_500_that_names_the_model(
    client: AsyncClient, engines: ScriptedEngines, document: str
) -> None:
    engines.reranker.poison, engines.reranker.unsure = "!", "?"
    good, bad = await asyncio.gather(
        post(client, **COMMON, documents=DOCUMENTS),
        post(client, **COMMON, documents=["a", document]),
    )
    assert good.status_code == 200
    assert bad.status_code == 500
    assert bad.json()["error"]["code"] == "engine_failed"
    assert "org/judge" in bad.json()["error"]["message"]


class TestTexts:
    """A body with `texts` is TEI's, and so is the answer."""

    @pytest.mark.parametrize("others", [{}, {"documents": None}])
    async def test_the_answer_is_a_bare_array(
        self, client: AsyncClient, others: dict[str, Any]
    ) -> None:
        answer = await post(client, "/rerank", query="abc", texts=DOCUMENTS, **others)
        assert answer.json() == [
            {"index": index, "score": pytest.approx(sigmoid(LOGITS[index]))} for index in (1, 2, 0)
        ]

    async def test_raw_scores_and_texts_are_returned_on_request(self, client: AsyncClient) -> None:
        fields = {"raw_scores": True, "return_text": True, "truncate": True}
        direction = {"truncation_direction": "right"}
        answer = await post(client, "/rerank", query="abc", texts=["a"], **fields, **direction)
        assert answer.json() == [{"index": 0, "score": 1.0, "text": "a"}]

    @pytest.mark.parametrize(
        ("fields", "status", "error_type"),
        [
            ({"texts": ["a", ""]}, 400, "Empty"),
            ({"query": None}, 422, "Validation"),
            ({"texts": ["a"] * 2049}, 422, "Validation"),
            ({"texts": ["x" * 99], "truncate": False}, 422, "Validation"),
            ({"truncation_direction": "left"}, 422, "Validation"),
            ({"model": "nobody"}, 422, "Validation"),
            ({"model": "writer"}, 424, "Backend"),
            ({"texts": ["bad!"]}, 424, "Backend"),
        ],
    )
    async def test_errors_are_teis(
        self,
        client: AsyncClient,
        engines: ScriptedEngines,
        fields: dict[str, Any],
        status: int,
        error_type: str,
    ) -> None:
        engines.reranker.poison = "!"
        answer = await post(client, "/rerank", **{"query": "abc", "texts": ["a"], **fields})
        assert answer.status_code == status
        body = answer.json()
        assert set(body) == {"error", "error_type"}
        assert isinstance(body["error"], str)
        assert body["error_type"] == error_type

    async def test_a_full_queue_is_counted_as_everywhere(
        self, models: Catalog, engines: ScriptedEngines
    ) -> None:
        async with served(models, engines, queue_max_tokens=10) as client:
            ask = partial(post, client, "/rerank", query="a")
            await ask(texts=["a"])
            rejected = metrics.of(metrics.REJECTED, "org/judge")._value
            before = rejected.get()
            async with held(engines.reranker.gate, ask(texts=["a"] * 2)) as first:
                refused = await ask(texts=["a"] * 2)
            assert first.result().status_code == 200
        assert refused.status_code == 429
        assert refused.json()["error_type"] == "Overloaded"
        assert refused.headers["retry-after"]
        assert rejected.get() == before + 1


class TestWithoutModel:
    """The default is a loaded rerank model, else the first one, else the first embedding model."""

    @pytest.mark.usefixtures("engines")  # a gateway of its own
    async def test_the_default_is_the_first_rerank_model_unless_another_is_loaded(
        self, client: AsyncClient
    ) -> None:
        await post(client, query="a", documents=["a"], model="short-judge")
        assert (await post(client, query="a", documents=["a"])).json()["model"] == "short-judge"
        await post(client, query="a", documents=["a"], model="judge")
        assert (await post(client, query="a", documents=["a"])).json()["model"] == "org/judge"

    async def test_the_default_is_an_embedding_model_if_no_model_reranks(
        self, tmp_path: Path
    ) -> None:
        specs = {
            "writer": {"kind": "chat", "source": "path:."},
            "embed": {"kind": "embedding", "source": "path:."},
        }
        async with served(catalog(tmp_path, specs), ScriptedEngines()) as client:
            assert (await post(client, query="a", documents=["a"])).json()["model"] == "embed"

    async def test_without_a_model_that_can_rank_the_field_model_is_refused(
        self, tmp_path: Path
    ) -> None:
        specs = {"writer": {"kind": "chat", "source": "path:."}}
        async with served(catalog(tmp_path, specs), ScriptedEngines()) as client:
            answer = await post(client, query="a", documents=["a"])
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "model"


class TestScore:
    """The endpoint is vLLM's."""

    @pytest.mark.parametrize("path", ["/v1/score", "/score"])
    async def test_pairs_are_scored_in_their_order(self, client: AsyncClient, path: str) -> None:
        answer = await post(client, path, model="judge", text_1="abc", text_2=DOCUMENTS)
        body = answer.json()
        assert body.pop("id").startswith("score-")
        assert body.pop("created") > 1e9
        assert body == {
            "object": "list",
            "model": "judge",
            "data": [
                {"index": index, "object": "score", "score": pytest.approx(sigmoid(logit))}
                for index, logit in enumerate(LOGITS)
            ],
            "usage": {"prompt_tokens": 21, "total_tokens": 21},
        }

    async def test_as_many_texts_are_paired(self, client: AsyncClient) -> None:
        texts = {"text_1": ["ab", "x"], "text_2": ["ab", "ab"]}
        answer = await post(client, "/score", **texts, use_activation=False)
        assert [each["score"] for each in answer.json()["data"]] == [2, 0]

    async def test_errors_name_its_own_fields(self, client: AsyncClient) -> None:
        long = await post(client, "/score", text_1="x" * 101, text_2="a")
        assert long.json()["error"]["param"] == "text_1"
        cut = await post(client, "/score", text_1="x", text_2="a" * 101, truncate=False)
        assert cut.json()["error"]["param"] == "text_2"
        unequal = await post(client, "/score", text_1=["x", "y"], text_2=["a"])
        assert unequal.json()["error"]["param"] == "text_1"


@pytest.mark.parametrize(("flag", "is_told"), [("true", True), ("false", False), (True, True)])
async def test_a_flag_may_be_a_word(client: AsyncClient, flag: Any, is_told: bool) -> None:
    """RAGFlow sends it so."""
    answer = await post(client, query="hi", documents=["hi"], return_documents=flag)
    assert ("document" in answer.json()["results"][0]) is is_told
