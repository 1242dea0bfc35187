"""Bounds: the largest allowed requests, exactly."""

from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest
from gateway.wire import chat, completions, responses
from gateway.wire.bounds import Bounds, TooDeep, parse
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
    middle = b"[]" if opening == b"[" else b"{}"
    outer = most - 1
    assert parse(opening * outer + middle + closing * outer, most) is not None
    with pytest.raises(TooDeep):
        parse(opening * most + middle + closing * most, most)


def test_much_that_is_shallow_is_not_deep() -> None:
    assert len(parse(orjson.dumps([[]] * 5000), 2)) == 5000
    assert parse(orjson.dumps("[" * 5000), 2) == "[" * 5000


def test_a_body_of_too_many_brackets_is_refused_before_it_is_parsed() -> None:
    """Brackets count as text, though it isn't JSON at all; a body below the bound is read."""
    with pytest.raises(ValueError, match="more than 1000000 arrays"):
        parse(b"[]," * 1_000_001)
    with pytest.raises(ValueError, match="more than 200000 arrays"):
        parse(b"[" + b"{}," * 900_000 + b"{}]")
    assert len(parse(b"[" + b"{}," * 199_000 + b"{}]")) == 199_001


def test_names_are_counted_before_they_are_parsed() -> None:
    """Quotes inside a text are not counted: it may be of any length."""
    with pytest.raises(ValueError, match="more than 1500000 names and texts"):
        parse(b"{" + b'"a":1,' * 1_500_001 + b'"b":1}')
    with pytest.raises(ValueError, match="more than 1500000 names and texts"):
        parse(b"[" + b'"",' * 1_500_001 + b"1]")
    assert len(parse(b"[" + b'"",' * 1_499_999 + b"1]")) == 1_500_000
    assert len(parse(orjson.dumps('"' * 3_000_000))) == 3_000_000


def test_a_million_levels_are_refused_at_once() -> None:
    """orjson itself refuses them: it looks no deeper than 1024."""
    with pytest.raises(ValueError, match="depth"):
        parse(b"[" * 999_999)


FORM = {"type": "json_schema", "json_schema": {"schema": LARGE}}
FLAT = {"type": "json_schema", "name": "n", "schema": LARGE}
TOOL = {"function": {"name": "f", "parameters": LARGE}}


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
        ({"response_format": FORM}, "response_format.json_schema.schema"),
        ({"tools": [TOOL]}, "tools[0].function.parameters"),
        ({"input": [USER] * 4}, "input"),
        ({"text": {"format": FLAT}}, "text.format.schema"),
        ({"tools": [{"type": "function", **TOOL["function"]}], "input": "hi"},
         "tools[0].parameters"),
    ],
)  # fmt: skip
def test_what_is_beyond_a_bound_is_named(extra: dict[str, Any], param: str) -> None:
    if extra.keys() & {"input", "text"}:
        assert refused({**RESPONSE, **extra}, responses.ResponsesRequest).param == param
    else:
        assert refused({**CHAT, **extra}, chat.ChatRequest).param == param


def test_codes_are_openais() -> None:
    many = refused({**CHAT, "messages": [USER] * 4}, chat.ChatRequest)
    assert many.code == "array_above_max_length"
    assert "at most 3 items, and has 4" in many.message
    body = {"model": "m", "prompt": "a", "guided_regex": "x" * 9}
    long = refused(body, completions.CompletionRequest)
    assert long.code == "string_above_max_length"


def test_what_is_at_the_bounds_is_read() -> None:
    schema = {"type": "object", "description": "x" * (64 - 34)}
    assert len(orjson.dumps(schema)) <= 64
    body = {**CHAT, "messages": [USER] * 3, "guided_json": schema}
    read_request(orjson.dumps(body), chat.ChatRequest, strict=False, bounds=BOUNDS)
    body = {**CHAT, "guided_regex": "x" * 8}
    read_request(orjson.dumps(body), chat.ChatRequest, strict=False, bounds=BOUNDS)
