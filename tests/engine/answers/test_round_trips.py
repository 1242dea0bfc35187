"""Calls of arbitrary functions, as each family writes them: read back as they were written, and
text where they were cut.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.engine.answers.output_parts import TOKENS
from gateway.engine.answers.tool_formats import TOOL_FORMATS
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Function
from tests.engine.answers.written_calls import (
    DIVIDER,
    FORMS,
    MARKS,
    PROSE,
    Calls,
    Form,
    Made,
    divided,
    made,
)
from tests.engine.chat_formats import family, gathered, open_tokenizer, row

LONGEST_MARK = max(map(len, MARKS))
UNHURRIED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@dataclass(frozen=True)
class Case:
    """A form, and tokenizers that have its marks as tokens and that have only their letters."""

    form: Form
    with_tokens: ChatTokenizer
    with_letters: ChatTokenizer

    @property
    def spellings(self) -> list[str]:
        """List how an answer's marks may be spelled, by those around texts and those inside."""
        return ["split"] if self.form.is_split else ["letters", "tokens", "split"]

    def chat(self, spelling: str) -> ChatTokenizer:
        return self.with_letters if spelling == "letters" else self.with_tokens

    def written(self, calls: Calls, spelling: str, before: str = "") -> str:
        """Write an answer, with dividers where a mark's letters are not its token."""
        if spelling == "split":
            calls = [{**call, "arguments": divided(call["arguments"])} for call in calls]
        return (self.form.before.format(before) if before else "") + self.form.write(calls)


def opened(folder: Path, form: Form, tokens: Sequence[str]) -> ChatTokenizer:
    """Open a tokenizer that has these tokens, and no others of demo-chat's that mark calls."""
    family(folder, tokens=tokens)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"] = [
        each
        for each in tokenizer["added_tokens"]
        if each["content"] in tokens or "tool_call" not in each["content"]
    ]
    file.write_text(json.dumps(tokenizer))
    return open_tokenizer(
        folder, eos_ids=2, tool_parser=form.format, reasoning_parser=form.reasoning
    )


@pytest.fixture(scope="module", params=FORMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    form, folder = FORMS[request.param], tmp_path_factory.mktemp(request.param)
    with_tokens = opened(folder / "tokens", form, form.tokens)
    with_letters = with_tokens if form.is_split else opened(folder / "letters", form, ())
    return Case(form, with_tokens, with_letters)


def spelled(chat: ChatTokenizer, written: str) -> list[str]:
    """Return an answer's runs of letters and its tokens, as a parser gets them."""
    runs = [chat.answers.marks.pattern(run) for run in written.split(DIVIDER)]
    return [run for run in TOKENS.split("".join(runs)) if run]


def pieces(runs: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Cut runs of letters into pieces of these sizes, in turn."""
    size = cycle(sizes)
    for run in runs:
        at = 0
        while at < len(run):
            length = len(run) if TOKENS.fullmatch(run) else next(size)
            yield run[at : at + length]
            at += length


def ids(chat: ChatTokenizer, written: str) -> list[int]:
    encode = chat.backend.encode
    return [i for run in written.split(DIVIDER) for i in encode(run, add_special_tokens=False).ids]


def said_in_tokens(chat: ChatTokenizer, functions: Sequence[Function], written: str) -> Any:
    output = chat.answers.output_processor(row(functions))
    parts = [
        part for i in ids(chat, written) for part in output.push(i, None, is_shown_as_text=True)
    ]
    return gathered([*parts, *output.finish()])


def said_in_pieces(
    chat: ChatTokenizer,
    functions: Sequence[Function],
    given: Sequence[str],
    *,
    is_cut: bool = False,
    is_thinking: bool = False,
) -> Any:
    parser = chat.answers.output_processor(row(functions, is_thinking=is_thinking)).parser
    parts = [part for piece in given for part in parser.push(piece)]
    return gathered([*parts, *(parser.flush(is_cut=True) if is_cut else parser.flush())])


def exactly(calls: Sequence[Any]) -> list[str]:
    """Return calls as JSON, in which 1, 1.0 and true differ."""
    return [json.dumps(call) for call in calls]


def pairs_of(calls: Calls) -> list[tuple[str, Any]]:
    return [(call["name"], call["arguments"]) for call in calls]


def bare_letters(text: str) -> str:
    return re.sub(r"\s+", "", text)


@st.composite
def answers(draw: st.DrawFn, case: Case) -> tuple[Made, str, str, str]:
    """Draw calls, the text before them, the spelling of marks and the whole answer."""
    calls = draw(made(case.form))
    before = "" if case.form.is_bare else draw(PROSE)
    spelling = draw(st.sampled_from(case.spellings))
    return calls, before, spelling, case.written(calls.calls, spelling, before)


def read_back(case: Case, data: st.DataObject) -> None:
    given, before, spelling, written = data.draw(answers(case))
    chat = case.chat(spelling)
    way = data.draw(st.sampled_from(["tokens", "whole", "pieces"]))
    if way == "tokens":
        heard = said_in_tokens(chat, given.functions, written)
    else:
        sizes = [len(written)]
        if way == "pieces":
            sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
        heard = said_in_pieces(chat, given.functions, list(pieces(spelled(chat, written), sizes)))
    assert exactly(heard["calls"]) == exactly(pairs_of(given.calls))
    assert (heard["text"], heard["reasoning"]) == (before, "")


@pytest.mark.generator(weight=0.05)
@settings(max_examples=8, suppress_health_check=UNHURRIED)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(case: Case, data: st.DataObject) -> None:
    read_back(case, data)


@pytest.mark.soak
@settings(max_examples=10_000, suppress_health_check=UNHURRIED)
@given(data=st.data())
def test_thousands_of_calls_are_read_as_they_were_written(case: Case, data: st.DataObject) -> None:
    read_back(case, data)


def first_runs(runs: Sequence[str], place: int) -> list[str]:
    """Return the runs up to a place, with the token whole in which it is."""
    begun = []
    for run in runs:
        if place <= 0:
            break
        begun.append(run if TOKENS.fullmatch(run) else run[:place])
        place -= len(run)
    return begun


def check_cut(case: Case, given: Made, before: str, chat: ChatTokenizer, runs: list[str]) -> int:
    """Say an answer that max_tokens cut: only whole calls are calls, and the rest is text. Return
    the number of calls.
    """
    heard = said_in_pieces(chat, given.functions, runs, is_cut=True)
    count = len(heard["calls"])
    assert exactly(heard["calls"]) == exactly(pairs_of(given.calls))[:count]
    if case.form.is_split:
        return count  # headers are dropped
    shown, answer = (
        shown_letters(case.form, text)
        for text in (heard["text"], re.sub("[\ud800-\ud802]", "", "".join(runs)))
    )
    if not count:
        assert shown == answer
        return count
    assert shown.startswith(bare_letters(before))
    rest = shown.removeprefix(bare_letters(before))
    assert answer.endswith(rest)
    called = shown_letters(case.form, case.written(given.calls[:count], "letters", before))
    if answer.startswith(called):  # else the calls are one list
        left = answer.removeprefix(called)
        assert rest.endswith(left) or len(left) < LONGEST_MARK
    return count


def shown_letters(form: Form, text: str) -> str:
    """Return text without white space, and without marks that a reader may not see."""
    for mark in (*TOOL_FORMATS[form.format].noise, *form.tokens):
        text = text.replace(mark, "")
    return bare_letters(text)


def cut_anywhere(case: Case, data: st.DataObject) -> None:
    given, before, spelling, written = data.draw(answers(case))
    chat = case.chat(spelling)
    runs = spelled(chat, written)
    places = st.integers(0, sum(map(len, runs)))
    for place in data.draw(st.lists(places, min_size=1, max_size=5)):
        check_cut(case, given, before, chat, first_runs(runs, place))


@pytest.mark.generator(weight=0.05)
@settings(max_examples=8, suppress_health_check=UNHURRIED)
@given(data=st.data())
def test_a_call_that_max_tokens_cuts_is_text_or_whole(case: Case, data: st.DataObject) -> None:
    cut_anywhere(case, data)


@pytest.mark.soak
@settings(max_examples=2000, suppress_health_check=UNHURRIED)
@given(data=st.data())
def test_thousands_of_cut_calls_are_text_or_whole(case: Case, data: st.DataObject) -> None:
    cut_anywhere(case, data)


WRITE = Function(
    "write_file",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    },
)
SHOWN = Function("shown", {"type": "object", "properties": {"first": {"type": "string"}}})
READ = {"name": "shown", "arguments": {"first": "a.py"}}


def written_file(form: Form) -> dict[str, Any]:
    """Return a call whose text holds a whole call of the same form."""
    content = f"Amid\n{form.quoted}\nthe end"
    return {"name": "write_file", "arguments": {"path": "a.py", "content": content}}


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_call_cut_at_any_place_is_text_or_whole(case: Case, step: int) -> None:
    """Each spelling is cut at places of its own."""
    given = Made([WRITE, SHOWN], [READ, written_file(case.form)])
    before = "" if case.form.is_bare else "Let me see.\n\n"
    for start, spelling in enumerate(case.spellings):
        chat = case.chat(spelling)
        runs = spelled(chat, case.written(given.calls, spelling, before))
        length = sum(map(len, runs))
        counts = [
            check_cut(case, given, before, chat, first_runs(runs, place))
            for place in range(start, length + 1, step)
        ]
        assert counts[0] == 0
        assert check_cut(case, given, before, chat, runs) == 2


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_an_answer_that_ends_inside_a_value_makes_no_call_of_it(case: Case, step: int) -> None:
    """The model itself ended it there."""
    call = written_file(case.form)
    for spelling in case.spellings:
        chat = case.chat(spelling)
        written = case.written([call], spelling)
        start, end = written.index("Amid"), written.index("the end")
        for place in range(start + 1, end + 4, step):
            if DIVIDER in written[place - 1 : place + 1]:
                continue
            heard = said_in_pieces(chat, [WRITE, SHOWN], spelled(chat, written[:place]))
            assert heard["calls"] == [], written[:place]
            assert "write_file" in heard["text"] or case.form.is_split


THINKERS = [name for name, form in FORMS.items() if form.opens]
thinkers = pytest.mark.parametrize("case", THINKERS, indirect=True)
THOUGHT = "I should read a.py first."


@thinkers
def test_a_whole_call_at_the_end_of_an_open_thought_is_a_call(case: Case) -> None:
    for spelling in ("letters", "tokens"):
        chat = case.chat(spelling)
        runs = spelled(chat, f"{THOUGHT}\n{case.written([READ], spelling)}")
        for sizes in ([1], [7], [10_000]):
            given = list(pieces(runs, sizes))
            heard = said_in_pieces(chat, [SHOWN], given, is_thinking=True)
            assert heard["calls"] == pairs_of([READ])
            assert heard["reasoning"].strip() == THOUGHT
            assert not heard["text"].strip()


def ends_thoughts(case: Case, spelling: str) -> bool:
    """Tell if the mark that begins a call is a special token, which no thought holds, and another
    mark says that the call is over.
    """
    (begun, *_) = spelled(case.chat(spelling), case.form.write([READ]))
    is_token = TOKENS.fullmatch(begun) is not None
    return is_token and all(end for _, end in TOOL_FORMATS[case.form.format].marks[:1])


@thinkers
def test_a_call_in_a_thought_that_is_closed_is_part_of_the_thought(case: Case) -> None:
    """This holds for a mark in letters: a special token ends the thought."""
    for spelling in ("letters", "tokens"):
        chat, call = case.chat(spelling), case.written([READ], spelling)
        answer = f"{THOUGHT}\n{call}\nOr not.{case.form.closes}\n\nDone."
        for sizes in ([1], [7], [10_000]):
            given = list(pieces(spelled(chat, answer), sizes))
            heard = said_in_pieces(chat, [SHOWN], given, is_thinking=True)
            if ends_thoughts(case, spelling):
                assert heard["calls"] == pairs_of([READ])
                assert heard["reasoning"].strip() == THOUGHT
                assert "Or not." in heard["text"]
            else:
                assert heard["calls"] == []
                letters = shown_letters(case.form, f"{THOUGHT}\n{call}\nOr not.")
                assert shown_letters(case.form, heard["reasoning"]) == letters
            assert heard["text"].endswith("Done.")


@thinkers
@pytest.mark.generator(weight=0.05)
@settings(max_examples=8, suppress_health_check=UNHURRIED)
@given(data=st.data())
def test_nothing_is_lost_of_a_thought_and_calls(case: Case, data: st.DataObject) -> None:
    """Wherever the thought closes, and whether the answer ends or is cut."""
    given, before, _, written = data.draw(answers(case))
    chat = case.with_letters
    assume(DIVIDER not in written)
    place = data.draw(st.sampled_from([0, len(before), len(written)]))
    closes = data.draw(st.sampled_from(["", case.form.closes]))
    answer = written[:place] + closes + written[place:]
    heard = said_in_pieces(
        chat,
        given.functions,
        list(pieces([answer], data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))),
        is_thinking=True,
        is_cut=data.draw(st.booleans()),
    )
    assert bare_letters(answer).startswith(bare_letters(heard["reasoning"]))
    if heard["calls"]:
        return  # text that stood in a value may be a call where the thought closes inside of it
    letters = [
        shown_letters(case.form, text.replace(case.form.closes, ""))
        for text in (heard["reasoning"] + heard["text"], answer)
    ]
    assert letters[0] == letters[1]
