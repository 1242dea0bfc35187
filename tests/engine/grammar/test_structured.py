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
from gateway.engine.grammar.shaping import Shape
from gateway.errors import BadRequest
from gateway.jobs import Calling, Function, GenerateJob, Grammar, Sampling
from tests.checkpoints import teach_thinking, write_chat
from tests.engine.generation import harness
from tests.engine.generation.harness import Answer, Passing, Run, exchange, job, newest

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
        folder,
        name="tiny",
        device=Device.CPU,
        dtype=None,
        max_context=None,
        chat_template=None,
        template_args={},
        shape=Shape(max_string_chars=12, max_array_items=3),
    )
    yield engine
    engine.close()


def hot(text: str, seed: int, **more: Any) -> GenerateJob:
    """Ask with a temperature at which random weights say anything."""
    more.setdefault("max_tokens", 300)
    return job(text, Sampling(temperature=1.5, seed=seed), **more)


def join(run: Run, asked: GenerateJob) -> int:
    """Plan, compile and join, as the batcher does."""
    (row,) = run.engine.prepare(asked)
    if row.grammar is not None:
        row = replace(row, compiled=run.engine.compile(row.grammar))
    number = harness.join(run.engine, row)
    run.answers[number] = Answer(ids=newest(run.engine).tokens)
    return number


def alone(engine: GenerationEngine, asked: GenerateJob) -> Answer:
    run = Run(engine)
    number = join(run, asked)
    run.finish()
    return run.answers[number]


def test_answers_match_their_schema_whatever_runs_beside_them(engine: GenerationEngine) -> None:
    """Ten grammars at once, joining and leaving among free rows; each ends with stop."""
    run = Run(engine)
    bound = [join(run, hot(f"x{i}", i, grammar=JSON)) for i in range(5)]
    free = [join(run, job(text)) for text in FREE]
    for _ in range(6):
        run.step()
    bound += [join(run, hot(f"y{i}", 50 + i, grammar=JSON)) for i in range(5)]
    run.step()
    engine.leave(bound[2])
    run.finish()
    for number in bound[:2] + bound[3:]:
        answer = run.answers[number]
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert all(run.answers[number].error is None for number in free)


def test_free_rows_say_the_same_beside_grammars_and_without(engine: GenerationEngine) -> None:
    """No row's mask ever touches another's logits."""
    before = [alone(engine, job(text)).ids for text in FREE]
    run = Run(engine)
    numbers = []
    for i, text in enumerate(FREE):
        join(run, hot("x", i, grammar=JSON))
        numbers.append(join(run, job(text)))
    run.finish()
    assert [run.answers[number].ids for number in numbers] == before


def test_a_seeded_grammar_row_repeats_alone_and_in_a_batch(engine: GenerationEngine) -> None:
    """Exactly, tokens and all."""
    asked = hot("x", 7, grammar=JSON)
    expected = alone(engine, asked).ids
    run = Run(engine)
    join(run, hot("y", 8, grammar=JSON))
    number = join(run, asked)
    join(run, job(FREE[0]))
    run.finish()
    assert run.answers[number].ids == expected


@pytest.mark.parametrize("at", [2, 4, 9])
def test_a_grammar_survives_a_fault_of_the_engine(engine: GenerationEngine, at: int) -> None:
    """The row is read again, and its grammar stands where it stood."""
    asked = hot("x", 7, grammar=JSON)
    expected = alone(engine, asked).ids
    model = engine._model
    exchange(engine, Passing(model, at))
    run = Run(engine)
    number = join(run, asked)
    join(run, job(FREE[0]))
    run.finish()
    assert run.answers[number].ids == expected


@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        (Grammar("choice", '["yes","no"]'), {"yes", "no"}),
        (Grammar("regex", "(ab|cd){2}"), {"abab", "abcd", "cdab", "cdcd"}),
        (Grammar("grammar", 'start: "a" ("x" | "y")'), {"ax", "ay"}),
    ],
)
def test_choices_regexes_and_grammars_hold_too(
    engine: GenerationEngine, grammar: Grammar, allowed: set[str]
) -> None:
    """Whatever the weights would rather say."""
    for seed in range(6):
        answer = alone(engine, hot("x", seed, grammar=grammar))
        assert answer.text in allowed
        assert answer.finish_reason == "stop"


def test_an_answer_cut_by_max_tokens_says_length(engine: GenerationEngine) -> None:
    """Never stop: clients must know that the JSON is not whole."""
    answer = alone(engine, hot("x", 1, grammar=JSON, max_tokens=5))
    assert (answer.finish_reason, answer.tokens) == ("length", 5)


def test_every_end_of_sequence_token_is_allowed_only_at_the_end(tmp_path: Path) -> None:
    """Models have several: forbidding one makes it run on, allowing one early cuts."""
    folder = write_chat(tmp_path, eos_token_id=[2, 5])
    engine = load_generation(
        folder, name="t", device=Device.CPU, dtype=None, max_context=None,
        chat_template=None, template_args={}, shape=Shape(max_string_chars=5),
    )  # fmt: skip
    for bias in ({2: 100.0}, {5: 100.0}):
        sampling = Sampling(temperature=1.5, seed=3, logit_bias=bias)
        answer = alone(engine, job("x", sampling, grammar=JSON, max_tokens=300))
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        assert answer.finish_reason == "stop"


def test_what_cannot_be_compiled_is_refused_by_name(engine: GenerationEngine) -> None:
    """Before any token."""
    unheld = Grammar("json_schema", '{"not": {"multipleOf": 2}}', strict=True)
    with pytest.raises(BadRequest, match="`not` at #"):
        engine.compile(unheld)
    broken = Function("f", {"type": "nonsense"})
    (row,) = engine.prepare(job("x", calling=Calling(functions=[broken], forced=True)))
    assert row.grammar is not None
    with pytest.raises(BadRequest, match="'f'") as caught:
        engine.compile(row.grammar)
    assert caught.value.part == "tools"


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
    """One of the functions, with arguments that parse, and finish_reason tool_calls."""
    names = set()
    for seed in range(8):
        calling = Calling(functions=[WEATHER, CLOCK], forced=True)
        run = Run(engine)
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
    """Unless the function says that there may be more: a model would invent some for ever."""
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
    token = engine._chat.backend.token_to_id("<tool_call>")
    assert token is not None
    return token


def test_a_strict_call_fits_its_schema_wherever_it_comes(engine: GenerationEngine) -> None:
    """Free text before it, the model's own marks around it."""
    opening = mark(engine)
    eager = Sampling(temperature=1.5, seed=5, logit_bias={opening: 12.0})
    calling = Calling(functions=[WEATHER], parallel=False)
    run = Run(engine)
    number = join(run, job("x", eager, calling=calling, max_tokens=300))
    run.finish()
    answer = run.answers[number]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.calls
    jsonschema.validate(json.loads(call.arguments), WEATHER.parameters)


def test_a_call_and_a_form_may_be_asked_for_together(engine: GenerationEngine) -> None:
    """The answer is one or the other, whole."""
    opening = mark(engine)
    calling = Calling(functions=[WEATHER])
    for bias, is_call in ((100.0, True), (-100.0, False)):
        sampling = Sampling(temperature=1.5, seed=5, logit_bias={opening: bias, 2: 50.0})
        asked = job("x", sampling, calling=calling, grammar=JSON, max_tokens=300)
        answer = alone(engine, asked)
        assert bool(answer.calls) == is_call
        if not is_call:
            jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_logprobs_are_those_of_the_tokens_that_were_said(engine: GenerationEngine) -> None:
    """Finite, sorted, the tokens' texts making the content; greedy says the likeliest."""
    for text in FREE:
        answer = alone(engine, job(text, logprobs=5))
        plain = alone(engine, job(text))
        assert answer.ids == plain.ids
        assert "".join(each.chosen.token for each in answer.logprobs) == answer.text
        for each in answer.logprobs:
            top = [other.logprob for other in each.top]
            assert top == sorted(top, reverse=True)
            assert len(top) == 5
            assert -50 < each.chosen.logprob <= 0
            assert each.chosen.logprob == pytest.approx(top[0], abs=1e-5)


def test_logprobs_are_the_models_own_before_any_temperature(engine: GenerationEngine) -> None:
    """Equal to the log-softmax of a plain forward pass."""
    (row,) = engine.prepare(job(FREE[0]))
    logits = engine._model(mx.array([list(row.prompt)]))[0, -1]
    logprobs: Any = (logits - mx.logsumexp(logits)).tolist()
    hot_one = Sampling(temperature=1.7, seed=1)
    answer = alone(engine, job(FREE[0], hot_one, logprobs=3, max_tokens=1))
    assert answer.logprobs[0].chosen.logprob == pytest.approx(logprobs[answer.ids[0]], abs=1e-4)
    assert answer.logprobs[0].top[0].logprob == pytest.approx(max(logprobs), abs=1e-4)


def test_a_grammars_exclusions_are_left_out_of_logprobs(engine: GenerationEngine) -> None:
    """There is no -Infinity in JSON."""
    grammar = Grammar("choice", '["yes","no"]')
    answer = alone(engine, hot("x", 1, grammar=grammar, logprobs=20))
    assert 1 <= len(answer.logprobs[0].top) <= 4
    assert all(other.logprob > -1e9 for each in answer.logprobs for other in each.top)


def test_a_bias_counts_in_logprobs(engine: GenerationEngine) -> None:
    """As OpenAI's does: a reranker raises True and False by it."""
    ids = engine._chat.backend.encode("Q", add_special_tokens=False).ids
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


def test_stop_strings_take_their_tokens_logprobs_along(engine: GenerationEngine) -> None:
    """What is not in the content has no logprob."""
    whole = alone(engine, job(FREE[0], logprobs=1))
    middle = len(whole.text) // 2
    cut = alone(engine, job(FREE[0], logprobs=1, stop=[whole.text[middle : middle + 4]]))
    assert cut.text == whole.text[: whole.text.index(whole.text[middle : middle + 4])]
    assert "".join(each.chosen.token for each in cut.logprobs) == cut.text
    assert len(cut.logprobs) < len(whole.logprobs)


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
    size = 1026 + 2
    write_chat(folder, vocab_size=size)
    return load_generation(
        teach_thinking(folder, opens=opens), name="t", device=Device.CPU, dtype=None,
        max_context=None, chat_template=None, template_args={},
        shape=Shape(max_string_chars=5, max_array_items=2),
    )  # fmt: skip


@pytest.mark.parametrize("opens", [True, False])
def test_a_grammar_begins_after_the_thinking(tmp_path: Path, opens: bool) -> None:
    """Whether the template opens the block or the model does; thoughts are never content."""
    engine = thinker(tmp_path, opens=opens)
    thoughts = "hm { hm</think>" if opens else "<think>hm { hm</think>"
    ids = engine._chat.backend.encode(thoughts, add_special_tokens=False).ids
    exchange(engine, Saying(engine._model, ids))
    answer = alone(engine, hot("x", 1, grammar=JSON))
    assert answer.reasoning == "hm { hm"
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert answer.finish_reason == "stop"


def test_thinking_can_be_turned_off(tmp_path: Path) -> None:
    """Then the first token is the answer's: what a reranker needs."""
    engine = thinker(tmp_path, opens=True)
    off = {"enable_thinking": False}
    ids = engine._chat.backend.encode("<think>", add_special_tokens=False).ids
    exchange(engine, Saying(engine._model, ids))
    answer = alone(engine, hot("x", 1, grammar=JSON, template_args=off))
    assert answer.reasoning == ""
    jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_a_bare_prompt_has_no_marks(tmp_path: Path) -> None:
    """Without a template they are just text."""
    engine = thinker(tmp_path, opens=True)
    ids = engine._chat.backend.encode("<think>hm", add_special_tokens=False).ids
    exchange(engine, Saying(engine._model, ids))
    asked = replace(job("x", max_tokens=len(ids)), messages=(), prompt="Once")
    answer = alone(engine, asked)
    assert (answer.text, answer.reasoning) == ("<think>hm", "")


def test_thinking_that_is_cut_says_length_and_leaves_no_content(tmp_path: Path) -> None:
    """Half a thought is no answer."""
    engine = thinker(tmp_path, opens=True)
    ids = engine._chat.backend.encode("hm hm hm", add_special_tokens=False).ids
    exchange(engine, Saying(engine._model, ids))
    answer = alone(engine, hot("x", 1, grammar=JSON, max_tokens=3))
    assert (answer.text, answer.finish_reason) == ("", "length")
    assert answer.reasoning
