"""A model's answer told apart: text, reasoning and calls, wherever the pieces are cut."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.answers.call_bodies import Bodies, read_json
from gateway.engine.answers.call_values import Ending, Reading
from gateway.engine.answers.output_parts import Mode
from gateway.engine.answers.parsing import Markup, Parser
from tests.engine.answers.harness import cut, pushed

FORM = Bodies(read_json, (("<tool_call>", "</tool_call>"),))
MARKUP = Markup(
    opens=("<think>",),
    closes=("</think>",),
    calls=("<tool_call>",),
    call_ends=("</tool_call>",),
    read=lambda text, at, ending: FORM(text, at, {}, ending),
)
CUTS = st.lists(st.integers(0, 200), max_size=12).map(tuple)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def read(
    text: str, cuts: tuple[int, ...] = (), mode: Mode = "free", *, is_thinking: bool = False
) -> dict[str, Any]:
    return pushed(Parser(MARKUP, mode, is_thinking=is_thinking), cut(text, cuts))


@given(CUTS, st.booleans())
def test_thinking_is_reasoning_and_the_rest_is_text(cuts: tuple[int, ...], opened: bool) -> None:
    """This holds where the prompt has opened it too. White space after a mark is dropped."""
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
    """Its arguments are the text between the marks; the thoughts before it are no part of it."""
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


def counted(reads: list[int]) -> Parser:
    """Return a parser that lists the sizes of the texts that it reads."""

    def read(text: str, at: int, ending: Ending) -> Reading | None:
        reads.append(len(text))
        return FORM(text, at, {}, ending)

    return Parser(replace(MARKUP, read=read), "free", is_thinking=False)


def test_a_call_full_of_marks_is_read_a_few_times() -> None:
    """Twice the call is never four times the work."""
    reads: list[int] = []
    parser = counted(reads)
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(2000):
        assert parser.push("</tool_call>") == []
    (part,) = parser.push('"}}</tool_call>') + parser.flush()
    assert part.call is not None
    assert len(part.call.arguments) > 24_000
    assert sum(reads) < 16 * 24_000


def test_a_mark_in_prose_holds_nothing_back_for_long() -> None:
    parser = Parser(MARKUP, "free", is_thinking=False)
    text = "The mark <tool_call> begins a call, " + "and so on, " * 20
    assert len("".join(part.text for part in parser.push(text))) == len(text)


def test_what_follows_a_call_settled_late_is_taken_piece_by_piece() -> None:
    """Thirty thousand marks behind it took minutes."""
    parser = Parser(MARKUP, "free", is_thinking=False)
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * 30_000 + '"}')
    calls = '<tool_call>{"name": "g", "arguments": {}}</tool_call>' * 3
    parts = [*parser.push("}</tool_call>" + calls), *parser.flush()]
    assert [part.call.name for part in parts if part.call] == ["f", "g", "g", "g"]
