"""Errors of the floors below name a part of the job; each endpoint knows which field that was."""

from typing import Any

import pytest

from gateway.errors import BadRequest, ContextLengthExceeded, Overloaded, Part
from gateway.wire.chat import ChatRequest
from gateway.wire.completions import CompletionRequest
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.responses import ResponsesRequest
from gateway.wire.validation import Request

FUNCTION: dict[str, Any] = {"name": "f"}
FORM: dict[str, Any] = {"type": "json_object"}


def chat(**fields: Any) -> Request:
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


def completion(**fields: Any) -> Request:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hi", **fields})


def embeddings(**fields: Any) -> Request:
    return EmbeddingsRequest.model_validate({"model": "m", "input": "hi", **fields})


def response(**fields: Any) -> Request:
    return ResponsesRequest.model_validate({"model": "m", "input": "hi", **fields})


CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"type": "function", **FUNCTION}]


@pytest.mark.parametrize(
    ("request_", "part", "param"),
    [
        (chat(), "prompt", "messages"),
        (chat(), "template_args", "chat_template_kwargs"),
        (chat(), "min_tokens", "min_tokens"),
        (chat(), "tools", "tools"),
        (chat(response_format=FORM), "answer_form", "response_format"),
        (chat(structured_outputs={"regex": "a"}), "answer_form", "structured_outputs"),
        (chat(guided_regex="a"), "answer_form", "guided_regex"),
        (chat(tools=CHAT_TOOLS), "answer_form", "tools"),
        (chat(functions=[FUNCTION]), "answer_form", "tools"),
        (chat(tools=CHAT_TOOLS, response_format=FORM), "answer_form", "response_format"),
        (completion(), "prompt", "prompt"),
        (completion(guided_regex="a"), "answer_form", "guided_regex"),
        (embeddings(), "prompt", "input"),
        (embeddings(), "prompt_name", "prompt_name"),
        (response(), "prompt", "input"),
        (response(), "template_args", "chat_template_kwargs"),
        (response(text={"format": FORM}), "answer_form", "text.format.schema"),
        (response(tools=TOOLS), "answer_form", "tools"),
        (response(tools=TOOLS, text={"format": FORM}), "answer_form", "text.format.schema"),
    ],
)
def test_a_part_of_the_job_is_the_field_it_came_from(
    request_: Request, part: Part, param: str
) -> None:
    assert request_.locate(BadRequest("no", part=part)).body()["error"]["param"] == param


def test_one_error_may_be_about_fields_of_several_requests() -> None:
    """A refused grammar is remembered, and every asker has a copy of its own."""
    error = BadRequest("no such thing", part="answer_form", code="invalid_grammar")
    asked = (chat(response_format=FORM), response(text={"format": FORM}))
    assert [each.locate(error).param for each in asked] == ["response_format", "text.format.schema"]
    assert error.param is None
    assert {each.locate(error).code for each in asked} == {"invalid_grammar"}


def test_a_form_of_a_response_is_refused_with_a_code() -> None:
    error = BadRequest("no", part="answer_form")
    assert response(text={"format": FORM}).locate(error).code == "invalid_json_schema"
    assert response(tools=TOOLS).locate(error).code is None
    assert chat(response_format=FORM).locate(error).code is None


def test_all_else_of_an_error_stays() -> None:
    long = ContextLengthExceeded(10, 12)
    located = chat().locate(long)
    assert isinstance(located, ContextLengthExceeded)
    assert (located.message, located.code, located.tokens) == (long.message, long.code, 12)
    full = Overloaded("full", retry_after_s=3)
    assert chat().locate(full) is full
