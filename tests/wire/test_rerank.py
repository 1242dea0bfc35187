"""Requests for scores: whose form a body has, and the JSON of each answer."""

from typing import Any

import numpy as np
import orjson
import pytest

from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    GatewayError,
    ModelLoading,
    ModelNotFound,
    Overloaded,
)
from gateway.jobs.rerank import Reranked, RerankJob
from gateway.wire.rerank import (
    Empty,
    RerankRequest,
    ScoreRequest,
    TextsError,
    TextsRequest,
    is_texts,
    to_job,
    write_ranked_texts,
    write_reranking,
)
from gateway.wire.validation import CharBounds, read_request
from tests.fakes import caller

BOUNDS = CharBounds(100, 200)


def job_of(shape: type[Any], **fields: Any) -> RerankJob:
    request = read_request(orjson.dumps(fields), shape, strict=False).request
    return to_job(request, caller(), max_tokens_per_doc=None, prompt_name=None, bounds=BOUNDS)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"query": "q", "texts": ["a"]}', True),
        (b'{"query": "q", "texts" : 7}', True),
        (b'{"query": "documents", "texts": []}', True),
        (rb'{"query": "\"documents\":", "texts": []}', True),
        (b'{"query": "q", "documents": ["a"], "texts": ["b"]}', False),
        (b'{"query": "texts", "documents": ["a"]}', False),
        (rb'{"query": "\"texts\":"}', False),
        (b'{"query": "texts"}', False),
        (b'{"query": "q", "texts": ["a"], "metadata": {"documents": 3}}', True),
        (b'{"query": "q", "texts": ["a"], "metadata": [{"documents": ["b"]}]}', True),
        (b'{"query": "q", "documents": null, "texts": ["a"]}', True),
        (b'{"query": "q", "metadata": {"texts": ["a"]}}', False),
        (b'{"query": "q", "texts": null}', False),
        (b'{"texts": ["a"]', False),
        (b"[]", False),
    ],
)
def test_a_body_with_texts_has_teis_form(body: bytes, expected: bool) -> None:
    assert is_texts(bytearray(body)) == expected


@pytest.mark.parametrize(
    ("documents", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([{"text": "a", "title": "t"}, "b"], ["a", "b"])],
)
def test_documents_are_texts_or_have_one(documents: Any, expected: list[str]) -> None:
    assert job_of(RerankRequest, query="q", documents=documents).documents == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": ["q"], "documents": ["a"]}, "query"),
        ({"documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ""}, "documents"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": ["a", {"text": ""}]}, "documents[1]"),
        ({"query": "q", "documents": ["a", {"title": "t"}]}, "documents[1].text"),
        ({"query": "q", "documents": ["a", {"text": 7}]}, "documents[1].text"),
        ({"query": "q", "documents": ["a", 7]}, "documents[1]"),
        ({"query": "q", "documents": {"text": "a"}}, "documents"),
        ({"query": "q", "documents": ["a"] * 2049}, "documents"),
        ({"query": "q", "documents": ["a" * 101]}, "documents"),
        ({"query": "q" * 101, "documents": ["a"]}, "query"),
        ({"query": "q", "documents": ["a" * 99] * 3}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "q", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"query": "q", "documents": ["a"], "return_documents": "yes"}, "return_documents"),
        ({"query": "q", "documents": ["a"], "raw_scores": 1}, "raw_scores"),
        ({"query": "q", "documents": ["a"], "model": ""}, "model"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        job_of(RerankRequest, **fields)
    assert error.value.param == param
    assert error.value.status == 400


@pytest.mark.parametrize(("limit", "expected"), [(None, None), (0, None), (7, 7)])
def test_a_limit_of_null_or_zero_is_the_models(limit: int | None, expected: int | None) -> None:
    job = job_of(RerankRequest, query="q", documents=["a"], max_tokens_per_doc=limit)
    assert job.max_tokens_per_doc == expected


@pytest.mark.parametrize(
    ("one", "two", "queries"),
    [("q", "a", 1), ("q", ["a", "b"], 1), (["q"], ["a", "b"], 1), (["q", "r"], ["a", "b"], 2)],
)
def test_one_text_is_scored_with_each_or_each_with_its_own(
    one: str | list[str], two: str | list[str], queries: int
) -> None:
    job = job_of(ScoreRequest, text_1=one, text_2=two)
    assert len(job.queries or [job.query]) == queries


@pytest.mark.parametrize(
    ("one", "two", "param"),
    [
        (["q", "r"], ["a", "b", "c"], "text_1"),
        (["q", ""], ["a", "b"], "text_1[1]"),
        ("q", [], "text_2"),
        ([], "q", "text_1"),
        ([""], "a", "text_1[0]"),
        ("q", ["a", ""], "text_2[1]"),
        ("q", [["a"]], "text_2[0]"),
        ("q", {"content": []}, "text_2"),
    ],
)
def test_texts_that_make_no_pairs_are_refused(one: Any, two: Any, param: str) -> None:
    with pytest.raises(BadRequest) as error:
        job_of(ScoreRequest, text_1=one, text_2=two)
    assert error.value.param == param


ANSWER = Reranked(np.array([0.5, 0.9, 0.5, 0.1]), 12, 0)


@pytest.mark.parametrize("top_n", [None, 0, 1, 3, 4, 99])
def test_the_best_come_first_and_equals_in_their_order(top_n: int | None) -> None:
    request = RerankRequest(query="q", documents=list("abcd"), top_n=top_n)
    answer = write_reranking(ANSWER, request, name="n", model="m")
    assert [each["index"] for each in answer["results"]] == [1, 0, 2, 3][: top_n or 4]
    assert all(each.keys() == {"index", "relevance_score"} for each in answer["results"])
    assert answer["meta"]["tokens"] == {"input_tokens": 12, "output_tokens": 0}


def test_documents_and_texts_are_returned_on_request() -> None:
    request = RerankRequest(query="q", documents=list("abcd"), top_n=1, return_documents=True)
    [best] = write_reranking(ANSWER, request, name="n", model="m")["results"]
    assert best == {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}}
    texts = TextsRequest(query="q", texts=list("abcd"), return_text=True)
    assert write_ranked_texts(ANSWER, texts)[0] == {"index": 1, "score": 0.9, "text": "b"}


@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (Empty("x"), 400, "Empty"),
        (BadRequest("x", code="array_below_min_length"), 400, "Empty"),
        (BadRequest("x"), 422, "Validation"),
        (ModelNotFound("x"), 422, "Validation"),
        (BadRequest("x", code="unsupported_model"), 424, "Backend"),
        (Overloaded("x", retry_after_s=3), 429, "Overloaded"),
        (ModelLoading("x"), 503, "Unhealthy"),
        (EngineFailed("m", "x"), 424, "Backend"),
        (DeadlineExceeded(3), 424, "Backend"),
    ],
)
def test_errors_in_teis_form(error: GatewayError, status: int, error_type: str) -> None:
    written = TextsError(error)
    assert written.status == status
    assert written.body() == {"error": error.message, "error_type": error_type}
    assert written.headers == error.headers
