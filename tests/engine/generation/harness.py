"""What tests do to an engine: its own verbs, one by one; what its rows are asked and told."""

import gc
import json
import random
from collections import abc
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.sequence import Sequence
from gateway.engine.models.adapters import read_adapter
from gateway.engine.models.decoders import parameters
from gateway.jobs import (
    Adapter,
    CallDelta,
    Calling,
    Compiled,
    Delta,
    Function,
    GenerateJob,
    Grammar,
    Pass,
    Sampling,
    SequenceParams,
    TokenLogprob,
)
from tests.checkpoints import HYBRID, SLIDING, STATEFUL
from tests.fakes import caller

_numbers = count(1)
GREEDY = Sampling(temperature=0)
TEXTS = ["Hello there!", "x", "What is 2 + 2? " * 9, "日本語のテキスト 🙂", "a b c " * 150]
SEEDED = Sampling(
    temperature=1.3, top_p=0.95, top_k=50, min_p=0.001, seed=-7, frequency_penalty=0.4
)
PLENTY = 1 << 30
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
PROMPTS = ["Hi", "What is 2 + 2? " * 9, "a b c " * 60, "日本語のテキスト 🙂"]
ECHO = "one two three four five six seven " * 8
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": SLIDING,
    "lfm2": STATEFUL,
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "qwen3_next": HYBRID,
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "intermediate_size": 32,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def join(engine: GenerationEngine, params: SequenceParams) -> int:
    """Queue a sequence for prefill, by a number of its own."""
    number = next(_numbers)
    engine.join(number, params)
    return number


def prefilling(engine: GenerationEngine) -> set[int]:
    return {row.id for row in engine._prefill.rows}


def open_engine(
    folder: Path, prefix_cache_bytes: int = 0, speculate_rows: int = 0, **options: Any
) -> GenerationEngine:
    kept = {"prefix_cache_bytes": prefix_cache_bytes, "speculate_rows": speculate_rows}
    return load_generation(folder, **{"name": "tiny", "device": Device.CPU, **kept, **options})


@dataclass
class Answer:
    """What a row was told."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    deltas: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    kept_tokens: int = 0
    unkept_tokens: int = 0
    stop: str | None = None


def job(text: str, sampling: Sampling = GREEDY, **more: Any) -> GenerateJob:
    more.setdefault("max_tokens", 24)
    messages = [{"role": "user", "content": text}]
    return GenerateJob(caller=caller(), messages=messages, sampling=sampling, **more)


def newest(engine: GenerationEngine) -> Sequence:
    """Give the row that joined last, before it is read."""
    row = engine._prefill._line[-1]
    assert isinstance(row, Sequence)
    return row


class Run:
    """Rows under way, and what they were told so far."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}

    def join(self, job: GenerateJob) -> list[int]:
        rows = []
        for row in self.engine.prepare(job):
            rows.append(join(self.engine, row))
            self.answers[rows[-1]] = Answer(ids=newest(self.engine).tokens)
        return rows

    def step(self, budget: int = 512) -> None:
        deltas = self.engine.prefill(budget) if self.engine.is_prefilling else []
        for delta in (*deltas, *self.engine.decode()):
            answer = self.answers[delta.row]
            assert answer.finish_reason is None, "nothing comes after the end"
            assert answer.error is None
            answer.text += delta.text
            answer.deltas.append(delta.text)
            assert delta.cached_tokens == 0 or answer.tokens == 0, "only the first delta tells"
            answer.cached_tokens += delta.cached_tokens
            answer.kept_tokens += delta.kept_tokens
            answer.unkept_tokens += delta.unkept_tokens
            answer.stop = delta.stop
            answer.tokens += delta.tokens
            answer.reasoning += delta.reasoning
            answer.calls += [delta.call] if delta.call is not None else []
            answer.logprobs += delta.logprobs
            answer.finish_reason, answer.error = delta.finish_reason, delta.error

    def finish(self, budget: int = 512) -> list[Answer]:
        while self.engine.is_prefilling or self.engine.is_decoding:
            self.step(budget)
        return list(self.answers.values())


def answers(
    engine: GenerationEngine, jobs: abc.Sequence[GenerateJob], budget: int = 512
) -> list[Answer]:
    run = Run(engine)
    for each in jobs:
        run.join(each)
    return run.finish(budget)


def exchange(engine: GenerationEngine, model: Any) -> None:
    """Give an engine another model to ask, from the next prompt on."""
    engine._model = engine._prefill._model = model


class Passing:
    """A model whose call number `at` raises, once: a fault that is nobody's."""

    def __init__(self, model: Any, at: int) -> None:
        self._model = model
        self._left = at

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("out of luck")
        return self._model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def tokens(count: int, seed: int) -> list[int]:
    """Draw a prompt of ordinary tokens."""
    draw = random.Random(seed)
    return [draw.randrange(300, 1000) for _ in range(count)]


def bare(prompt: abc.Sequence[int], sampling: Sampling = GREEDY, **more: Any) -> GenerateJob:
    more.setdefault("max_tokens", 12)
    return GenerateJob(caller=caller(), prompt=list(prompt), sampling=sampling, **more)


def ids(told: abc.Sequence[Answer]) -> list[list[int]]:
    assert all(answer.error is None for answer in told)
    return [answer.ids for answer in told]


def cached(told: abc.Sequence[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in told]


def active_memory() -> int:
    """Count the bytes of the arrays that somebody holds."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@dataclass
class Heard:
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

    def says_as(self, other: "Heard") -> bool:
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
        self.answers: dict[int, Heard] = {}

    def join(self, text: str, given: dict[str, Any]) -> int:
        job = GenerateJob(caller=caller(), messages=[{"role": "user", "content": text}], **given)
        (row,) = self.engine.prepare(job)
        if row.grammar is not None:
            row = replace(row, compiled=compiled(self.engine, row.grammar))
        number = join(self.engine, row)
        self.answers[number] = Heard()
        return number

    def hear(self, deltas: abc.Sequence[Delta]) -> None:
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


def answer_at_random(
    engine: GenerationEngine, jobs: abc.Sequence[tuple[str, dict[str, Any]]], chance: random.Random
) -> tuple[list[Heard], list[Pass]]:
    """Heard jobs that join at random moments; return the answers, and the decode steps."""
    batch, waiting, rows, passes = Batch(engine), list(jobs), [], []
    while waiting or batch.is_busy:
        if waiting and (not batch.is_busy or chance.random() < 0.3):
            rows.append(batch.join(*waiting.pop(0)))
        batch.hear(engine.prefill(64) if engine.is_prefilling else [])
        is_decoding = engine.is_decoding
        batch.hear(engine.decode())
        passes += [engine.last_pass] if is_decoding else []
    assert not engine._faults.take()
    return [batch.answers[row] for row in rows], passes


def load_adapter(engine: GenerationEngine, name: str, folder: Path) -> Adapter:
    steps = engine.adapters.add_in_steps(read_adapter(name, folder))
    return next(adapter for adapter in steps if adapter is not None)


def held(engine: GenerationEngine) -> int:
    """Count the bytes of KV that rows hold: all but weights and prefixes."""
    drafting = engine._drafts.drafters[-1]
    models = [engine._model]
    if isinstance(drafting, DraftModel):
        models.append(drafting._model)
    weights = sum(array.nbytes for model in models for array in parameters(model))
    return engine.nbytes() - weights - engine.prefix_bytes
