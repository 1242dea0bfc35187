"""Thinking: the marks that open and close it in each family, and texts that only look like them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.answers.output_parts import TokenScores
from gateway.engine.answers.reasoning import REASONING_FORMATS
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Function, GenerateJob, Grammar, Sampling
from tests.checkpoints import teach_thinking, write_chat
from tests.engine.answers.harness import cut, pushed
from tests.engine.chat_formats import family, row, said
from tests.engine.generation.harness import answers, open_engine
from tests.fakes import caller

# name, special tokens, further added tokens, words of the template, text
# Sources: vLLM's tests/reasoning/test_*_reasoning_parser.py; the templates of LGAI-EXAONE's
# EXAONE-Deep and of ibm-granite's 3.3 for theirs.
FAMILIES: list[tuple[str, tuple[str, ...], tuple[str, ...], str, str]] = [
    ("qwen3", (), ("<think>", "</think>"), "", "<think>\n{}</think>\n\n{}"),
    ("qwen3", (), (), "<think> </think>", "<think>\n{}</think>\n\n{}"),
    ("mistral", ("[THINK]", "[/THINK]"), (), "", "[THINK]{}[/THINK]{}"),
    ("seed_oss", (), ("<seed:think>", "</seed:think>"), "", "<seed:think>{}</seed:think>{}"),
    ("granite", (), (), "Here is my thought process:",
     "Here is my thought process: {} Here is my response: {}"),
    ("granite", (), (), "Here is my thought process:",
     "Here's my thought process: {} Here's my response: {}"),
    ("granite_response", (), (), "<think></think> <response></response>",
     "<think>{}</think><response>{}</response>"),
    ("exaone_deep", (), (), "<thought>", "<thought>\n{}</thought>\n\n{}"),
    ("gemma4", ("<|channel>", "<channel|>"), (), "", "<|channel>thought\n{}<channel|>{}"),
    ("longcat", (), ("<longcat_think>", "</longcat_think>"), "",
     "<longcat_think>{}</longcat_think>{}"),
    ("cohere_command3",
     ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"), (), "",
     "<|START_THINKING|>{}<|END_THINKING|>\n<|START_RESPONSE|>{}<|END_RESPONSE|>"),
    ("minimax_m3", (), ("<mm:think>", "</mm:think>"), "", "<mm:think>{}</mm:think>{}"),
    ("minimax_m3", (), (), "<mm:think> <think>", "<mm:think>\n{}</mm:think>\n\n{}"),
    ("apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), (), "",
     "<|inner_prefix|>{}<|inner_suffix|>{}"),
    ("hunyuan_a13b", (), (), "<think> <answer> </answer>",
     "<think>\n{}</think>\n<answer>\n{}</answer>"),
]  # fmt: skip
IDS = [f"{each[0]}-{i}" for i, each in enumerate(FAMILIES)]


@pytest.mark.parametrize("each", FAMILIES, ids=IDS)
def test_thinking_is_reasoning_in_each_family(tmp_path: Path, each: Any) -> None:
    """A mark inside an answer does not cut it: it counts only before any text."""
    name, tokens, added, words, text = each
    chat = family(tmp_path, tokens=tokens, added=added, words=words)
    assert chat.answers.reasoning == REASONING_FORMATS[name]
    heard = said(chat, row(may_think=True), text.format("Let me see.", "It is four."))
    assert (heard["reasoning"].strip(), heard["text"].strip()) == ("Let me see.", "It is four.")
    cut_off = said(chat, row(may_think=True), text.format("Let me see.", "X").split(" see")[0])
    assert (cut_off["reasoning"].strip(), cut_off["text"]) == ("Let me", "")
    opening = text.split("{}")[0].strip()
    heard = said(chat, row(may_think=True), f"The mark {opening} opens it.")
    assert heard["reasoning"] == ""
    assert heard["text"].startswith("The mark")
    assert heard["text"].endswith("opens it.")
    assert (opening in heard["text"]) == (not any(token in opening for token in tokens))


def test_a_template_with_a_tools_response_is_not_granites(tmp_path: Path) -> None:
    """MiniMax's has results of tools between those marks, which an answer may write as text."""
    chat = family(tmp_path, words="<think> </think> <response> </response>")
    heard = said(chat, row(may_think=True), "<think>So.</think><response>ok</response>")
    assert heard["text"] == "<response>ok</response>"


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 80), max_size=8))
def test_marks_in_words_may_be_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    chat = family(tmp_path_factory.mktemp("granite"), words="Here is my thought process:")
    text = "Here is my thought process: Hm. Here is my response: Four."
    heard = pushed(chat.answers.output_processor(row()).parser, cut(text, cuts))
    assert (heard["reasoning"].strip(), heard["text"]) == ("Hm.", "Four.")


def test_letters_that_spell_a_token_are_no_mark(tmp_path: Path) -> None:
    """A tokenizer with the token never writes it in letters; a model that does means the word."""
    chat = family(tmp_path, added=("<think>", "</think>"))
    parser = chat.answers.output_processor(row()).parser
    assert pushed(parser, ("<th", "ink>", "x"))["text"] == "<think>x"


def test_thinking_may_begin_again_after_a_call(tmp_path: Path) -> None:
    chat = family(tmp_path, added=("<think>", "</think>"), words="<tool_call> tool_call.name")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>one</think>Calling. {call}\n<think>two</think>{call}"
    heard = said(chat, row([Function("f", {})]), text)
    assert heard["reasoning"] == "onetwo"
    assert heard["text"].strip() == "Calling."
    assert len(heard["calls"]) == 2


def test_minimax_m3_may_end_a_thought_that_it_never_began(tmp_path: Path) -> None:
    chat = family(tmp_path, added=("<mm:think>", "</mm:think>"))
    heard = said(chat, row(may_think=True), "</mm:think>Four.")
    assert (heard["text"], heard["reasoning"]) == ("Four.", "")


def test_apertus_may_call_in_the_midst_of_a_thought(tmp_path: Path) -> None:
    tokens = "<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"
    chat = family(tmp_path, tokens=tokens, words="<|inner_prefix|> <|tools_prefix|>")
    text = '<|inner_prefix|>Let me see.<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>'
    heard = said(chat, row([Function("f", {})], may_think=True), text)
    assert (heard["calls"], heard["reasoning"]) == ([("f", {"a": 1})], "Let me see.")
    assert heard["text"] == ""


SAID = "asked: {{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("model_type", "asked", "said"),
    [
        ("llama", {}, ""),  # the template's own default
        ("llama", {"enable_thinking": False}, "False False"),
        ("llama", {"enable_thinking": True}, "True True"),
        ("gpt_oss", {"reasoning_effort": "max"}, "high"),
        ("gpt_oss", {"enable_thinking": False}, "False low"),
        ("gpt_oss", {"reasoning_effort": "medium"}, "medium"),
    ],
)
def test_templates_are_told_of_thinking_in_their_own_words(
    tmp_path: Path, model_type: str, asked: dict[str, Any], said: str
) -> None:
    tokens = ("[THINK]", "[/THINK]")
    chat = family(tmp_path, tokens=tokens, template=SAID, model_type=model_type)
    ids = chat.prompt(job("Hello", template_args=asked)).ids
    told = chat.backend.decode(ids, skip_special_tokens=False)
    assert told.partition("asked:")[2].split() == said.split()


def test_the_mark_that_opens_the_thinking_is_no_token_of_the_content(tmp_path: Path) -> None:
    """Logprobs are of the shown text; an answer of one token shows that token, whatever it is."""
    chat = family(tmp_path, added=("<think>", "</think>"))
    scores = TokenScores(-0.5, [], [], 0)
    ids = chat.backend.encode("<think>a</think>b", add_special_tokens=False).ids
    output = chat.answers.output_processor(row())
    for token in ids:
        output.push(token, scores, is_shown_as_text=True)
    output.finish()
    assert [each.chosen.token for each in output.take_logprobs(is_last=True)] == ["b"]
    output = chat.answers.output_processor(row())
    output.push(ids[0], scores, is_shown_as_text=False)
    assert [each.chosen.token for each in output.take_logprobs(is_last=True)] == ["<think>"]


@pytest.fixture(scope="module", params=[False, True], ids=["may", "opens"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> GenerationEngine:
    """Load a random model that knows <think>; the template of one of the two opens it."""
    folder = write_chat(tmp_path_factory.mktemp("thinker"), vocab_size=1030)
    return open_engine(teach_thinking(folder, opens=request.param))


def job(text: str, grammar: Grammar | None = None, **given: Any) -> GenerateJob:
    turns = [{"role": "user", "content": text}]
    whole: dict[str, Any] = {"messages": turns, "sampling": Sampling(temperature=0), **given}
    return GenerateJob(caller=caller(), max_tokens=40, grammar=grammar, **whole)


def asked(engine: GenerationEngine, job: GenerateJob) -> tuple[str, str, str | None]:
    """Return the text, the reasoning and the end of an answer."""
    (answer,) = answers(engine, [job])
    return answer.text, answer.reasoning, answer.finish_reason or answer.error


HOSTILE = [
    "What does the tag <think> mean?", "<think>", "</think>", "a</think><think>",
    "<think>\n\n</think>\n\n<think>\n",
]  # fmt: skip
OFF = {"enable_thinking": False}
YES_OR_NO = Grammar("choice", json.dumps(["yes", "no"]))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_prompt_says_nothing_about_thinking(engine: GenerationEngine, text: str) -> None:
    (plain,), (hostile,) = engine.prepare(job("Hello")), engine.prepare(job(text))
    assert (hostile.is_thinking, hostile.may_think) == (plain.is_thinking, plain.may_think)
    (off,) = engine.prepare(job(text, template_args=OFF))
    assert (off.is_thinking, off.may_think) == (False, False)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_mark_in_the_prompt_does_not_switch_a_grammar_off(
    engine: GenerationEngine, text: str
) -> None:
    said, *others = asked(engine, job(text, YES_OR_NO, template_args=OFF))
    assert said in ("yes", "no")
    assert others == ["", "stop"]


@pytest.mark.parametrize("answer", ["the tag <think> opens it", "x </think> y", "<think"])
def test_a_mark_in_an_answer_that_a_grammar_made_is_text(
    engine: GenerationEngine, answer: str
) -> None:
    choice = Grammar("choice", json.dumps([answer]))
    assert asked(engine, job("Say it.", choice, template_args=OFF)) == (answer, "", "stop")
    schema = {"type": "object", "properties": {"a": {"const": answer}}, "required": ["a"]}
    grammar = Grammar("json_schema", json.dumps({**schema, "additionalProperties": False}))
    said, *_ = asked(engine, job("Say it.", grammar, template_args=OFF))
    assert json.loads(said) == {"a": answer}


def test_the_template_that_always_asks_still_opens_the_thinking(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = family(tmp_path / "a", added=("<think>", "</think>"), template=template + "|<think>\n")
    assert chat.prompt(job("Hello")).is_thinking
    chat = family(tmp_path / "b", added=("<think>", "</think>"), template=template)
    assert not chat.prompt(job("Hello <think>")).is_thinking


def test_an_end_inside_the_thinking_closes_it_where_a_form_was_promised(tmp_path: Path) -> None:
    """Otherwise the answer would be empty, though a schema was asked for."""
    engine = open_engine(teach_thinking(write_chat(tmp_path, vocab_size=1030), opens=True))
    (eos,) = engine.tokens.answers.eos_ids
    urge = Sampling(temperature=0, logit_bias={eos: 100.0})
    text, _, end = asked(engine, job("Well?", YES_OR_NO, sampling=urge))
    assert text in ("yes", "no")
    assert end == "stop"
    assert asked(engine, job("Well?", sampling=urge)) == ("", "", "stop")
