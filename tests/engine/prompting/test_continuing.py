"""Answers that go on from a beginning that the caller has written."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.errors import BadRequest
from gateway.jobs.chat import Calling, Function, GenerateJob, Grammar, Sampling
from tests.checkpoints import teach_thinking, write_chat
from tests.engine.chat_formats import family, row, said
from tests.engine.generation.harness import answers, open_engine
from tests.fakes import caller

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def job(beginning: str, **given: Any) -> GenerateJob:
    turns = [
        {"role": "user", "content": "Say <think> and more."},
        {"role": "assistant", "content": beginning},
    ]
    whole: dict[str, Any] = {"messages": turns, "sampling": Sampling(temperature=0), **given}
    return GenerateJob(caller=caller(), max_tokens=8, continues=True, **whole)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("chat")
    return family(folder, added=("<think>", "</think>"), template=TEMPLATE)


@pytest.mark.parametrize("mark", ["<think>", "</think>", "<|end|>", "<|user|>"])
def test_special_tokens_in_the_beginning_are_plain_text(chat: ChatTokenizer, mark: str) -> None:
    prompt = chat.prompt(job(f"a {mark} b"))
    whole = chat.prompt(job("a b")).ids
    token = chat.backend.token_to_id(mark)
    assert token is not None
    assert prompt.ids.count(token) == whole.count(token)
    text = chat.backend.decode(prompt.ids, skip_special_tokens=False)
    assert text.endswith(f"<|assistant|>a {mark} b")
    assert (prompt.is_thinking, prompt.may_think) == (False, False)


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from(["<think>", "<|end|>", " ", "a", "<", "|>", "é", "\n"]), min_size=1)
)
def test_any_beginning_comes_through_whole(chat: ChatTokenizer, pieces: list[str]) -> None:
    ids = chat.prompt(job("".join(pieces))).ids
    text = chat.backend.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|assistant|>" + "".join(pieces))
    control = chat.backend.get_added_tokens_decoder()
    assistant = chat.backend.token_to_id("<|assistant|>")
    at = max(i for i, token in enumerate(ids) if token == assistant) + 1
    assert not any(token in control for token in ids[at:])


def test_a_continued_answer_opens_no_thinking(chat: ChatTokenizer) -> None:
    assert said(chat, row(is_continued=True), "<think> is a tag")["text"] == "<think> is a tag"


def test_a_continued_message_of_gpt_oss_is_its_final_one(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}"
        "<|return|>{% endfor %}"
    )
    tokens = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    chat = family(tmp_path, tokens=tokens, template=template, model_type="gpt_oss")
    text = chat.backend.decode(chat.prompt(job("Fo")).ids, skip_special_tokens=False)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>Fo")
    assert said(chat, row(is_continued=True), "ur.")["text"] == "ur."


def test_a_template_that_leaves_the_message_out_is_told(tmp_path: Path) -> None:
    chat = family(tmp_path, template="{{ messages[0].content }}")
    with pytest.raises(BadRequest, match="cannot continue"):
        chat.prompt(job("Once"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> GenerationEngine:
    """Load a random model whose template opens a block of thinking."""
    folder = write_chat(tmp_path_factory.mktemp("thinker"), vocab_size=1030)
    return open_engine(teach_thinking(folder, opens=True))


def test_the_answer_leaves_the_beginning_out_and_is_no_reasoning(engine: GenerationEngine) -> None:
    (planned,) = engine.prepare(job("Once upon a time"))
    assert (planned.is_thinking, planned.may_think, planned.is_continued) == (False, False, True)
    (answer,) = answers(engine, [job("Once upon a time")])
    assert answer.text
    assert not answer.reasoning
    assert "Once upon" not in answer.text


def test_a_continued_answer_is_held_to_no_form(engine: GenerationEngine) -> None:
    strict = Calling(functions=[Function("f", {"type": "object"}, strict=True)])
    for more in ({"grammar": Grammar("choice", json.dumps(["a"]))}, {"calling": strict}):
        with pytest.raises(BadRequest, match="continued"):
            engine.prepare(job("Once", **more))
