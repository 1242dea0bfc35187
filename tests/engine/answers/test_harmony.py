"""gpt-oss's messages on channels: which are reasoning, which the answer, which calls.

The texts are those of https://cookbook.openai.com/articles/openai-harmony and of vLLM's
tests/tool_parsers/test_openai_tool_parser.py; calls on the analysis channel are omlx #2216's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Calling, Function, Grammar
from gateway.jobs.steps import SequenceParams
from tests.checkpoints import write_chat
from tests.engine.answers.harness import cut, pushed
from tests.engine.chat_formats import family, row, said
from tests.engine.generation.harness import Answer, answers, job, open_engine, watch

TOKENS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"
)  # fmt: skip
BOOK = Function("book", {"type": "object"})
THOUGHT = "<|channel|>analysis<|message|>User asks 2+2.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four."
SCHEMA = Grammar("json_schema", "{}")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("harmony")
    return family(folder, tokens=TOKENS, model_type="gpt_oss")


@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_analysis_is_reasoning_and_the_final_message_text(chat: ChatTokenizer, end: str) -> None:
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
    heard = said(chat, row([BOOK]), f'{THOUGHT}{header}{{"seats":3}}<|call|>')
    assert heard["calls"] == [("book", {"seats": 3})]
    assert (heard["text"], heard["reasoning"]) == ("", "User asks 2+2.")


def test_calls_may_be_several_and_without_arguments(chat: ChatTokenizer) -> None:
    call = "<|start|>assistant<|channel|>commentary to=functions.book<|message|>{}<|call|>"
    heard = said(chat, row([BOOK]), f"<|channel|>commentary<|message|>Booking.<|end|>{call}{call}")
    assert heard["text"] == "Booking."
    assert heard["calls"] == [("book", {}), ("book", {})]
    empty = "<|channel|>commentary to=functions.book<|message|><|call|>"
    assert said(chat, row([BOOK]), empty)["calls"] == [("book", {})]


def test_arguments_that_are_no_object_and_words_like_marks_are_text(chat: ChatTokenizer) -> None:
    heard = said(chat, row([BOOK]), "<|channel|>commentary to=functions.book<|message|>foo<|call|>")
    assert (heard["text"], heard["calls"]) == ("foo", [])
    answer = "The analysis channel comes before to=functions.book, and <think> is no token."
    heard = said(chat, row([BOOK]), f"<|channel|>final<|message|>{answer}")
    assert (heard["text"], heard["calls"], heard["reasoning"]) == (answer, [], "")


def opened(folder: Path, opening: str) -> tuple[ChatTokenizer, SequenceParams]:
    """Return a chat whose template begins a message, and the parameters of an answer in it."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}" + opening + "{% endif %}"
    )
    chat = family(folder, tokens=TOKENS, model_type="gpt_oss", template=template)
    prompt = chat.prompt(job("Hi <|channel|>final<|message|>"))
    return chat, row(is_thinking=prompt.is_thinking, opening=prompt.opening)


ASSISTANT = "<|start|>assistant"


@pytest.mark.parametrize(
    "opening",
    [
        f"{ASSISTANT}<|channel|>final<|message|>",
        f"{ASSISTANT}<|channel|>analysis<|message|><|end|>{ASSISTANT}<|channel|>final<|message|>",
    ],
)
def test_an_answer_that_the_template_begins_streams(tmp_path: Path, opening: str) -> None:
    chat, params = opened(tmp_path, opening)
    assert not params.is_thinking
    assert said(chat, params, "Four.<|return|>")["text"] == "Four."
    parts = chat.answers.output_processor(params).parser.push("Four.")
    assert [part.text for part in parts] == ["Four."]
    _, after = chat.render_questions(job("Hi"))
    assert after.count("<|channel|>final<|message|>") == 1


def test_a_thought_that_the_template_begins_is_reasoning(tmp_path: Path) -> None:
    chat, params = opened(tmp_path, f"{ASSISTANT}<|channel|>analysis<|message|>")
    heard = said(chat, params, f"Hm.<|end|>{ASSISTANT}{FINAL}")
    assert params.is_thinking
    assert (heard["text"], heard["reasoning"]) == ("Four.", "Hm.")
    _, after = chat.render_questions(job("Hi"))
    begun = f"{ASSISTANT}<|channel|>analysis<|message|>"
    assert after.endswith(f"{begun}<|end|>{ASSISTANT}<|channel|>final<|message|>")


def test_a_budget_ends_a_thought_that_the_template_begins_with_its_mark(tmp_path: Path) -> None:
    chat, params = opened(tmp_path, f"{ASSISTANT}<|channel|>analysis<|message|>")
    budget = chat.answers.thinking(replace(params, thinking_budget=0)).budget
    assert budget is not None
    assert budget.forced == chat.backend.token_to_id("<|end|>")


def test_a_template_that_begins_no_message_leaves_that_to_the_model(tmp_path: Path) -> None:
    chat, params = opened(tmp_path, ASSISTANT)
    assert (params.is_thinking, params.opening) == (True, "")
    assert said(chat, params, THOUGHT + FINAL)["text"] == "Four."


def test_an_answer_without_a_header_is_text(chat: ChatTokenizer) -> None:
    for end in ("", "<|end|>", "<|return|>"):
        assert said(chat, row(), f"Four, I think.{end}")["text"] == "Four, I think."
    heard = said(chat, row(grammar=SCHEMA), "Four.")
    assert (heard["text"], heard["reasoning"]) == ("", "Four.")


@pytest.mark.parametrize("place", range(1, 28))
def test_a_header_cut_short_is_no_text(chat: ChatTokenizer, place: int) -> None:
    for header in ("assistant to=functions.book", " to=functions.book", "analysis to=functions.f"):
        token = "<|channel|>" * header.startswith("an")
        before = THOUGHT.removesuffix("assistant" * header.startswith("as"))
        for text in (token + header[:place], before + token + header[:place]):
            assert said(chat, row([BOOK]), text)["text"] == ""


INSIDE = ["<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|channel|>final<|message|>"]


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("before", ["", '\\"', "\\\\", "\n", '\\\\\\"'])
def test_tokens_in_a_string_of_a_call_are_letters(
    chat: ChatTokenizer, inside: str, before: str
) -> None:
    call = f'{HEADER}{{"text":"{before}{inside}x","n":1}}'
    for rest in ("<|call|>", f"<|end|>{ASSISTANT}{FINAL}"):
        heard = said(chat, row([BOOK]), call + rest)
        text = json.loads(f'"{before}"', strict=False) + inside + "x"
        assert heard["calls"] == [("book", {"text": text, "n": 1})]
        assert heard["text"] == ("" if rest == "<|call|>" else "Four.")


HEADER = "<|channel|>commentary to=functions.book<|message|>"


@pytest.mark.parametrize("body", ['{"a":"x', '{"a":{"b":1}', '{"a":"<|end|>', '{"a":1}}', "{"])
def test_a_call_that_is_broken_is_text(chat: ChatTokenizer, body: str) -> None:
    heard = said(chat, row([BOOK]), HEADER + body)
    assert (heard["text"], heard["calls"]) == (body, [])


def test_a_broken_call_ends_where_its_message_ends(chat: ChatTokenizer) -> None:
    heard = said(chat, row([BOOK]), f'{HEADER}{{"a":<|end|>{ASSISTANT}{FINAL}')
    assert (heard["text"], heard["calls"]) == ('{"a":Four.', [])


@pytest.mark.parametrize("body", ["", "{}", '{"a":1'])
def test_a_call_that_max_tokens_cut_is_text(chat: ChatTokenizer, body: str) -> None:
    parser = chat.answers.output_processor(row([BOOK])).parser
    parts = [*parser.push(chat.answers.marks.pattern(HEADER) + body), *parser.flush(is_cut=True)]
    assert "".join(part.text for part in parts) == body
    assert not [part for part in parts if part.call]


def test_arguments_may_have_line_breaks_and_escapes_of_their_own(chat: ChatTokenizer) -> None:
    heard = said(chat, row([BOOK]), f'{HEADER}{{"a":"x\ny\t\\d"}}<|call|>')
    assert heard["calls"] == [("book", {"a": "x\ny\t\\d"})]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), max_size=8))
def test_pieces_may_be_cut_anywhere(chat: ChatTokenizer, cuts: list[int]) -> None:
    text = "It is four, as two and two are."
    marks = chat.answers.marks.pattern(THOUGHT + "<|channel|>final<|message|>")
    heard = pushed(chat.answers.output_processor(row([BOOK])).parser, [marks, *cut(text, cuts)])
    assert (heard["text"], heard["reasoning"]) == (text, "User asks 2+2.")


def thinks(chat: ChatTokenizer, text: str, **given: Any) -> list[bool]:
    """Say a text's tokens; return whether the grammar counts for each token that follows."""
    thinking = chat.answers.thinking(row(is_thinking=True, **given))
    ids = chat.backend.encode(text, add_special_tokens=False).ids
    return [(thinking.take(token), thinking.is_on)[1] for token in ids]


@pytest.mark.parametrize("header", ["final", "final json", "final <|constrain|>json"])
def test_a_grammar_begins_with_the_final_message(chat: ChatTokenizer, header: str) -> None:
    """It does not begin with the channel's name: the model writes that itself."""
    on = thinks(chat, f"{THOUGHT}<|channel|>{header}<|message|>")
    assert on[-1] is False
    assert all(on[:-1])
    assert all(thinks(chat, "<|channel|>analysis<|message|>final<|message|>"))
    assert all(thinks(chat, "<|channel|>commentary to=functions.final<|message|>{"))


def test_only_the_final_message_is_the_answer_of_a_grammar(chat: ChatTokenizer) -> None:
    text = "<|channel|>commentary<|message|>I'll write JSON.<|end|><|start|>assistant"
    heard = said(chat, row(grammar=SCHEMA), text + '<|channel|>final<|message|>{"a":1}')
    assert heard["text"] == '{"a":1}'


def test_the_ends_of_answers_are_known(chat: ChatTokenizer) -> None:
    """A config names <|return|> alone; a call ends an answer as well."""
    ends = {chat.backend.id_to_token(token) for token in chat.answers.eos_ids}
    assert {"<|return|>", "<|call|>"} <= ends


def test_a_row_with_a_form_to_come_may_not_end_before(chat: ChatTokenizer) -> None:
    names = chat.backend.id_to_token
    stops = chat.answers.thinking(row(grammar=SCHEMA, is_thinking=True)).stops
    assert {"<|return|>", "<|call|>"} <= {names(token) for token in stops}
    stops = chat.answers.thinking(row([BOOK], grammar=SCHEMA, is_thinking=True)).stops
    assert "<|call|>" not in {names(token) for token in stops}


def test_a_named_parser_is_enough(tmp_path: Path) -> None:
    chat = family(tmp_path, tokens=TOKENS[:-1], reasoning_parser="openai_gptoss")
    assert said(chat, row(), THOUGHT + FINAL)["text"] == "Four."


ANALYSIS = "<|channel|>analysis<|message|>Hm."
ANSWER = "<|start|>assistant<|channel|>final<|message|>"


def yes_or_no(tmp_path: Path, script_text: str, budget: int | None = None) -> Answer:
    """Ask a model that is urged to say a text and to end, for one of two words."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    chat = family(write_chat(tmp_path, vocab_size=1040), tokens=TOKENS, template=template)
    engine = open_engine(tmp_path)
    script = iter(chat.backend.encode(script_text, add_special_tokens=False).ids)
    (stop,) = chat.answers.ids(["<|return|>"])

    def urge(logits: mx.array, tokens: mx.array, _: Any) -> mx.array:
        if tokens.shape[1] == 1:  # a decode step, not a prompt
            logits[:, :, next(script, stop)] += 1000
        return logits

    watch(engine, after=urge)
    choice = Grammar("choice", json.dumps(["yes", "no"]))
    text = "Say <|channel|>final<|message|>, yes or no."
    (answer,) = answers(engine, [job(text, max_tokens=60, grammar=choice, thinking_budget=budget)])
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"
    return answer


@pytest.mark.parametrize("end", ["<|end|>", "<|return|>"])
def test_the_answer_of_a_grammar_follows_thinking_in_an_engine(tmp_path: Path, end: str) -> None:
    answer = yes_or_no(tmp_path, f"{ANALYSIS}{end}{ANSWER}")
    assert answer.reasoning == "Hm."


@pytest.mark.parametrize("budget", [0, 2, 9])
def test_the_answer_of_a_grammar_follows_a_budget_in_an_engine(tmp_path: Path, budget: int) -> None:
    """It follows even where the model would go on to think."""
    answer = yes_or_no(tmp_path, f"{ANALYSIS}{' and so on' * 20}", budget)
    assert f"Hm.{' and so on' * 20}".startswith(answer.reasoning)
    assert bool(answer.reasoning) == bool(budget)


def test_thoughts_end_for_good_where_calls_and_a_form_may_follow(tmp_path: Path) -> None:
    """A model that would think in every message that it begins thinks in one of them."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    chat = family(write_chat(tmp_path, vocab_size=1040), tokens=TOKENS, template=template)
    engine = open_engine(tmp_path)
    hm, *_ = chat.backend.encode(" Hm", add_special_tokens=False).ids
    headers = ["<|start|>assistant", "<|channel|>", "analysis", "<|message|>"]
    header = [chat.backend.encode(part, add_special_tokens=False).ids for part in headers]
    opening = [token for part in header for token in part]
    written = opening[: len(header[0]) - 1]  # the prompt's end, but for the token that is read last

    def urge(logits: mx.array, tokens: mx.array, _: Any) -> mx.array:
        if tokens.shape[1] == 1:
            written.append(int(tokens[0, 0]))
            begun = [n for n in range(1, len(opening)) if written[-n:] == opening[:n]]
            logits[:, :, opening[begun[-1]] if begun else hm] += 1000
        return logits

    watch(engine, after=urge)
    form = Grammar("choice", json.dumps(["yes", "no"]))
    calling = Calling(functions=[BOOK])
    request = job("Hi", max_tokens=60, thinking_budget=3, grammar=form, calling=calling)
    (answer,) = answers(engine, [request])
    thought = [*header[1], *header[2]]
    said = [answer.ids[at : at + len(thought)] for at in range(len(answer.ids))]
    assert said.count(thought) == 1


MUSE = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
CALLED = (
    '<atem:function_calls>\n<atem:invoke name="{0}">\n'
    '<atem:parameter name="seats">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)


@pytest.mark.parametrize(
    "given",
    [
        {"model_type": "muse_glimmer"},
        {"words": "<|start|>assistant to=self<|message|>"},
        {"model_type": "muse_spark"},
    ],
)
def test_muse_thinks_to_itself_and_answers_its_user(tmp_path: Path, given: Any) -> None:
    """Its calls inside either are letters."""
    words = given.get("words", "") + "<atem:function_calls>"
    chat = family(tmp_path, tokens=MUSE, **{**given, "words": words})
    thought, call = "Let me see.", CALLED.format("book")
    text = f" to=self<|message|>{thought}{call}<|eom|><|start|>assistant"
    heard = said(chat, row([BOOK]), f"{text} to=user<|message|>Four. {call}<|eot|>")
    assert (heard["text"], heard["reasoning"]) == (f"Four. {call}", thought + call)
    assert heard["calls"] == []


@pytest.mark.parametrize(
    ("names", "written", "called"),
    [
        (["book"], "book", "book"),
        (["book"], "book.book", "book"),
        (["trip.book"], "trip.book", "trip.book"),
        (["book", "book.book"], "book.book", "book.book"),
        (["book.book", "book"], "book", "book"),
    ],
)
def test_a_function_whose_name_muse_doubles_is_called(
    tmp_path: Path, names: list[str], written: str, called: str
) -> None:
    chat = family(tmp_path, tokens=MUSE, model_type="muse_glimmer", words="<atem:function_calls>")
    functions = [Function(name, {"properties": {"seats": {"type": "string"}}}) for name in names]
    text = f" to={written}<|message|>{CALLED.format(written)}<|eom|><|start|>assistant"
    heard = said(chat, row(functions), f"{text} to=user<|message|>Done.<|eot|>")
    assert heard["calls"] == [(called, {"seats": "3"})]
    assert heard["text"] == "Done."


def test_a_call_of_no_function_that_muse_was_given_is_text(tmp_path: Path) -> None:
    chat = family(tmp_path, tokens=MUSE, model_type="muse_glimmer", words="<atem:function_calls>")
    call = CALLED.format("trip.cook")
    heard = said(chat, row([BOOK]), f" to=trip.cook<|message|>{call}<|eot|>")
    assert (heard["text"], heard["calls"]) == (call, [])
