"""vLLM's sampling fields in the engine, and a checkpoint's own sampling values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import generation_config, usable_sampling
from gateway.engine.grammar.schema_bounds import Shape
from gateway.errors import BadRequest
from gateway.jobs.chat import Grammar, Sampling
from tests.checkpoints import teach_thinking, write_chat
from tests.engine.generation.harness import Answer, answers, job, open_engine

EOS = 2
ENDING = {EOS: 50.0}  # a bias that makes the model want to end


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> GenerationEngine:
    return open_engine(write_chat(tmp_path_factory.mktemp("tiny")))


def said(engine: GenerationEngine, text: str = "Hello!", **asked: Any) -> Answer:
    more = {name: asked.pop(name) for name in ("max_tokens", "stop", "logprobs") if name in asked}
    (answer,) = answers(engine, [job(text, Sampling(**{"temperature": 0, **asked}), **more)])
    return answer


def held(engine: GenerationEngine, grammar: Grammar, sampling: Sampling, **more: Any) -> Answer:
    (answer,) = answers(engine, [job("Hello!", sampling, grammar=grammar, **more)])
    return answer


def test_nothing_ends_an_answer_before_its_least_tokens(engine: GenerationEngine) -> None:
    assert said(engine, logit_bias=ENDING).tokens == 1
    answer = said(engine, logit_bias=ENDING, min_tokens=7)
    assert EOS not in answer.ids[:7]
    assert (answer.tokens, answer.finish_reason) == (8, "stop")
    stop = answer.ids[3]
    stopped = said(engine, logit_bias=ENDING, stop_token_ids=frozenset({stop}), min_tokens=7)
    assert stop not in stopped.ids[:7]


def test_text_before_the_least_tokens_is_not_searched_for_stops(engine: GenerationEngine) -> None:
    """Only the text after the least tokens is searched, as in vLLM."""
    free = said(engine, max_tokens=20)
    stop = free.text[1:3]
    assert said(engine, max_tokens=20, stop=(stop,)).text == free.text[:1]
    late = said(engine, max_tokens=20, stop=(stop,), min_tokens=10)
    assert late.tokens > 10
    assert late.text.startswith(free.text[:1] + stop)
    every = said(engine, max_tokens=20, stop=(stop,), min_tokens=20)
    assert every.text == free.text


def test_more_tokens_at_least_than_at_most_is_refused(engine: GenerationEngine) -> None:
    with pytest.raises(BadRequest, match="24 tokens at most") as refused:
        engine.prepare(job("x", Sampling(min_tokens=25)))
    assert refused.value.part == "min_tokens"


def test_the_models_end_can_be_ignored(engine: GenerationEngine) -> None:
    answer = said(engine, logit_bias=ENDING, ignore_eos=True, max_tokens=9, logprobs=0)
    assert answer.ids == [EOS] * 9
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", 9, "length")


def test_a_stop_token_ends_an_answer_and_is_no_text(engine: GenerationEngine) -> None:
    free = said(engine, max_tokens=20)
    at = next(i for i in range(2, 20) if free.ids[i] not in free.ids[:i])
    stop = frozenset({free.ids[at], 10**9})
    for ignore_eos in (False, True):
        answer = said(engine, max_tokens=20, stop_token_ids=stop, ignore_eos=ignore_eos)
        assert answer.ids == free.ids[: at + 1]
        assert answer.finish_reason == "stop"
        assert free.text.startswith(answer.text)
        assert len(answer.text) < len(free.text)


def test_a_grammar_that_must_end_wins(engine: GenerationEngine) -> None:
    choice = Grammar("choice", '["yes"]')
    for sampling in (Sampling(min_tokens=20), Sampling(ignore_eos=True)):
        answer = held(engine, choice, sampling, max_tokens=30)
        assert (answer.text, answer.finish_reason, answer.error) == ("yes", "stop", None)


def test_an_end_beyond_the_vocabulary_ends_no_grammar(engine: GenerationEngine) -> None:
    sampling = Sampling(temperature=0, min_tokens=3, stop_token_ids=frozenset({10**9}))
    answer = held(engine, Grammar("choice", '["yes, indeed it is"]'), sampling, max_tokens=30)
    assert (answer.text, answer.finish_reason) == ("yes, indeed it is", "stop")


def test_a_grammar_that_may_go_on_does_until_its_least_tokens(engine: GenerationEngine) -> None:
    digits = Grammar("regex", "[0-9]{1,400}")
    eager = Sampling(temperature=0, logit_bias=ENDING)
    assert len(held(engine, digits, eager, max_tokens=60).text) == 1
    longer = held(engine, digits, replace(eager, min_tokens=30), max_tokens=60)
    assert longer.tokens >= 30
    assert longer.text.isdigit()
    assert longer.finish_reason == "stop"


def test_a_repetition_penalty_counts_the_prompt_and_the_answer(engine: GenerationEngine) -> None:
    text = "a b c d " * 8
    shy = said(engine, text, max_tokens=40, repetition_penalty=10.0)
    assert len(set(shy.ids)) == 40 > len(set(said(engine, text, max_tokens=40).ids))
    assert not {*engine.prepare(job(text))[0].prompt} & {*shy.ids[:20]}


def test_a_thinking_row_counts_its_thoughts_as_tokens(tmp_path: Path) -> None:
    engine = open_engine(teach_thinking(write_chat(tmp_path, vocab_size=1028), opens=True))
    assert said(engine, "Hi", logit_bias=ENDING, min_tokens=5).tokens == 6


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"min_p": 0, "repetition_penalty": 1.05, "top_k": 40.0},
         {"min_p": 0, "repetition_penalty": 1.05, "top_k": 40}),
        ({"do_sample": False}, {}),
        ({"temperature": -1, "top_p": "0.9", "top_k": True, "min_p": None}, {}),
        ({"temperature": 1e999, "repetition_penalty": 0, "top_p": 0}, {}),
        ([], {}), ("not json", {}), (None, {}),
    ],
)  # fmt: skip
def test_a_checkpoint_says_how_it_is_sampled(tmp_path: Path, written: Any, read: Any) -> None:
    if written is not None:
        text = written if isinstance(written, str) else json.dumps(written)
        (tmp_path / "generation_config.json").write_text(text)
    assert usable_sampling(generation_config(tmp_path)) == read


@pytest.mark.parametrize(
    ("stated", "given", "shape"),
    [
        ({"max_string_chars": 80, "max_array_items": 8}, (None, None), (80, 8)),
        ({"max_string_chars": 80, "max_array_items": 8}, (20, None), (20, 8)),
        ({"max_string_chars": 0, "max_array_items": True}, (None, None), (None, None)),
        ({"max_string_chars": "80", "max_array_items": 1.5}, (None, 3), (None, 3)),
        ({}, (None, None), (None, None)), ([], (None, 2), (None, 2)), (None, (1, None), (1, None)),
    ],
)  # fmt: skip
def test_a_checkpoint_states_bounds_of_its_own(stated: Any, given: Any, shape: Any) -> None:
    completed = Shape(max_string_chars=given[0], max_array_items=given[1]).completed(stated)
    assert (completed.max_string_chars, completed.max_array_items) == shape


def test_an_answer_is_held_to_its_checkpoints_bounds(tmp_path: Path) -> None:
    folder = write_chat(tmp_path)
    own = {"structured": {"max_string_chars": 3, "max_array_items": 2}}
    (folder / "generation_config.json").write_text(json.dumps(own))
    engine = open_engine(folder)
    schema = Grammar("json_schema", '{"type":"array","items":{"type":"string"}}')
    written = json.loads(held(engine, schema, Sampling(temperature=0), max_tokens=200).text)
    assert len(written) <= 2
    assert all(len(each) <= 3 for each in written)


def test_a_checkpoints_sampling_counts_where_nothing_else_is_set(tmp_path: Path) -> None:
    folder = write_chat(tmp_path)
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": EOS}
    (folder / "generation_config.json").write_text(json.dumps(own))
    engine = open_engine(folder)

    def planned(sampling: Sampling) -> Sampling:
        return engine.prepare(job("x", sampling))[0].sampling

    every = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
    assert planned(Sampling(unset=every)) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    asked = Sampling(temperature=0.0, seed=5, unset=every - {"temperature"})
    assert planned(asked) == Sampling(temperature=0.0, top_k=20, top_p=0.95, seed=5)
    assert planned(Sampling()) == Sampling()
