"""What a model says, told apart: text, reasoning, calls, wherever the pieces are cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.answers.output_parts import Mode
from gateway.engine.answers.parsing import Markup, Parser
from tests.engine.answers.harness import cut, pushed

MARKUP = Markup(
    opens=("<think>",),
    closes=("</think>",),
    calls=(("<tool_call>", "</tool_call>"),),
    read=lambda text: [json.loads(text)],
)
CUTS = st.lists(st.integers(0, 200), max_size=12).map(tuple)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def read(
    text: str, cuts: tuple[int, ...] = (), mode: Mode = "free", *, is_thinking: bool = False
) -> dict[str, Any]:
    return pushed(Parser(MARKUP, mode, is_thinking=is_thinking), cut(text, cuts))


@given(CUTS, st.booleans())
def test_thinking_is_reasoning_and_the_rest_is_text(cuts: tuple[int, ...], opened: bool) -> None:
    """Also where the prompt has opened it. White space after a mark is nothing."""
    text = "hm, hm\n</think>\n\nAnswer <b>"
    told = read(text if opened else f"<think>\n{text}", cuts, is_thinking=opened)
    assert (told["reasoning"], told["text"]) == ("hm, hm\n", "Answer <b>")


def test_thinking_that_never_ends_is_reasoning() -> None:
    told = read("hm, hm </thi", is_thinking=True)
    assert told == {"reasoning": "hm, hm </thi", "text": "", "calls": [], "ids": []}


@given(CUTS, st.sampled_from(["<tool_call>not json</tool_call>", '<tool_call>{"name": "f"']))
def test_a_call_that_cannot_be_read_is_text(cuts: tuple[int, ...], broken: str) -> None:
    assert read(broken, cuts)["text"] == broken


def test_marks_are_text_where_calls_are_not_asked_for() -> None:
    assert read(CALL, mode="none") == {"text": CALL, "reasoning": "", "calls": [], "ids": []}


@given(CUTS, st.booleans())
def test_a_forced_call_is_told_as_it_is_made(cuts: tuple[int, ...], thinks: bool) -> None:
    """Its arguments are what stands between, and thoughts before it no part of it."""
    call = '{"name":"get","arguments":{"city":"Paris","deep":{"x":"}"}}}'
    told = read(f"hm</think>\n{call}" if thinks else call, cuts, "forced", is_thinking=thinks)
    assert told["calls"] == [("get", {"city": "Paris", "deep": {"x": "}"}})]
    assert (told["text"], told["reasoning"]) == ("", "hm" if thinks else "")


def test_forced_arguments_stream_before_they_end() -> None:
    parser = Parser(MARKUP, "forced", is_thinking=False)
    parser.push('{"name":"get","arguments":{"city":')
    (part,) = parser.push('"Par')
    assert part.call is not None
    assert part.call.arguments == ':"Pa'


@pytest.mark.parametrize("text", ["", "plain", "a < b", "<", "<think", "<tool_cal", "</think>x"])
def test_text_that_only_looks_like_a_mark_is_text(text: str) -> None:
    assert read(text, tuple(range(len(text))))["text"] == text


def test_a_long_call_is_looked_at_once() -> None:
    """Twice the call is never four times the work: what cannot hold a mark is put aside."""
    parser = Parser(MARKUP, "free", is_thinking=False)
    parser.push("<tool_call>")
    for _ in range(1000):
        parser.push("x" * 50)
        assert len(parser._held) < len("</tool_call>")
    assert len(parser.flush()[0].text) == 50_011
