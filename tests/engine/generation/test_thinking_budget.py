"""A budget for thinking in an engine: mixed batches, drafts, rows that are read again, ends."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Calling, Function, GenerateJob, Grammar, Sampling
from tests.checkpoints import teach_thinking, write_chat
from tests.engine.chat_formats import PLAIN
from tests.engine.generation.harness import (
    GREEDY,
    Answer,
    Rows,
    answers,
    bare,
    exchange,
    join,
    newest,
    open_engine,
)
from tests.fakes import caller

YES_OR_NO = Grammar("choice", json.dumps(["yes", "no"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach_thinking(
        write_chat(tmp_path_factory.mktemp("thinker"), vocab_size=1030), opens=True
    )


@pytest.fixture
def engine(folder: Path) -> Iterator[GenerationEngine]:
    engine = open_engine(folder, speculate_rows=4)
    yield engine
    engine.close()


def job(text: str, budget: int | None, **given: Any) -> GenerateJob:
    whole: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 30, **given}
    turns = [{"role": "user", "content": text}]
    return GenerateJob(caller=caller(), messages=turns, thinking_budget=budget, **whole)


def thoughts(engine: GenerationEngine, answer: Answer) -> int:
    """Count the tokens before the end of the thinking; all of them without one."""
    (end,) = engine.tokens.answers.ids(["</think>"])
    assert answer.error is None
    assert answer.ids.count(end) <= 1
    return answer.ids.index(end) if end in answer.ids else len(answer.ids)


class Circling:
    """A model that says four tokens in a circle, so that every draft is right."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        logits = self._model(tokens, cache=cache)
        at = mx.expand_dims(300 + (tokens + 1) % 4, -1)
        return mx.put_along_axis(logits, at, mx.array(500.0, dtype=logits.dtype), axis=-1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_rows_of_one_batch_have_budgets_of_their_own(engine: GenerationEngine) -> None:
    """Their sampling does not matter; beside them a row without a budget thinks on."""
    seeded = Sampling(temperature=1.2, top_p=0.9, seed=3, frequency_penalty=0.5)
    jobs = [
        job("one", 0), job("two", 5), job("three", 12, sampling=seeded, n=2),
        job("four", 7, logprobs=2), job("five", None), job("six", 99),
        job("seven", 3, template_args={"enable_thinking": False}),
    ]  # fmt: skip
    told = answers(engine, jobs)
    counts = [thoughts(engine, answer) for answer in told]
    assert counts == [0, 5, 12, 12, 7, 30, 30, 30]
    assert [answer.reasoning == "" for answer in told] == [True, *[False] * 6, True]
    assert [answer.text == "" for answer in told] == [*[False] * 5, True, True, False]
    assert len(told[4].logprobs) == len(told[4].ids) - 8
    assert [answers(engine, [each])[0].ids for each in jobs[:2]] == [told[0].ids, told[1].ids]


def test_the_grammar_begins_after_the_forced_end(engine: GenerationEngine) -> None:
    """This holds for the grammar of a form and for that of a call."""
    run = Rows(engine)
    look = Calling(functions=[Function("look", {"type": "object"})], forced=True)
    for each in (job("a", 6, grammar=YES_OR_NO), job("b", 0, calling=look), job("c", 4)):
        (row,) = engine.prepare(each)
        if row.grammar is not None:
            row = replace(row, compiled=engine.compile(row.grammar))
        number = join(run, row)
        run.answers[number] = Answer(ids=newest(engine).tokens)
    form, call, free = run.finish()
    assert form.text in ("yes", "no")
    assert form.finish_reason == "stop"
    assert thoughts(engine, form) == 6
    assert call.calls[0].name == "look"
    assert (thoughts(engine, call), thoughts(engine, free)) == (0, 4)


@pytest.mark.parametrize("act", ["parking", "preempting"])
def test_a_row_that_stops_and_goes_on_ends_its_thinking_at_the_same_place(
    engine: GenerationEngine, act: str
) -> None:
    """The row stops at several steps: before the end is forced, and while it is being forced."""
    (alone,) = answers(engine, [job("x", 5)])
    for steps in (1, 4, 5, 6, 9):
        run = Rows(engine)
        (row,) = run.add(job("x", 5))
        while len(run.answers[row].ids) < steps:
            run.step()
        run.change(**{act: [row]})
        run.change(resuming=[row])
        assert run.finish()[0].ids == alone.ids
    assert thoughts(engine, alone) == 5


def test_drafts_stop_before_the_limit(engine: GenerationEngine) -> None:
    """They go on once no other thought can begin."""
    exchange(engine, Circling(engine._model))
    run = Rows(engine)
    run.add(job("Hello", 20, max_tokens=60))
    accepted = [0, 0]
    while run.is_busy:
        run.step()
        (answer,) = run.answers.values()
        accepted[thoughts(engine, answer) < len(answer.ids)] += run.size.accepted
    assert thoughts(engine, answer) == 20
    assert accepted[0] > 5
    assert accepted[1] > 5


def test_ends_keep_their_meaning_inside_thoughts(engine: GenerationEngine) -> None:
    """The model's own ends the answer; a mark that would end it waits for `min_tokens`; a limit of
    all tokens may come before.
    """
    (end,) = engine.tokens.answers.ids(["</think>"])
    (eos,) = engine.tokens.answers.eos_ids
    urged = Sampling(temperature=0, logit_bias={eos: 100.0})
    kept = Sampling(temperature=0, min_tokens=9, stop_token_ids=frozenset({end}))
    jobs = [job("a", 5, sampling=urged), job("b", 3, sampling=kept), job("c", 8, max_tokens=8)]
    own, late, cut = answers(engine, jobs)
    assert (own.ids, own.finish_reason) == ([eos], "stop")
    assert (len(late.ids), late.ids[-1], late.finish_reason) == (10, end, "stop")
    assert (len(cut.ids), cut.text, cut.finish_reason) == (8, "", "length")


def test_a_bare_prompt_and_a_model_that_does_not_think_have_no_budget(
    engine: GenerationEngine, tmp_path: Path
) -> None:
    (row,) = engine.prepare(replace(bare([300, 301]), thinking_budget=4))
    assert row.thinking_budget is None
    plain = open_engine(write_chat(tmp_path))
    assert plain.prepare(job("Hello", 4))[0].thinking_budget is None


def test_a_model_that_would_think_again_answers(engine: GenerationEngine) -> None:
    """The mark that opens a thought is no token of the answer then."""
    (opens,) = engine.tokens.answers.ids(["<think>"])
    urged = Sampling(temperature=0, logit_bias={opens: 100.0})
    (told,) = answers(engine, [job("a", 3, sampling=urged)])
    assert told.ids[:3] == [opens] * 3
    assert opens not in told.ids[4:]
    assert told.text


def test_a_mark_that_a_grammar_makes_is_not_ended(tmp_path: Path) -> None:
    """Forcing the end there would break the form."""
    words = PLAIN + "{% if false %}<think></think>{% endif %}"
    plain = open_engine(write_chat(tmp_path), chat_template=words)
    grammar = Grammar("choice", json.dumps(["<think>yes"]))
    (row,) = plain.prepare(job("a", 0, grammar=grammar))
    assert row.thinking_budget == 0
    run = Rows(plain)
    number = join(run, replace(row, compiled=plain.compile(grammar)))
    run.answers[number] = Answer(ids=newest(plain).tokens)
    (told,) = run.finish()
    assert (told.error, told.finish_reason) == (None, "stop")
    assert plain.tokens.decode(told.ids).startswith("<think>yes")
