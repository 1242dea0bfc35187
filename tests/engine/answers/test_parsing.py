"""What a model says, told apart: text, reasoning, calls, wherever the pieces are cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.answers.output_parts import Mode
from gateway.engine.answers.parsing import Markup, Parser

MARKUP = Markup(
    opens=("<think>",),
    closes=("</think>",),
    calls=(("<tool_call>", "</tool_call>"),),
    read=lambda text: [json.loads(text)],
)


def read(
    text: str, cuts: tuple[int, ...] = (), mode: Mode = "free", *, is_thinking: bool = False
) -> dict[str, Any]:
    """Push a text in pieces and gather what was told."""
    parser = Parser(MARKUP, mode, is_thinking=is_thinking)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = []
    for start, end in pairwise(places):
        parts += parser.push(text[start:end])
    parts += parser.flush()
    calls: dict[int, dict[str, str]] = {}
    for part in parts:
        if part.call is not None:
            call = calls.setdefault(part.call.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += part.call.id or ""
            call["name"] += part.call.name or ""
            call["arguments"] += part.call.arguments
    return {
        "text": "".join(part.text for part in parts),
        "reasoning": "".join(part.reasoning for part in parts),
        "calls": [(c["name"], c["arguments"]) for c in calls.values()],
        "ids": [c["id"] for c in calls.values()],
    }


CUTS = st.lists(st.integers(0, 200), max_size=12).map(tuple)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@given(CUTS)
def test_thinking_is_reasoning_and_the_rest_is_text(cuts: tuple[int, ...]) -> None:
    told = read("<think>\nhm, hm\n</think>\n\nAnswer <b>", cuts)
    assert told["reasoning"] == "hm, hm\n"
    assert told["text"] == "Answer <b>"


@given(CUTS)
def test_a_prompt_that_opened_the_thinking_needs_no_mark(cuts: tuple[int, ...]) -> None:
    told = read("hm</think>Answer", cuts, is_thinking=True)
    assert (told["reasoning"], told["text"]) == ("hm", "Answer")


def test_thinking_that_never_ends_is_reasoning() -> None:
    told = read("hm, hm </thi", is_thinking=True)
    assert told == {"reasoning": "hm, hm </thi", "text": "", "calls": [], "ids": []}


@given(CUTS)
def test_calls_are_told_whole_with_ids_of_their_own(cuts: tuple[int, ...]) -> None:
    told = read(f"Let me see. {CALL}\n{CALL}", cuts)
    assert told["text"].strip() == "Let me see."
    assert told["calls"] == [("f", '{"a":1}')] * 2
    assert len(set(told["ids"])) == 2


@given(CUTS)
def test_a_call_that_cannot_be_read_is_text(cuts: tuple[int, ...]) -> None:
    broken = "<tool_call>not json</tool_call>"
    assert read(broken, cuts)["text"] == broken
    unfinished = '<tool_call>{"name": "f"'
    assert read(unfinished, cuts)["text"] == unfinished


def test_marks_are_text_where_calls_are_not_asked_for() -> None:
    assert read(CALL, mode="none") == {"text": CALL, "reasoning": "", "calls": [], "ids": []}


@given(CUTS)
def test_a_forced_call_is_told_as_it_is_made(cuts: tuple[int, ...]) -> None:
    arguments = '{"city":"Paris","deep":{"x":"}"}}'
    told = read(f'{{"name":"get","arguments":{arguments}}}', cuts, "forced")
    assert told["calls"] == [("get", arguments)]
    assert told["text"] == ""


def test_forced_arguments_stream_before_they_end() -> None:
    parser = Parser(MARKUP, "forced", is_thinking=False)
    parser.push('{"name":"get","arguments":{"city":')
    (part,) = parser.push('"Par')
    assert part.call is not None
    assert part.call.arguments == ':"Pa'


def test_a_forced_call_may_be_thought_about_first() -> None:
    told = read('hm</think>\n{"name":"f","arguments":{}}', (), "forced", is_thinking=True)
    assert told["calls"] == [("f", "{}")]
    assert told["reasoning"] == "hm"


@pytest.mark.parametrize("text", ["", "plain", "a < b", "<", "<think", "<tool_cal", "</think>x"])
def test_text_that_only_looks_like_a_mark_is_text(text: str) -> None:
    assert read(text, tuple(range(len(text))))["text"] == text


def test_a_long_call_is_looked_at_once() -> None:
    parser = Parser(MARKUP, "free", is_thinking=False)
    parser.push("<tool_call>")
    for _ in range(1000):
        parser.push("x" * 50)
        assert len(parser._held) < len("</tool_call>")
    assert len(parser.flush()[0].text) == 50_011
