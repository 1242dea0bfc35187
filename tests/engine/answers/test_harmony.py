"""gpt-oss's messages on channels: which are reasoning, which the answer, which calls.

The texts are those of https://cookbook.openai.com/articles/openai-harmony and of vLLM's
tests/tool_parsers/test_openai_tool_parser.py; calls on the analysis channel are omlx #2216's.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs import Calling, Delta, Function, GenerateJob, Grammar, Sampling
from tests.checkpoints import write_chat
from tests.engine.chat_formats import family, gathered, row, said
from tests.engine.generation.harness import join
from tests.fakes import caller

TOKENS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"
)  # fmt: skip
BOOK = Function("book", {"type": "object"})
THOUGHT = "<|channel|>analysis<|message|>User asks 2+2.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four."
SCHEMA = Grammar("json_schema", "{}")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Load a tokenizer with gpt-oss's tokens."""
    folder = tmp_path_factory.mktemp("harmony")
    return family(folder, tokens=TOKENS, model_type="gpt_oss")


@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_analysis_is_reasoning_and_the_final_message_is_the_answer(
    chat: ChatTokenizer, end: str
) -> None:
    """However the last one ends."""
    heard = said(chat, row(), THOUGHT + FINAL + end)
    assert (heard["text"], heard["reasoning"]) == ("Four.", "User asks 2+2.")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.book <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.book<|message|>",
        " to=functions.book<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.book code<|message|>",
        "<|channel|>commentary to=book<|message|>",
    ],
)
def test_a_message_to_a_function_is_a_call(chat: ChatTokenizer, header: str) -> None:
    """On any channel, wherever the header names it."""
    heard = said(chat, row([BOOK]), f'{THOUGHT}{header}{{"seats":3}}<|call|>')
    assert heard["calls"] == [("book", {"seats": 3})]
    assert (heard["text"], heard["reasoning"]) == ("", "User asks 2+2.")


def test_calls_may_be_several_and_without_arguments(chat: ChatTokenizer) -> None:
    """Each in its message; text that the user may read before them is text."""
    call = "<|start|>assistant<|channel|>commentary to=functions.book<|message|>{}<|call|>"
    heard = said(chat, row([BOOK]), f"<|channel|>commentary<|message|>Booking.<|end|>{call}{call}")
    assert heard["text"] == "Booking."
    assert heard["calls"] == [("book", {}), ("book", {})]
    empty = "<|channel|>commentary to=functions.book<|message|><|call|>"
    assert said(chat, row([BOOK]), empty)["calls"] == [("book", {})]


def test_arguments_that_are_no_object_are_text(chat: ChatTokenizer) -> None:
    """Nothing a model said is lost."""
    heard = said(chat, row([BOOK]), "<|channel|>commentary to=functions.book<|message|>foo<|call|>")
    assert (heard["text"], heard["calls"]) == ("foo", [])


def test_an_answer_that_speaks_of_channels_is_text(chat: ChatTokenizer) -> None:
    """Words are not tokens."""
    answer = "The analysis channel comes before to=functions.book, and <think> is no token."
    heard = said(chat, row([BOOK]), f"<|channel|>final<|message|>{answer}")
    assert (heard["text"], heard["calls"], heard["reasoning"]) == (answer, [], "")


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 40), max_size=8))
def test_pieces_may_be_cut_anywhere(chat: ChatTokenizer, cuts: list[int]) -> None:
    """Between tokens that are marks and within text."""
    text = "It is four, as two and two are."
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pattern = chat._marks.pattern
    parser = chat.output_processor(row([BOOK])).parser
    parts = parser.push(pattern(THOUGHT + "<|channel|>final<|message|>"))
    for a, b in pairwise(edges):
        parts += parser.push(text[a:b])
    heard = gathered([*parts, *parser.flush()])
    assert (heard["text"], heard["reasoning"]) == (text, "User asks 2+2.")


def thinks(chat: ChatTokenizer, text: str, **given: Any) -> list[bool]:
    """Say a text's tokens; return whether the grammar counts for each token that follows."""
    thinking = chat.thinking(row(is_thinking=True, **given))
    ids = chat.backend.encode(text, add_special_tokens=False).ids
    return [(thinking.take(token), thinking.is_on)[1] for token in ids]


@pytest.mark.parametrize("header", ["final", "final json", "final <|constrain|>json"])
def test_a_grammar_begins_with_the_final_message(chat: ChatTokenizer, header: str) -> None:
    """Not with its channel's name: the model writes that itself."""
    on = thinks(chat, f"{THOUGHT}<|channel|>{header}<|message|>")
    assert on[-1] is False
    assert all(on[:-1])
    assert all(thinks(chat, "<|channel|>analysis<|message|>final<|message|>"))
    assert all(thinks(chat, "<|channel|>commentary to=functions.final<|message|>{"))


def test_only_the_final_message_is_the_answer_of_a_grammar(chat: ChatTokenizer) -> None:
    """A preamble would break the JSON."""
    text = "<|channel|>commentary<|message|>I'll write JSON.<|end|><|start|>assistant"
    heard = said(chat, row(grammar=SCHEMA), text + '<|channel|>final<|message|>{"a":1}')
    assert heard["text"] == '{"a":1}'


def test_a_forced_call_is_written_in_the_final_message(chat: ChatTokenizer) -> None:
    """In the form that its grammar has for every model."""
    calling = Calling(functions=[BOOK], forced=True)
    job = row(calling=calling, grammar=SCHEMA)
    call = '<|channel|>final<|message|>{"name":"book","arguments":{"a":1}}'
    heard = said(chat, job, THOUGHT + call)
    assert heard["calls"] == [("book", {"a": 1})]
    assert json.dumps(heard["text"]) == '""'


def test_the_ends_of_answers_are_known(chat: ChatTokenizer) -> None:
    """A config names <|return|> alone; a call ends an answer as well."""
    ends = {chat.backend.id_to_token(token) for token in chat.eos_ids}
    assert {"<|return|>", "<|call|>"} <= ends


def test_a_row_with_a_form_to_come_may_not_end_before(chat: ChatTokenizer) -> None:
    """Unless it calls, where it may."""
    names = chat.backend.id_to_token
    stops = chat.thinking(row(grammar=SCHEMA, is_thinking=True)).stops
    assert {"<|return|>", "<|call|>"} <= {names(token) for token in stops}
    stops = chat.thinking(row([BOOK], grammar=SCHEMA, is_thinking=True)).stops
    assert "<|call|>" not in {names(token) for token in stops}


def test_a_named_parser_is_enough(tmp_path: Path) -> None:
    """In models.yaml, for a checkpoint of another type."""
    chat = family(tmp_path, tokens=TOKENS[:-1], reasoning_parser="openai_gptoss")
    assert said(chat, row(), THOUGHT + FINAL)["text"] == "Four."


class Urged:
    """A model that says these tokens, one after another, wherever it may, and then wants to end."""

    def __init__(self, model: Any, tokens: list[int], end: int) -> None:
        self._model = model
        self._tokens = iter(tokens)
        self._end = end

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        if tokens.shape[1] == 1:  # a decode step, not a prompt
            logits[:, :, next(self._tokens, self._end)] += 1000
        return logits


ANALYSIS = "<|channel|>analysis<|message|>Hm."
ANSWER = "<|start|>assistant<|channel|>final<|message|>"


def yes_or_no(tmp_path: Path, script: str, budget: int | None = None) -> list[Delta]:
    """Ask a model that is urged to say a text and to end, for one of two words."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    chat = family(write_chat(tmp_path, vocab_size=1040), tokens=TOKENS, template=template)
    engine = load_generation(
        tmp_path,
        name="t",
        device=Device.CPU,
        dtype=None,
        max_context=None,
        chat_template=None,
        template_args={},
    )
    (stop,) = chat._ids(["<|return|>"])
    engine._model = Urged(engine._model, chat._unspell(script), stop)
    (planned,) = engine.prepare(
        GenerateJob(
            caller=caller(),
            messages=[{"role": "user", "content": "Say <|channel|>final<|message|>, yes or no."}],
            sampling=Sampling(temperature=0),
            max_tokens=60,
            grammar=Grammar("choice", json.dumps(["yes", "no"])),
            thinking_budget=budget,
        )
    )
    assert planned.grammar is not None
    join(engine, replace(planned, compiled=engine.compile(planned.grammar)))
    deltas: list[Delta] = []
    while engine.is_prefilling or engine.is_decoding:
        deltas += engine.prefill(512) if engine.is_prefilling else []
        deltas += engine.decode()
    assert "".join(delta.text for delta in deltas) in ("yes", "no")
    assert deltas[-1].finish_reason == "stop"
    return deltas


@pytest.mark.parametrize("end", ["<|end|>", "<|return|>"])
def test_the_answer_of_a_grammar_follows_the_thinking_in_an_engine(
    tmp_path: Path, end: str
) -> None:
    """Also where the model would end within it: it cannot, before its final message."""
    deltas = yes_or_no(tmp_path, f"{ANALYSIS}{end}{ANSWER}")
    assert "".join(delta.reasoning for delta in deltas) == "Hm."


@pytest.mark.parametrize("budget", [0, 2, 9])
def test_the_answer_of_a_grammar_follows_a_budget_in_an_engine(tmp_path: Path, budget: int) -> None:
    """Whatever the model would go on to think."""
    deltas = yes_or_no(tmp_path, f"{ANALYSIS}{' and so on' * 20}", budget)
    thought = [delta.reasoning for delta in deltas if delta.reasoning]
    assert f"Hm.{' and so on' * 20}".startswith("".join(thought))
    assert len(thought) == budget
