"""A checkpoint's own template reads what it can within bounds; the rest is text as it stands."""

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.engine.answers.output_parts import SPECIAL, CallWriter
from gateway.engine.answers.response_template import ResponseTemplate
from gateway.jobs import Delta, Function, Reading
from gateway.serving.sandbox import Sandbox
from tests.engine.chat_formats import row
from tests.sandboxes import sandbox

END = "\ud802"
PLAIN: dict[str, Any] = {"start_anchor": "<a>", "fields": {"content": {}}}
LOOK = Function("look", {"type": "object", "properties": {"n": {"type": "integer"}}})


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox("template") as box:
        yield box


def read(
    box: Sandbox, fields: dict[str, Any], text: str, prefix: str = "<a>", **more: Any
) -> Reading:
    template = ResponseTemplate({**PLAIN, "fields": fields, **more}, box)
    return template.read(row([LOOK]), text, prefix, CallWriter(), is_cut=False)


def special(token: str) -> str:
    return f"{SPECIAL}{token}{END}"


def calls(transform: Any, **more: Any) -> dict[str, Any]:
    """Return fields of a call in `<c>`, whose JSON becomes what `transform` makes of it."""
    field = {"open": "<c>", "close": "</c>", "content": "json", "transform": transform}
    return {"content": {}, "tool_calls": {**field, **more}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_argument_has_the_type_of_its_schema(box: Sandbox) -> None:
    fields = calls(call("look", "{content}"), repeats=True)
    deltas, problem = read(box, fields, special("<c>") + '{"n": "7"}</c>')
    assert problem is None
    assert [delta.call and delta.call.arguments for delta in deltas] == ['{"n":7}']


def test_calls_beyond_the_only_one_are_left_out(box: Sandbox) -> None:
    template = ResponseTemplate(
        {**PLAIN, "fields": calls(call("look", "{content}"), repeats=True)}, box
    )
    one = CallWriter(limit=1)
    text = '<c>{"n": 1}</c><c>{"n": 2}</c>'
    deltas, _ = template.read(row([LOOK]), text, "<a>", one, is_cut=False)
    assert [delta.call and delta.call.arguments for delta in deltas] == ['{"n":1}']


def test_a_conversation_without_the_anchor_is_no_part_of_the_answer(box: Sandbox) -> None:
    deltas, _ = read(box, {"content": {}}, "Yes.", prefix="my secret")
    assert [delta.text for delta in deltas] == ["Yes."]


@pytest.mark.parametrize(
    "fields",
    [
        {"content": {"content": "json"}},  # the text is none
        {"content": {"content": "int"}},
        {"content": {"content_args": "x"}},
        {"content": {}, "else": {"open": "<c>", "optional": False}},
        {"content": {}, "colour": {"open": "<c>"}},
        {"content": {"repeats": True, "close": "y"}},  # a list of texts
        {"thinking": {"open": "<c>", "transform": {"deep": "{content}"}}},
        {"nothing": {"open": "<never>"}},
        calls("look"),
        calls(["look"]),
        calls([call("look", 7)]),
        calls([call("look", "no JSON")]),
        calls([call("unknown", "{content}")]),
        calls([call("look", {"n": float("nan")})]),
        calls([{"function": {"name": ["look"], "arguments": {}}}]),
    ],
)
def test_what_makes_no_message_is_text_as_it_stands(box: Sandbox, fields: dict[str, Any]) -> None:
    deltas, problem = read(box, fields, special("<e>") + 'Say <c>{"n": 1}</c> why.')
    assert problem is not None
    assert deltas == [Delta(0, 'Say <c>{"n": 1}</c> why.')]


@pytest.mark.parametrize(
    "template",
    [
        None,
        [],
        "x",
        {},
        {**PLAIN, "version": 9},
        {**PLAIN, "fields": {"content": {"open_pattern": "(", "close": 1}}},
        {**PLAIN, "start_anchor": ["", 3]},
        {**PLAIN, "fields": {"content": "x"}},
        {**PLAIN, "defaults": []},
    ],
)
def test_what_is_no_template_has_a_problem_when_the_model_loads(
    box: Sandbox, template: Any
) -> None:
    assert ResponseTemplate(template, box).problem


@pytest.mark.parametrize("outcome", ["busy", "slow", "killed"])
def test_a_sandbox_without_time_says_nothing_of_a_template(outcome: str) -> None:
    assert ResponseTemplate(PLAIN, lambda request, key: (outcome, "why")).problem is None


def test_an_answer_that_takes_for_ever_is_ended_once_and_others_are_read() -> None:
    for_ever = {"open_pattern": r"(.+)+(.+)+\1\2[b-z]", "close": "e"}
    with sandbox("template", 0.3) as box:
        template = ResponseTemplate({**PLAIN, "fields": {"content": {}, "thinking": for_ever}}, box)
        text = "a" * 5000
        for _ in range(2):
            deltas, problem = template.read(row(), text, "<a>", CallWriter(), is_cut=False)
            assert deltas == [Delta(0, text)]
            assert problem is not None
            assert "seconds of processor time" in problem
        deltas, problem = template.read(row(), "Yes.", "<a>", CallWriter(), is_cut=False)
        assert (deltas, problem) == ([Delta(0, "Yes.")], None)
        assert not ResponseTemplate(PLAIN, box).read(row(), "x", "", CallWriter(), is_cut=False)[1]
