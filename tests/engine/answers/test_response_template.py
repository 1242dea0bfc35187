"""A checkpoint's own template reads the answer within bounds; the rest is text as it stands."""

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.engine.answers.output_parts import SPECIAL, CallWriter
from gateway.engine.answers.response_template import ResponseTemplate
from gateway.engine.sandbox_worker import Answer, Request
from gateway.errors import GatewayError, Overloaded, Unavailable
from gateway.jobs.chat import Delta, Function, Reading
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
    """Return fields of a call in `<c>`, whose JSON `transform` rewrites."""
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


class Scripted:
    """A sandbox with these outcomes, the last for good."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes, self.asked = list(outcomes), 0

    def __call__(self, request: Request, key: bytes) -> Answer:
        self.asked += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        return outcome, {"content": "Yes."} if outcome == "read" else "it took long"


def answer(template: ResponseTemplate) -> Reading:
    return template.read(row([LOOK]), "<c>", "", CallWriter(), is_cut=False)


@pytest.mark.parametrize("outcome", ["busy", "slow", "killed"])
def test_a_sandbox_without_time_says_nothing_of_a_template(outcome: str) -> None:
    assert ResponseTemplate(PLAIN, Scripted(outcome)).problem is None


@pytest.mark.parametrize(
    ("outcome", "error", "asked"),
    [("busy", Overloaded, 2), ("killed", Unavailable, 2), ("slow", Unavailable, 1)],
)
def test_an_answer_that_others_left_no_time_to_read_is_refused(
    outcome: str, error: type[GatewayError], asked: int
) -> None:
    """A call in the answer would be lost without an error if it were given as plain text."""
    box = Scripted("read", outcome)
    template = ResponseTemplate(PLAIN, box)
    for number in range(1, 4):
        with pytest.raises(error, match="read"):
            answer(template)
        assert (box.asked - 1, template.problem) == (asked * number, None)


@pytest.mark.parametrize("outcome", ["busy", "killed"])
def test_an_answer_is_read_once_others_leave_the_time(outcome: str) -> None:
    template = ResponseTemplate(PLAIN, Scripted("read", outcome, "read"))
    assert answer(template) == ([Delta(0, "Yes.")], None)


@pytest.mark.parametrize("outcome", ["late", "died"])
def test_a_template_that_ends_its_process_each_time_is_used_no_more(outcome: str) -> None:
    box = Scripted("read", outcome, outcome, "read", *[outcome] * 3, "read")
    template = ResponseTemplate(PLAIN, box)
    events = [problem and problem[0] for _, problem in (answer(template) for _ in range(7))]
    missed, over = "answer_not_read", "response_template_unused"
    assert events == [missed, missed, None, missed, missed, over, over]
    assert template.problem == "it took long, 3 times in a row"
    assert box.asked == 7
    assert answer(template)[0] == [Delta(0, "<c>")]


def test_a_long_answer_is_read(box: Sandbox) -> None:
    text = "é" * 100_000
    assert read(box, {"content": {}}, text) == ([Delta(0, text)], None)


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_thought_before_a_call_that_is_none_is_a_thought(box: Sandbox, is_cut: bool) -> None:
    name = "look" if is_cut else "listen"
    thought = {"open": "<t>", "close": "</t>"}
    fields = {"thinking": thought, **calls(call(name, "{content}"), repeats=True)}
    template = ResponseTemplate({**PLAIN, "fields": fields}, box)
    text = f"{special('<t>')}It may rain.{special('</t>')}I look.{special('<c>')}{{}}</c>"
    deltas, problem = template.read(row([LOOK]), text, "<a>", CallWriter(), is_cut=is_cut)
    assert deltas == [Delta(0, reasoning="It may rain."), Delta(0, "I look.{}</c>")]
    assert problem is not None


def test_an_answer_that_takes_for_ever_is_ended_once_and_others_are_read() -> None:
    for_ever = {"open_pattern": r"(.+)+(.+)+\1\2[b-z]", "close": "e"}
    with sandbox("template", 0.3) as box:
        template = ResponseTemplate({**PLAIN, "fields": {"content": {}, "thinking": for_ever}}, box)
        text = "a" * 5000
        for _ in range(2):
            deltas, problem = template.read(row(), text, "<a>", CallWriter(), is_cut=False)
            assert deltas == [Delta(0, text)]
            assert problem is not None
            assert "seconds of processor time" in problem[1]
        deltas, problem = template.read(row(), "Yes.", "<a>", CallWriter(), is_cut=False)
        assert (deltas, problem) == ([Delta(0, "Yes.")], None)
        assert not ResponseTemplate(PLAIN, box).read(row(), "x", "", CallWriter(), is_cut=False)[1]
