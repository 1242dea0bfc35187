"""A budget of tokens for thinking: the marks forced at its end, in each family."""

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Calling, Function, Grammar
from gateway.jobs.steps import SequenceParams
from tests.engine.answers.test_harmony import TOKENS
from tests.engine.answers.test_reasoning import FAMILIES, IDS
from tests.engine.chat_formats import family, row, said

THOUGHT = "Let me see, one and two and three and four and five."
BOOK = Calling(functions=[Function("book", {"type": "object"})])


def spoken(chat: ChatTokenizer, params: SequenceParams, first: str, then: str) -> dict[str, Any]:
    """Say a text until something is forced, then that, then another text; or the first alone."""
    budget = chat.answers.thinking(params).budget
    assert budget is not None
    tokens: list[int] = []

    def take(token: int) -> None:
        tokens.append(token)
        budget.take(token)

    def force() -> None:
        while budget.forced is not None:
            take(budget.forced)

    for token in chat.answers._unspell(first):
        if budget.forced is not None:
            force()
            break
        take(token)
    force()
    for token in chat.answers._unspell(then):
        assert budget.forced is None, "it is forced once"
        take(token)
    written = "".join(map(chat.answers._spell, tokens))
    return {**said(chat, params, chat.decode(tokens)), "written": written, "budget": budget}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return family(tmp_path_factory.mktemp("harmony"), tokens=TOKENS, model_type="gpt_oss")


@pytest.mark.parametrize("limit", [0, 1, 6])
@pytest.mark.parametrize("each", FAMILIES, ids=IDS)
def test_the_answer_begins_after_as_many_tokens_as_the_budget_has(
    tmp_path: Path, each: Any, limit: int
) -> None:
    """The marks have one token or several."""
    _, tokens, added, words, text = each
    chat = family(tmp_path, tokens=tokens, added=added, words=words)
    opening = text.split("{}")[0].removesuffix("\n").removesuffix(" ")
    params = row(may_think=True, thinking_budget=limit)
    heard = spoken(chat, params, opening + THOUGHT, "It is four.")
    assert heard["text"].strip() == "It is four."
    kept = chat.backend.decode(chat.answers._unspell(THOUGHT)[:limit])
    assert heard["reasoning"].strip() == kept.strip()


def test_an_end_that_the_model_has_begun_is_completed(tmp_path: Path) -> None:
    """It is not begun a second time, in whichever of the model's words."""
    chat = family(tmp_path, words="Here is my thought process:")
    for begun in ("Hm. Here is my", "Hm. Here's", "Hm. Here is my resp"):
        limit = len(chat.answers._unspell(begun))
        params = row(is_thinking=True, thinking_budget=limit)
        heard = spoken(chat, params, begun, " Four.")
        assert (heard["reasoning"].strip(), heard["text"].strip()) == ("Hm.", "Four.")
        assert heard["written"].count("Here") == 1


def test_no_other_thought_begins_once_the_budget_is_spent(tmp_path: Path) -> None:
    """The token that opens one is barred; before, several thoughts may share the budget."""
    chat = family(tmp_path, added=("<think>", "</think>"))
    opens = chat.answers.ids(["<think>"])
    params = row(may_think=True, thinking_budget=4)
    spent = spoken(chat, params, f"<think>{THOUGHT}", "")["budget"]
    assert spent.barred == opens
    assert spent.room(9) == 9
    some = spoken(chat, params, "<think>a</think><think>", "")["budget"]
    assert (some.barred, some.forced, some.room(9)) == (frozenset(), None, 1)


@pytest.mark.parametrize("limit", [0, 1, 6])
@pytest.mark.parametrize("grammar", [None, Grammar("json_schema", "{}")])
def test_harmonys_final_message_begins_at_the_limit(
    harmony: ChatTokenizer, grammar: Grammar | None, limit: int
) -> None:
    """A limit of 0 makes the final message the first one."""
    params = row(thinking_budget=limit, grammar=grammar, is_thinking=True)
    heard = spoken(harmony, params, f"<|channel|>analysis<|message|>{THOUGHT}", '{"a":1}')
    assert heard["text"] == '{"a":1}'
    assert heard["reasoning"] == harmony.backend.decode(harmony.answers._unspell(THOUGHT)[:limit])
    assert heard["written"].count("<|channel|>") == (1 if limit == 0 else 2)


def test_harmonys_end_is_completed_where_the_model_has_begun_it(harmony: ChatTokenizer) -> None:
    """Only the rest of the mark is forced behind a thought that the model has ended itself."""
    params = row(thinking_budget=len(harmony.answers._unspell("ab")))
    heard = spoken(harmony, params, "<|channel|>analysis<|message|>ab<|end|>", "Four.")
    assert (heard["text"], heard["reasoning"]) == ("Four.", "ab")
    assert heard["written"].count("\ud800<|end|>") == 1


def test_harmony_may_call_once_its_budget_is_spent(harmony: ChatTokenizer) -> None:
    """A next message begins, which is no thought."""
    params = row(calling=BOOK, thinking_budget=3)
    call = "<|channel|>commentary to=functions.book<|message|>{}<|call|>"
    heard = spoken(harmony, params, f"<|channel|>analysis<|message|>{THOUGHT}", call)
    assert heard["calls"] == [("book", {})]
    spent = spoken(harmony, params, f"<|channel|>analysis<|message|>{THOUGHT}", "<|channel|>")
    assert spent["budget"].barred == frozenset(harmony.answers._unspell("analysis")[:1])
    assert spent["budget"].room(9) == 0


def test_muse_spark_turns_to_its_user(tmp_path: Path) -> None:
    tokens = (*TOKENS, "<|eom|>", "<|eot|>")
    chat = family(tmp_path, tokens=tokens, model_type="muse_spark")
    heard = spoken(chat, row(thinking_budget=5), f"to=self<|message|>{THOUGHT}", "Four.")
    assert heard["text"] == "Four."
    assert heard["written"].endswith("<|start|>\ud802assistant to=user\ud800<|message|>\ud802Four.")


def test_a_tokenizer_without_an_end_has_no_budget(tmp_path: Path) -> None:
    assert not family(tmp_path / "none").answers.ends_thoughts
    assert family(tmp_path / "words", words="<think> </think>").answers.ends_thoughts
