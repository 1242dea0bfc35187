"""Chat messages in their many forms → the turns that templates read."""

import tracemalloc
from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest
from gateway.wire.bounds import MAX_PARTS
from gateway.wire.chat import ChatRequest
from gateway.wire.messages import Message, read_arguments, to_template
from gateway.wire.validation import read_request
from tests.fuzz.growing import MOST, least, uncollected


def turns(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return to_template([Message.model_validate(message) for message in messages])


def test_system_turns_of_any_name_and_place_become_one_first() -> None:
    """Many templates refuse, or drop in silence, any other."""
    told = turns(
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": "yes"},
        {"role": "system", "content": "Be kind."},
    )
    assert [(turn["role"], turn["content"]) for turn in told] == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", "hi"),
        ("assistant", "yes"),
    ]


def test_user_turns_in_a_row_become_one() -> None:
    """Graphiti appends an error text per retry; templates demand alternation."""
    told = turns(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    )
    assert told == [{"role": "user", "content": "a\n\nbc"}]


def test_four_times_as_many_user_turns_take_about_four_times_as_long() -> None:
    """They are joined at once, not one to all before it."""
    few, many = ([Message(role="user", content="x" * 500)] * count for count in (2000, 8000))
    with uncollected():
        assert least(lambda: to_template(many), 3) < MOST * least(lambda: to_template(few), 3)


def test_an_assistants_calls_keep_their_arguments_as_values() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":[1]}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    told = turns(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call, empty]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "43"},
    )
    assert told[1]["content"] == ""
    functions = [each["function"] for each in told[1]["tool_calls"]]
    assert functions == [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]
    assert [turn["tool_call_id"] for turn in told[2:]] == ["c1", "c2"]


def ignored(message: dict[str, Any]) -> tuple[str, ...]:
    body = orjson.dumps({"model": "m", "messages": [message]})
    return read_request(body, ChatRequest, strict=False).ignored


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        ({"reasoning_content": "So."}, ()),
        ({"reasoning": "So."}, ()),
        ({"reasoning_content": "", "reasoning": "So."}, ()),
        ({"reasoning_content": " \n", "reasoning": "So."}, ("messages[0].reasoning_content",)),
        ({"reasoning_content": "So.", "reasoning": "So."}, ()),
        ({"reasoning_content": "So.", "reasoning": "Other."}, ("messages[0].reasoning",)),
        ({"reasoning": {"text": "x"}, "reasoning_content": "So."}, ("messages[0].reasoning",)),
    ],
)
def test_an_assistants_thoughts_go_back_under_either_name(
    sent: dict[str, Any], names: tuple[str, ...]
) -> None:
    message = {"role": "assistant", "content": None, **sent}
    assert turns(message) == [{"role": "assistant", "content": "", "reasoning_content": "So."}]
    assert ignored(message) == names


@pytest.mark.parametrize("sent", [{"a": 1}, ["x"], 5, True])
def test_thoughts_that_are_no_text_or_not_the_assistants_are_named(sent: Any) -> None:
    message = {"role": "assistant", "content": "hi", "reasoning": sent, "reasoning_content": sent}
    assert turns(message) == [{"role": "assistant", "content": "hi"}]
    names = ("messages[0].reasoning", "messages[0].reasoning_content")
    assert ignored(message) == names
    assert ignored({"role": "user", "content": "hi", "reasoning": "So."}) == names[:1]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1} and more', {"a": 1}),
        ("{", {}),
        ("null", {}),
        ("[]", {}),
        ('""', {}),
        ('"{}"', {}),
        ('"{\\"city\\":\\"Paris\\"}"', {"city": "Paris"}),
        ("[1]", {"input": [1]}),
        ("0", {"input": 0}),
        ("12 eggs", {"input": "12 eggs"}),
        ("Paris", {"input": "Paris"}),
        ("{'a': 1}", {"input": "{'a': 1}"}),
        ('{"a":' * 100, {"input": '{"a":' * 100}),
        ('{"a": ' + "9" * 30, {"input": '{"a": ' + "9" * 30}),
    ],
)
def test_arguments_that_are_no_object_are_read_as_one_and_named(sent: str, read: Any) -> None:
    """Templates iterate them by name; a call that `max_tokens` cut comes back cut."""
    function = {"name": "f", "arguments": sent}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    assert turns(message)[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": read}
    assert ignored(message) == ("messages[0].tool_calls[0].function.arguments",)


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "f", "arguments": {"input": "a"}}},
        {"type": "custom", "custom": {"name": "f", "input": "a"}},
        {"custom": {}, "function": {"name": "f", "arguments": {"input": "a"}}},
    ],
    ids=["an object", "a custom tool's", "both"],
)
def test_arguments_that_are_an_object_are_read(call: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "c", **call}]}
    called = turns(message)[0]["tool_calls"][0]["function"]
    assert called == {"name": "f", "arguments": {"input": "a"}}
    assert ignored(message) == ()


def test_parts_of_other_servers_are_skipped_in_earlier_turns_and_named() -> None:
    """Mistral's answers have such parts for thoughts; the user's own are refused."""
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "Yes."}]
    for role in ("assistant", "tool"):
        message = {"role": role, "content": parts}
        assert turns(message)[0]["content"] == "Yes."
        assert ignored(message) == ("messages[0].content[0].thinking",)
    with pytest.raises(BadRequest):
        turns({"role": "user", "content": parts})


def test_arguments_of_very_many_parts_are_a_text() -> None:
    """Closing them would take seconds."""
    cut = '{"a": [' + "[]," * 200_001
    call = {"id": "c", "function": {"name": "f", "arguments": cut}}
    function = turns({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"][0]["function"]
    assert function["arguments"] == {"input": cut}


def test_older_function_turns_are_tool_turns() -> None:
    told = turns(
        {"role": "user", "content": "x"}, {"role": "function", "name": "f", "content": "1"}
    )
    assert told[1] == {"role": "tool", "name": "f", "content": "1"}


def test_a_refusal_is_text_again() -> None:
    part = {"type": "refusal", "refusal": "No."}
    assert turns({"role": "assistant", "content": [part]})[0]["content"] == "No."


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
    ],
)
def test_what_is_not_text_is_refused_by_its_place(message: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        turns({"role": "user", "content": "x"}, message)
    assert (caught.value.param or "").startswith("messages[1].")


@pytest.mark.parametrize("kind", ["text", "refusal"])
def test_a_part_without_its_text_is_missing_it(kind: str) -> None:
    parts = [{"type": "text", "text": ""}, {"type": kind}]
    with pytest.raises(BadRequest) as caught:
        turns({"role": "assistant", "content": parts})
    assert caught.value.param == f"messages[0].content[1].{kind}"
    assert caught.value.code == "missing_required_parameter"


def test_a_cut_text_of_many_parts_is_not_made_into_values() -> None:
    """Each takes more than fifty times the memory of its text."""
    text = '{"a": [' + "[]," * (MAX_PARTS + 1)
    tracemalloc.start()
    try:
        assert read_arguments(text) == {"input": text}
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
