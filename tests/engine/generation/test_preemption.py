"""Rows that are parked, preempted, resumed and bounded, wherever they are."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs import (
    Calling,
    Compiled,
    Delta,
    Function,
    GenerateJob,
    Grammar,
    Sampling,
    Verdict,
)
from tests.checkpoints import SLIDING, STATEFUL, teach_thinking, write_chat
from tests.engine.generation.harness import join, prefilling
from tests.engine.generation.test_engine import Passing, exchange
from tests.fakes import caller

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sliding": SLIDING, "stateful": STATEFUL}
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": {"type": "boolean"}, "minItems": 5, "maxItems": 40},
                "b": {"enum": ["one", "two"]},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)
CALLS = Calling(functions=[Function("look", {"type": "object"})])
# Of another seed's tokens two are as likely within 3e-6: rounding says which of them is first.
PENALISED = Sampling(temperature=1.3, top_p=0.95, top_k=50, seed=-8, frequency_penalty=0.4)
JOBS: list[dict[str, Any]] = [
    {"sampling": Sampling(temperature=0), "max_tokens": 40},
    {"sampling": Sampling(temperature=0), "max_tokens": 1, "logprobs": 3},
    {"sampling": Sampling(temperature=0), "max_tokens": 30, "logprobs": 2},
    {"sampling": PENALISED, "max_tokens": 40, "logprobs": 1},
    {"sampling": Sampling(temperature=1.5, seed=3), "max_tokens": 80, "grammar": SCHEMA},
    {"sampling": Sampling(temperature=1.0, seed=4), "max_tokens": 40, "stop": ["e", "at"]},
    {"sampling": Sampling(temperature=1.2, seed=5), "max_tokens": 40, "calling": CALLS},
]
TEXTS = ["Hi", "What is 2 + 2? " * 9, "a b c " * 60, "日本語のテキスト 🙂"]


@dataclass
class Answer:
    """All that a row was told, put together."""

    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    cached: int = 0
    ends: list[str | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    chosen: list[tuple[str, float]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        assert not self.ends, "nothing comes after the end"
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.cached += delta.cached_tokens
        self.tokens += delta.tokens
        self.ends += [delta.finish_reason] if delta.finish_reason is not None else []
        self.errors += [delta.error] if delta.error is not None else []
        self.chosen += [(each.chosen.token, each.chosen.logprob) for each in delta.logprobs]

    def says_as(self, other: "Answer") -> bool:
        """Tell whether it is the same answer; logprobs may differ by rounding."""
        same = (self.text, self.reasoning, self.tokens, self.ends, self.errors) == (
            other.text,
            other.reasoning,
            other.tokens,
            other.ends,
            other.errors,
        )
        logprobs = [logprob for _, logprob in self.chosen]
        return (
            same
            and [token for token, _ in self.chosen] == [token for token, _ in other.chosen]
            and logprobs == pytest.approx([each for _, each in other.chosen], abs=1e-3)
        )


class Batch:
    """Rows of one engine and what they were told."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}

    def join(self, text: str, given: dict[str, Any]) -> int:
        job = GenerateJob(caller=caller(), messages=[{"role": "user", "content": text}], **given)
        (row,) = self.engine.prepare(job)
        if row.grammar is not None:
            row = replace(row, compiled=compiled(self.engine, row.grammar))
        number = join(self.engine, row)
        self.answers[number] = Answer()
        return number

    def hear(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.answers[delta.row].add(delta)

    def step(self, budget: int) -> None:
        self.hear(self.engine.prefill(budget) if self.engine.is_prefilling else [])
        self.hear(self.engine.decode())

    @property
    def open(self) -> list[int]:
        return [row for row, each in self.answers.items() if not each.ends and not each.errors]

    @property
    def is_busy(self) -> bool:
        return self.engine.is_prefilling or self.engine.is_decoding


@cache
def compiled(engine: GenerationEngine, grammar: Grammar) -> Compiled:
    return engine.compile(grammar)


def open_engine(
    folder: Path, prefix_cache_bytes: int = 0, speculate_rows: int = 0, draft: Path | None = None
) -> GenerationEngine:
    return load_generation(
        folder,
        name="chat",
        device=Device.CPU,
        dtype=None,
        max_context=None,
        chat_template=None,
        template_args={},
        prefix_cache_bytes=prefix_cache_bytes,
        speculate_rows=speculate_rows,
        draft=draft,
    )


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return teach_thinking(write_chat(path, **KINDS[request.param]), opens=False)


def test_a_parked_row_says_nothing_and_keeps_its_kv(folder: Path) -> None:
    """A preempted one has none."""
    engine = open_engine(folder)
    weights = engine.nbytes()
    batch = Batch(engine)
    row = batch.join("Hello", {"sampling": Sampling(temperature=0), "max_tokens": 40})
    batch.step(512)
    engine.park(row)
    assert not batch.is_busy
    assert engine.nbytes() > weights
    engine.preempt(row)
    assert engine.nbytes() == weights
    assert engine.decode() == []
    engine.leave(row)
    engine.resume(row)
    assert not batch.is_busy


def test_a_row_parked_while_it_is_read_does_not_run(folder: Path) -> None:
    """It has its first token by then, and goes on from there."""
    engine = open_engine(folder)
    batch = Batch(engine)
    row = batch.join("Hello", {"sampling": Sampling(temperature=0), "max_tokens": 40})
    other = batch.join("Hello!", {"sampling": Sampling(temperature=0), "max_tokens": 4})
    assert prefilling(engine) == {row, other}
    engine.park(row)
    while batch.is_busy:
        batch.step(512)
    assert (batch.answers[row].tokens, batch.answers[other].tokens) == (0, 4)
    assert prefilling(engine) == frozenset()
    engine.resume(row)
    while batch.is_busy:
        batch.step(512)
    assert batch.answers[row].tokens == 40 or batch.answers[row].ends == ["stop"]


def test_a_fault_after_a_row_is_resumed_does_not_stop_it_again(folder: Path) -> None:
    """It was parked while it was read; the fault has it read again, and nobody resumes it twice."""
    engine = open_engine(folder)
    batch = Batch(engine)
    row = batch.join("Hello", {"sampling": Sampling(temperature=0), "max_tokens": 12})
    engine.park(row)
    batch.step(512)
    engine.resume(row)
    exchange(engine, Passing(engine._model, 2))
    while batch.is_busy:
        batch.step(512)
    assert batch.answers[row].ends
    assert not engine._parked


@pytest.mark.parametrize("act", ["park", "preempt", None])
def test_a_bound_holds_wherever_the_row_is(folder: Path, act: str | None) -> None:
    """Running, parked, preempted, or being read again."""
    engine = open_engine(folder)
    batch = Batch(engine)
    row = batch.join("Hi", {"sampling": Sampling(temperature=1, seed=1), "max_tokens": 40})
    for _ in range(3):
        batch.step(512)
    if act is not None:
        getattr(engine, act)(row)
        assert engine.cap_tokens(row, 30) == []
        engine.resume(row)
    assert engine.cap_tokens(row, 8) == []
    while batch.is_busy:
        batch.step(512)
    assert batch.answers[row].ends == ["length"]
    assert batch.answers[row].tokens == 8


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("is_batched", [True, False])
def test_a_bound_that_a_row_has_reached_ends_it_at_once(
    folder: Path, tokens: int, is_batched: bool
) -> None:
    """Running, or waiting for its turn beside others: it says no more, and its neighbour all."""
    engine = open_engine(folder, prefix_cache_bytes=1 << 24)
    engine.apply_verdict(Verdict(rows=is_batched, single=True, prefixes=True, window=True))
    batch = Batch(engine)
    sampling = {"sampling": Sampling(temperature=1, seed=1, ignore_eos=True), "max_tokens": 12}
    batch.join("Hi " * 200, sampling)
    while batch.is_busy:
        batch.step(512)
    row, other = batch.join("Hi " * 200, sampling), batch.join("Hello!", sampling)
    while batch.answers[row].tokens < tokens:
        batch.step(512)
    cached = batch.answers[row].cached
    assert cached
    batch.hear(engine.cap_tokens(row, tokens))
    while batch.is_busy:
        batch.step(512)
    assert (batch.answers[row].ends, batch.answers[row].tokens) == (["length"], tokens)
    assert batch.answers[row].cached == cached
    assert batch.answers[other].tokens == 12


def test_a_row_that_is_stopped_can_end_where_it_stands(folder: Path) -> None:
    """With `length`, and with the text that was held back for a stop string."""
    engine = open_engine(folder)
    whole, cut = Batch(engine), Batch(engine)
    greedy = {"sampling": Sampling(temperature=0), "max_tokens": 20}
    first = whole.join("Hello", greedy)
    for _ in range(8):
        whole.step(512)
    said = whole.answers[first]
    engine.leave(first)
    stop = said.text[-1] + "never said"
    row = cut.join("Hello", {**greedy, "stop": [stop]})
    while cut.answers[row].tokens < said.tokens:
        cut.step(512)
    assert cut.answers[row].text == said.text[:-1]
    engine.preempt(row)
    cut.hear(engine.cap_tokens(row, said.tokens))
    assert (cut.answers[row].text, cut.answers[row].ends) == (said.text, ["length"])
    assert cut.answers[row].tokens == said.tokens
    assert not engine.rows
