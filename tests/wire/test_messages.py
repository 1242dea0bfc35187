"""Chat messages in their many forms → the turns that templates read."""

from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.wire.messages import Message, to_template
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
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}],
        },
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
