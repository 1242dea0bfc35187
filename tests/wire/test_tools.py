"""Tools and their choice → the tools that the template shows, allowed and forced calls."""

from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest
from gateway.jobs.chat import Calling
from gateway.wire.chat import ChatRequest
from gateway.wire.validation import read_request

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tell the time."}}


def read(**fields: Any) -> tuple[list[str], Calling | None]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = read_request(orjson.dumps(body), ChatRequest, strict=False).request
    shown, calling = request.calling()
    return [tool["function"]["name"] for tool in shown], calling


def test_tools_may_be_called_unless_forbidden() -> None:
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        shown, calling = read(tools=[WEATHER, CLOCK], **choice)
        assert shown == ["weather", "clock"]
        assert calling is not None
        assert not calling.forced
    assert read(tools=[WEATHER], tool_choice="none") == ([], None)
    assert read(tools=[]) == ([], None)
    assert read() == ([], None)


def test_required_and_named_choices_force_a_call() -> None:
    _, required = read(tools=[WEATHER, CLOCK], tool_choice="required")
    assert required is not None
    assert required.forced
    assert [function.name for function in required.functions] == ["weather", "clock"]
    choice = {"type": "function", "function": {"name": "clock"}}
    _, named = read(tools=[WEATHER, CLOCK], tool_choice=choice)
    assert named is not None
    assert named.forced
    assert [function.name for function in named.functions] == ["clock"]
    assert not named.parallel


def test_allowed_tools_narrow_the_choice() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    shown, calling = read(tools=[WEATHER, CLOCK], tool_choice=choice)
    assert shown == ["clock"]
    assert calling is not None
    assert calling.forced


def test_older_names_mean_the_same() -> None:
    shown, calling = read(functions=[WEATHER["function"]], function_call={"name": "weather"})
    assert shown == ["weather"]
    assert calling is not None
    assert calling.forced
    assert not calling.parallel
    assert read(functions=[WEATHER["function"]], function_call="none") == ([], None)


def test_strictness_and_parallel_calls_are_passed_on() -> None:
    strict = {"type": "function", "function": {**CLOCK["function"], "strict": True}}  # type: ignore[dict-item]
    _, calling = read(tools=[WEATHER, strict], parallel_tool_calls=False)
    assert calling is not None
    assert not calling.parallel
    assert [function.strict for function in calling.functions] == [False, True]
    assert calling.functions[1].parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tools": [WEATHER, WEATHER]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        {"tools": [WEATHER], "tool_choice": "always"},
        {"tools": "weather"},
        {"functions": [WEATHER["function"]], "function_call": {"name": "nobody"}},
    ],
)
def test_a_choice_of_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert caught.value.param is not None


@pytest.mark.parametrize("kind", ["array", ["array", "null"], "string", "an object", None])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_that_are_no_object_are_refused(kind: Any, choice: str) -> None:
    """Otherwise a call would be answered with a list."""
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": kind}}}
    with pytest.raises(BadRequest, match="'odd' should have the 'type' 'object'") as caught:
        read(tools=[WEATHER, odd], tool_choice=choice)
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_function_parameters")


@pytest.mark.parametrize("parameters", [{}, {"type": ["object", "null"]}, {"anyOf": [PARAMETERS]}])
def test_parameters_that_may_be_an_object_are_taken(parameters: dict[str, Any]) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    assert read(tools=[odd])[0] == ["odd"]


def test_tools_of_other_types_are_skipped_beside_a_function() -> None:
    custom = {"type": "custom", "custom": {"name": "x"}}
    shown, calling = read(tools=[custom, CLOCK])
    assert calling is not None
    assert shown == [each.name for each in calling.functions] == ["clock"]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [custom, CLOCK]}
    ignored = read_request(orjson.dumps(body), ChatRequest, strict=False).ignored
    assert ignored == ("tools.custom",)
