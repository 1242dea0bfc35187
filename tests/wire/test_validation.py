"""The faults of a request are told in the words of its fields, never in those of Python."""

import json
from typing import Any

import pytest

from gateway.errors import BadRequest, UnknownParameter
from gateway.wire import chat, completions, responses
from gateway.wire.generation import MAX_STOPS
from gateway.wire.messages import to_template
from gateway.wire.validation import Parsed, Request, read_request

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
SHAPES: dict[str, tuple[type[Request], dict[str, Any]]] = {
    "chat": (chat.ChatRequest, CHAT),
    "completions": (completions.CompletionRequest, {"model": "m", "prompt": "hi"}),
    "responses": (responses.ResponsesRequest, {"model": "m", "input": "hi"}),
}


def read(path: str = "chat", *, strict: bool = False, **given: Any) -> Parsed[Any]:
    shape, least = SHAPES[path]
    return read_request(json.dumps({**least, **given}).encode(), shape, strict=strict)


def refused(path: str = "chat", **given: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(path, **given)
    return caught.value


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"messages": "hi"}, "messages", "expected an array, but got a string"),
        ({"messages": ["hi"]}, "messages[0]", "expected an object, but got a string"),
        ({"messages": [[]]}, "messages[0]", "expected an object, but got an array"),
        ({"messages": [{**USER, "content": 5}]}, "messages[0].content",
         "expected a string or an array, but got an integer"),
        ({"messages": [{**USER, "content": ["x"]}]}, "messages[0].content[0]",
         "expected an object, but got a string"),
        ({"stream": 1}, "stream", "expected a boolean, but got an integer"),
        ({"temperature": "hot"}, "temperature", "expected a number, but got a string"),
        ({"n": 1.5}, "n", "expected an integer, but got a decimal"),
        ({"stream_options": True}, "stream_options", "expected an object, but got a boolean"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_told_by_the_names_json_has(
    given: dict[str, Any], param: str, said: str
) -> None:
    """OpenAI names them so: an object, an array, and the type that came instead."""
    error = refused(**given)
    assert (error.param, error.code) == (param, "invalid_type")
    assert error.message == f"Invalid type for '{param}': {said} instead."


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("chat", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("chat", {"messages": [{"content": "x"}]}),
        ("chat", {"tools": ["x"]}),
        ("chat", {"tools": [{"type": "function", "function": 5}]}),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": 5}}}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"colour": 1}}}),
        ("chat", {"function_call": {"name": 5}, "functions": [{"name": "f"}]}),
        ("chat", {"service_tier": "gold"}),
        ("chat", {"stop": 5}),
        ("chat", {"logit_bias": {"1": "x"}}),
        ("responses", {"input": [{"role": "user", "content": [5]}]}),
        ("responses", {"text": {"format": {"type": "json_schema"}}}),
        ("responses", {"include": ["everything"]}),
        ("responses", {"reasoning": {"effort": "hard"}}),
    ],
)
def test_no_message_speaks_python(path: str, given: dict[str, Any]) -> None:
    error = refused(path, **given)
    text = f"{error.message} {error.param}"
    words = ("dictionary", "instance", "Input", "list", "None", "bool", "Param", "Tool", "Name")
    assert not [word for word in words if word in text], text
    assert error.param
    assert error.param.split(".")[0].split("[")[0] in given


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"temperature": 5}, "decimal_above_max_value"),
        ({"temperature": -1}, "decimal_below_min_value"),
        ({"n": 0}, "integer_below_min_value"),
        ({"seed": 2**70}, "integer_above_max_value"),
        ({"seed": -(2**70)}, "integer_below_min_value"),
        ({"seed": 2**63}, "integer_above_max_value"),
        ({"seed": 2.0**53}, "invalid_type"),
    ],
)
def test_the_field_says_whether_a_bound_is_of_decimals(given: dict[str, Any], code: str) -> None:
    """The sent number does not say it. JSON's integers have no end; those of 64 bits do."""
    assert refused(**given).code == code


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_number_of_tokens_may_be_written_in_other_ways(name: str) -> None:
    """Whole decimals are integers in JSON, and -1 is no bound to other servers."""
    path = "responses" if name == "max_output_tokens" else "chat"

    def taken(value: Any) -> Any:
        given: dict[str, Any] = {name: value}
        return getattr(read(path, **given).request, name)

    assert [taken(value) for value in (12.0, -1, -1.0)] == [12, None, None]
    for wrong in (0, -2, 12.5, True):
        assert refused(path, **{name: wrong}).param == name


def test_stop_may_be_many_or_none() -> None:
    stops = [f"stop {i}" for i in range(MAX_STOPS)]
    assert read(stop=stops).request.stop == tuple(stops)
    assert [read(stop=none).request.stop for none in ([], "", [""], None)] == [()] * 4
    assert read(stop=["", "x"]).request.stop == ("x",)
    assert refused(stop=[*stops, "x"]).param == "stop"
    assert refused(stop="x" * 257).param == "stop"


def test_history_may_have_an_empty_list_of_calls() -> None:
    """Some SDKs send such turns back as they were given."""
    turns = [USER, {"role": "assistant", "content": "yes", "tool_calls": []}, USER]
    request = read(messages=turns).request
    assert [set(turn) for turn in to_template(request.messages)] == [{"role", "content"}] * 3


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_user_says_something(content: dict[str, Any]) -> None:
    messages = read(messages=[USER, {"role": "user", **content}]).request.messages
    with pytest.raises(BadRequest) as caught:
        to_template(messages)
    assert caught.value.param == "messages[1].content"
    assert caught.value.code == "missing_required_parameter"
    to_template(read(messages=[{"role": "user", "content": ""}]).request.messages)


NESTED: dict[str, Any] = {
    "messages": [
        USER,
        {"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}], "mood": 1},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "index": 0, "function": {"name": "f", "speed": 1}}],
            "annotations": [],
            "reasoning_content": "…",
        },
    ],
    "tools": [{"type": "function", "function": {"name": "f"}, "extra": 1}],
    "stream_options": {"include_obfuscation": False, "include_everything": True},
    "taste": 1,
}
UNKNOWN = (
    "taste",
    "messages[1].mood",
    "messages[1].content[0].colour",
    "messages[2].tool_calls[0].function.speed",
    "stream_options.include_everything",
    "tools[0].extra",
)


ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}] * 129}


def test_an_unknown_field_is_named_by_its_place() -> None:
    assert read(**NESTED).ignored == UNKNOWN
    with pytest.raises(UnknownParameter) as caught:
        read(strict=True, **{**NESTED, "taste": None})
    assert caught.value.param == "messages[1].mood"
    assert read(strict=True).ignored == ()


def test_only_some_of_many_unknown_fields_are_named() -> None:
    """A header has no room for all of them."""
    messages = [{**USER, "mood": 1}] * 4000
    assert 16 <= len(read(messages=messages).ignored) <= 100


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({f"x{i}": 1 for i in range(1025)}, None, "more than 1024 fields"),
        ({"messages": [{**USER, "content": [{}] * 4097}]}, "messages[0].content", "4096"),
        ({"messages": [{**USER, "tool_calls": [{}] * 4097}]}, "messages[0].tool_calls", "4096"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
         "tool_choice.allowed_tools.tools", "128"),
        ({"metadata": {f"x{i}": [] for i in range(100_001)}}, None, "more than 200000"),
    ],
)  # fmt: skip
def test_what_a_request_holds_is_counted_before_it_is_read(
    given: dict[str, Any], param: str | None, said: str
) -> None:
    """Each field and part costs Python microseconds, and a body has room for half a million."""
    error = refused(**given)
    assert error.param == param
    assert said in error.message


def test_brackets_and_colons_in_a_text_are_no_parts() -> None:
    """A long program is one string."""
    assert read(messages=[{**USER, "content": "{[:" * 100_000}]).request
