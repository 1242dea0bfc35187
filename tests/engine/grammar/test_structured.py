"""Rows held to a grammar, beside free ones, on real MLX with random weights."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import mlx.core as mx
import pytest

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.grammar.schema_bounds import Shape
from gateway.jobs.chat import Calling, Function, GenerateJob, Grammar, Sampling
from tests.checkpoints import teach_thinking, write_chat
from tests.engine.generation import harness
from tests.engine.generation.harness import Answer, Passing, Rows, exchange, job, newest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}},
    },
    "required": ["name", "age", "tags"],
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
FREE = ["Hello there!", "What is 2 + 2? " * 9, "日本語 🙂"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint once."""
    return write_chat(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder: Path) -> Iterator[GenerationEngine]:
    """Load it, with short strings and arrays: random weights know no end."""
    engine = load_generation(
        folder, name="tiny", device=Device.CPU, shape=Shape(max_string_chars=12, max_array_items=3)
    )
    yield engine
    engine.close()


def hot(text: str, seed: int, **more: Any) -> GenerateJob:
    """Ask with a temperature at which random weights say anything."""
    more.setdefault("max_tokens", 300)
    return job(text, Sampling(temperature=1.5, seed=seed), **more)


def join(run: Rows, asked: GenerateJob) -> int:
    """Plan, compile and join, as the batcher does."""
    (row,) = run.engine.prepare(asked)
    if row.grammar is not None:
        row = replace(row, compiled=run.engine.compile(row.grammar))
    number = harness.join(run, row)
    run.answers[number] = Answer(ids=newest(run.engine).tokens)
    return number


def alone(engine: GenerationEngine, asked: GenerateJob) -> Answer:
    run = Rows(engine)
    number = join(run, asked)
    run.finish()
    return run.answers[number]


@pytest.mark.parametrize("at", [2, 4, 9])
def test_a_grammar_survives_a_fault_of_the_engine(engine: GenerationEngine, at: int) -> None:
    asked = hot("x", 7, grammar=JSON)
    expected = alone(engine, asked).ids
    model = engine._model
    exchange(engine, Passing(model, at))
    run = Rows(engine)
    number = join(run, asked)
    join(run, job(FREE[0]))
    run.finish()
    assert run.answers[number].ids == expected


def test_every_end_of_sequence_token_is_allowed_only_at_the_end(tmp_path: Path) -> None:
    """Models have several: forbidding one makes it run on, allowing one early cuts."""
    folder = write_chat(tmp_path, eos_token_id=[2, 5])
    shape = Shape(max_string_chars=5)
    engine = load_generation(folder, name="t", device=Device.CPU, shape=shape)
    for bias in ({2: 100.0}, {5: 100.0}):
        sampling = Sampling(temperature=1.5, seed=3, logit_bias=bias)
        answer = alone(engine, job("x", sampling, grammar=JSON, max_tokens=300))
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        assert answer.finish_reason == "stop"


WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/Place"}},
        "required": ["place"],
        "$defs": {"Place": {"type": "string", "maxLength": 9}},
    },
    strict=True,
)
CLOCK = Function("clock", {"type": "object", "properties": {"utc": {"type": "boolean"}}})


def test_a_forced_call_fits_its_schema(engine: GenerationEngine) -> None:
    names = set()
    for seed in range(8):
        calling = Calling(functions=[WEATHER, CLOCK], forced=True)
        run = Rows(engine)
        number = join(run, hot("x", seed, calling=calling))
        run.finish()
        answer = run.answers[number]
        assert (answer.text, answer.finish_reason) == ("", "tool_calls")
        name = "".join(call.name or "" for call in answer.calls)
        arguments = json.loads("".join(call.arguments for call in answer.calls))
        schema = {"get_weather": WEATHER, "clock": CLOCK}[name].parameters
        jsonschema.validate(arguments, schema)
        names.add(name)
    assert len(names) == 2


def test_a_forced_call_has_declared_arguments_only(engine: GenerationEngine) -> None:
    """Others are allowed only if the function says so: a model would invent some for ever."""
    for seed in range(5):
        none = forced(engine, seed, {"type": "object", "properties": {}})
        assert none == {}
        some = forced(engine, seed, {"properties": {"a": {"type": "boolean"}}})
        assert set(some) <= {"a"}
    free = {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1}
    assert set(forced(engine, 1, {**free, "maxProperties": 1}).values()) == {None}


def forced(engine: GenerationEngine, seed: int, parameters: dict[str, Any]) -> Any:
    calling = Calling(functions=[Function("f", parameters)], forced=True)
    answer = alone(engine, hot("call", seed, max_tokens=300, calling=calling))
    assert answer.finish_reason == "tool_calls"
    return json.loads("".join(call.arguments for call in answer.calls))


def mark(engine: GenerationEngine) -> int:
    """Give the token that opens a call."""
    token = engine.tokens.backend.token_to_id("<tool_call>")
    assert token is not None
    return token


def test_a_strict_call_fits_its_schema_wherever_it_comes(engine: GenerationEngine) -> None:
    opening = mark(engine)
    eager = Sampling(temperature=1.5, seed=5, logit_bias={opening: 12.0})
    calling = Calling(functions=[WEATHER], parallel=False)
    run = Rows(engine)
    number = join(run, job("x", eager, calling=calling, max_tokens=300))
    run.finish()
    answer = run.answers[number]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.calls
    jsonschema.validate(json.loads(call.arguments), WEATHER.parameters)


def test_a_call_and_a_form_may_be_asked_for_together(engine: GenerationEngine) -> None:
    opening = mark(engine)
    calling = Calling(functions=[WEATHER])
    for bias, is_call in ((100.0, True), (-100.0, False)):
        sampling = Sampling(temperature=1.5, seed=5, logit_bias={opening: bias, 2: 50.0})
        asked = job("x", sampling, calling=calling, grammar=JSON, max_tokens=300)
        answer = alone(engine, asked)
        assert bool(answer.calls) == is_call
        if not is_call:
            jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_a_grammars_exclusions_are_left_out_of_logprobs(engine: GenerationEngine) -> None:
    grammar = Grammar("choice", '["yes","no"]')
    answer = alone(engine, hot("x", 1, grammar=grammar, logprobs=20))
    assert 1 <= len(answer.logprobs[0].top) <= 4
    assert all(other.logprob > -1e9 for each in answer.logprobs for other in each.top)


def test_a_bias_counts_in_logprobs(engine: GenerationEngine) -> None:
    """OpenAI's does too: a reranker raises True and False by it."""
    ids = engine.tokens.backend.encode("Q", add_special_tokens=False).ids
    forced = Sampling(temperature=0, logit_bias={ids[0]: 100.0})
    answer = alone(engine, job("x", forced, logprobs=2, max_tokens=1))
    assert answer.logprobs[0].chosen.token == "Q"
    assert answer.logprobs[0].chosen.logprob == pytest.approx(0, abs=1e-4)


def test_one_token_is_shown_even_if_it_is_the_end(engine: GenerationEngine) -> None:
    """A reranker reads the first token's logprobs of every answer, whatever it is."""
    ending = Sampling(temperature=0, logit_bias={2: 100.0})
    answer = alone(engine, job("x", ending, logprobs=2, max_tokens=1))
    assert len(answer.logprobs) == 1
    assert len(answer.logprobs[0].top) == 2


class Saying:
    """A model that would say given tokens, one a step; a grammar may forbid them."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self._model = model
        self._ids = ids
        self._step = 0

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        logits = self._model(tokens, cache=cache)
        if tokens.shape[1] == 1 and self._step < len(self._ids):
            wish = mx.arange(logits.shape[-1]) == self._ids[self._step]
            logits = logits + mx.where(wish, 1000.0, 0.0)
            self._step += 1
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def thinker(folder: Path, *, opens: bool) -> GenerationEngine:
    write_chat(folder, vocab_size=1026 + 2)
    shape = Shape(max_string_chars=5, max_array_items=2)
    folder = teach_thinking(folder, opens=opens)
    return load_generation(folder, name="t", device=Device.CPU, shape=shape)


@pytest.mark.parametrize("opens", [True, False])
def test_a_grammar_begins_after_the_thinking(tmp_path: Path, opens: bool) -> None:
    engine = thinker(tmp_path, opens=opens)
    thoughts = "hm { hm</think>" if opens else "<think>hm { hm</think>"
    ids = engine.tokens.backend.encode(thoughts, add_special_tokens=False).ids
    exchange(engine, Saying(engine._model, ids))
    answer = alone(engine, hot("x", 1, grammar=JSON))
    assert answer.reasoning == "hm { hm"
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert answer.finish_reason == "stop"


def test_thinking_can_be_turned_off(tmp_path: Path) -> None:
    """The first token is then the answer's, as a reranker needs."""
    engine = thinker(tmp_path, opens=True)
    off = {"enable_thinking": False}
    ids = engine.tokens.backend.encode("<think>", add_special_tokens=False).ids
    exchange(engine, Saying(engine._model, ids))
    answer = alone(engine, hot("x", 1, grammar=JSON, template_args=off))
    assert answer.reasoning == ""
    jsonschema.validate(json.loads(answer.text), SCHEMA)
