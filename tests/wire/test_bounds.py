"""Bounds: what a request may hold, exactly."""

from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest
from gateway.wire import chat, completions, responses
from gateway.wire.bounds import INNER_DEPTH, Bounds, TooDeep, parse
from gateway.wire.messages import Message, to_template
from gateway.wire.validation import Request, read_request

BOUNDS = Bounds(max_depth=10, max_messages=3, max_schema_bytes=64, max_regex_chars=8)
LARGE = {"type": "object", "description": "x" * 64}
USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hi"}


def refused(body: dict[str, Any], shape: type[Request]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_request(orjson.dumps(body), shape, strict=False, bounds=BOUNDS)
    return caught.value


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("most", [1, 64, 200])
def test_depth_is_counted_exactly(opening: bytes, closing: bytes, most: int) -> None:
    """At the bound it is read; one level deeper it is not."""
    middle = b"[]" if opening == b"[" else b"{}"
    outer = most - 1
    assert parse(opening * outer + middle + closing * outer, most) is not None
    with pytest.raises(TooDeep):
        parse(opening * most + middle + closing * most, most)


def test_much_that_is_shallow_is_not_deep() -> None:
    """Brackets are counted only to know whether to look."""
    assert len(parse(orjson.dumps([[]] * 5000), 2)) == 5000
    assert parse(orjson.dumps("[" * 5000), 2) == "[" * 5000


def test_what_opens_too_much_is_refused_before_it_is_parsed() -> None:
    """As text, though it isn't JSON at all; what is below the bound is read."""
    with pytest.raises(ValueError, match="more than 1000000 arrays"):
        parse(b"[]," * 1_000_001)
    with pytest.raises(ValueError, match="more than 200000 arrays"):
        parse(b"[" + b"{}," * 900_000 + b"{}]")
    assert len(parse(b"[" + b"{}," * 199_000 + b"{}]")) == 199_001


def test_a_million_levels_are_refused_at_once() -> None:
    """By orjson itself, which looks no deeper than 1024."""
    with pytest.raises(ValueError, match="depth"):
        parse(b"[" * 999_999)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": [USER] * 4}, "messages"),
        ({"guided_json": LARGE}, "guided_json"),
        ({"guided_json": orjson.dumps(LARGE).decode()}, "guided_json"),
        ({"guided_choice": ["x" * 40, "y" * 40]}, "guided_choice"),
        ({"guided_grammar": "x" * 65}, "guided_grammar"),
        ({"guided_grammar": "é" * 33}, "guided_grammar"),
        ({"guided_regex": "x" * 9}, "guided_regex"),
        ({"structured_outputs": {"json": LARGE}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "x" * 9}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x" * 65}}, "structured_outputs.grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}},
            "response_format.json_schema.schema",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": LARGE}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_is_beyond_a_bound_of_chat_is_named(extra: dict[str, Any], param: str) -> None:
    """By its place, before anything is made of it."""
    assert refused({**CHAT, **extra}, chat.ChatRequest).param == param


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": [USER] * 4}, "input"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": LARGE}}},
            "text.format.schema",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": LARGE}]},
            "tools[0].parameters",
        ),
    ],
)
def test_what_is_beyond_a_bound_of_responses_is_named(extra: dict[str, Any], param: str) -> None:
    """As in chat."""
    error = refused({**RESPONSE, **extra}, responses.ResponsesRequest)
    assert error.param == param


def test_codes_are_openais() -> None:
    """Of what is too long."""
    many = refused({**CHAT, "messages": [USER] * 4}, chat.ChatRequest)
    assert many.code == "array_above_max_length"
    assert "at most 3 items, and has 4" in many.message
    body = {"model": "m", "prompt": "a", "guided_regex": "x" * 9}
    long = refused(body, completions.CompletionRequest)
    assert long.code == "string_above_max_length"


def test_what_is_at_the_bounds_is_read() -> None:
    """A bound is the most there may be."""
    schema = {"type": "object", "description": "x" * (64 - 34)}
    assert len(orjson.dumps(schema)) <= 64
    body = {**CHAT, "messages": [USER] * 3, "guided_json": schema}
    read_request(orjson.dumps(body), chat.ChatRequest, strict=False, bounds=BOUNDS)
    body = {**CHAT, "guided_regex": "x" * 8}
    read_request(orjson.dumps(body), chat.ChatRequest, strict=False, bounds=BOUNDS)


def test_json_inside_a_string_is_no_deeper_than_it_may_be() -> None:
    """It is written out again, where what is too deep could not be."""
    deep = "[" * (INNER_DEPTH + 1) + "]" * (INNER_DEPTH + 1)
    call = Message.model_validate(
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": deep}}],
        }
    )
    with pytest.raises(BadRequest):
        to_template([call])
