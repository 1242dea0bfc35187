"""An engine driven by plans, one by one; the requests and deltas of its rows."""

import gc
import json
import random
from collections import abc
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.loading import load_generation, load_weights
from benchmarks.steps import Steps
from gateway.engine.device import Device
from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.generation.sequence import Sequence
from gateway.engine.models.adapters import read_adapter
from gateway.engine.models.decoders import parameters
from gateway.engine.models.gguf.checkpoint import open_checkpoint
from gateway.engine.prompting.chat_tokenizer import ChatFormats
from gateway.jobs.chat import (
    Adapter,
    CallDelta,
    Calling,
    Compiled,
    Delta,
    Function,
    GenerateJob,
    Grammar,
    Sampling,
    TokenLogprob,
)
from gateway.jobs.steps import Pass, SequenceParams
from tests.checkpoints import HYBRID, SLIDING, STATEFUL
from tests.fakes import caller

Before = abc.Callable[[mx.array], object]  # takes a pass's tokens
After = abc.Callable[[mx.array, mx.array, Any], mx.array]  # takes its logits, tokens and cache
_numbers = count(1)
_setups: dict[tuple[object, ...], ChatSetup] = {}  # keys are their sources
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
# Another seed has two tokens as likely within 3e-6: rounding says which of them is first.
PENALIZED = Sampling(temperature=1.3, top_p=0.95, top_k=50, seed=-8, frequency_penalty=0.4)
JOBS: list[dict[str, Any]] = [
    {"sampling": Sampling(temperature=0), "max_tokens": 40},
    {"sampling": Sampling(temperature=0), "max_tokens": 1, "logprobs": 3},
    {"sampling": Sampling(temperature=0), "max_tokens": 30, "logprobs": 2},
    {"sampling": PENALIZED, "max_tokens": 40, "logprobs": 1},
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
        "model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "qwen3_next": HYBRID,
    "gpt_oss": {
        "model_type": "gpt_oss", "num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 32, "intermediate_size": 32,
        "rope_scaling": None, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "state_size": 8, "conv_kernel": 4, "use_bias": False,
    "use_conv_bias": True, "time_step_rank": 8,
}  # fmt: skip


def join(steps: Steps, params: SequenceParams) -> int:
    """Queue a sequence for prefill, by a number of its own."""
    number = next(_numbers)
    steps.join(number, params)
    return number


def open_engine(
    folder: Path, prefix_cache_bytes: int = 0, speculate_rows: int = 0, **options: Any
) -> GenerationEngine:
    """Open a model's folder or its file.

    Formats of equal folders are read once: reading takes as long as the weights, and pauses twice.
    """
    kept = {"prefix_cache_bytes": prefix_cache_bytes, "speculate_rows": speculate_rows}
    given = {"name": "tiny", "device": Device.CPU, **kept, **options}
    if folder.is_file() or given.keys() & {*ChatFormats.__annotations__, "shape", "sandbox"}:
        return load_generation(folder, **given)
    files = [file for file in sorted(folder.iterdir()) if file.suffix != ".safetensors"]
    content = tuple((file.name, file.read_bytes()) for file in files if file.is_file())
    name, max_context = given.pop("name"), given.pop("max_context", None)
    key = (content, name, max_context)
    if key not in _setups:
        _setups[key] = read_chat_setup(folder, name=name, max_context=max_context)
    setup = _setups[key]
    own: Any = {"checkpoint": open_checkpoint(name, folder), "chat": copy(setup.chat)}
    return load_weights(replace(setup, **own), **given)


@dataclass
class Answer:
    """The deltas of a row, put together."""

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

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None, "nothing comes after the end"
        assert self.error is None
        self.text += delta.text
        self.deltas.append(delta.text)
        assert delta.cached_tokens == 0 or self.tokens == 0, "only the first delta tells"
        self.cached_tokens += delta.cached_tokens
        self.kept_tokens += delta.kept_tokens
        self.unkept_tokens += delta.unkept_tokens
        self.stop = delta.stop
        self.tokens += delta.tokens
        self.reasoning += delta.reasoning
        self.calls += [delta.call] if delta.call is not None else []
        self.logprobs += delta.logprobs
        self.finish_reason, self.error = delta.finish_reason, delta.error

    @property
    def ends(self) -> bool:
        return self.finish_reason is not None

    @property
    def chosen(self) -> list[float]:
        return [each.chosen.logprob for each in self.logprobs]

    def says_as(self, other: "Answer") -> bool:
        """Tell whether it is the same answer; logprobs may differ by rounding."""
        names = ("text", "reasoning", "tokens", "finish_reason", "error")
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        shown, others = (
            [each.chosen.token for each in answer.logprobs] for answer in (self, other)
        )
        return same and shown == others and self.chosen == pytest.approx(other.chosen, abs=1e-3)


def job(text: str, sampling: Sampling = GREEDY, **more: Any) -> GenerateJob:
    more.setdefault("max_tokens", 24)
    messages = [{"role": "user", "content": text}]
    return GenerateJob(caller=caller(), messages=messages, sampling=sampling, **more)


def finish(steps: Steps, budget: int = 512) -> list[Delta]:
    """Bring all rows to their ends; return their deltas."""
    deltas: list[Delta] = []
    while steps.is_busy:
        deltas += steps.prefill(budget) if steps.is_reading else []
        deltas += steps.decode()
    return deltas


def newest(engine: GenerationEngine) -> Sequence:
    """Give the row that joined last, before it is read."""
    row = engine._sequences._prefill._line[-1]
    assert isinstance(row, Sequence)
    return row


class Rows(Steps):
    """Rows under way, and their answers so far."""

    def __init__(self, engine: GenerationEngine) -> None:
        super().__init__(engine)
        self.answers: dict[int, Answer] = {}

    def hear(self, deltas: abc.Sequence[Delta]) -> None:
        for delta in deltas:
            self.answers[delta.id].add(delta)

    def step(self, budget: int = 512) -> None:
        self.hear(self.prefill(budget) if self.is_reading else [])
        self.hear(self.decode())

    def finish(self, budget: int = 512) -> list[Answer]:
        while self.is_busy:
            self.step(budget)
        return list(self.answers.values())

    @property
    def open(self) -> list[int]:
        return [row for row, each in self.answers.items() if not each.ends and not each.error]

    def add(self, job: GenerateJob) -> list[int]:
        rows = []
        for row in self.engine.prepare(job):
            if row.grammar is not None:
                row = replace(row, compiled=compiled(self.engine, row.grammar))
            rows.append(join(self, row))
            self.answers[rows[-1]] = Answer(ids=newest(self.engine).tokens)
        return rows


class Batch(Rows):
    def ask(self, text: str, given: dict[str, Any]) -> int:
        [number] = self.add(job(text, **{"max_tokens": None, **given}))
        return number


def answers(
    engine: GenerationEngine, jobs: abc.Sequence[GenerateJob], budget: int = 512
) -> list[Answer]:
    run = Rows(engine)
    for each in jobs:
        run.add(each)
    return run.finish(budget)


def exchange(engine: GenerationEngine, model: Any) -> None:
    """Give an engine another model to ask, from the next prompt on."""
    sequences = engine._sequences
    engine._model = sequences._model = sequences._prefill._model = model


class Watched:
    """A model whose passes are shown before they run, and whose logits may be changed after."""

    def __init__(self, model: Any, before: Before | None, after: After | None) -> None:
        self._model, self._before, self._after = model, before, after

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        if self._before is not None:
            self._before(tokens)
        logits = self._model(tokens, cache=cache)
        return logits if self._after is None else self._after(logits, tokens, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def watch(
    engine: GenerationEngine, before: Before | None = None, after: After | None = None
) -> Any:
    """Watch an engine's model from the next prompt on; return the model that was there."""
    model = engine._model
    exchange(engine, Watched(model, before, after))
    return model


def shapes(engine: GenerationEngine) -> list[tuple[int, int]]:
    """Return a list that gathers the rows and the padded tokens of each pass."""
    passes: list[tuple[int, int]] = []
    watch(engine, lambda tokens: passes.append((tokens.shape[0], tokens.shape[1])))
    return passes


def spoil(folder: Path, name: str, value: float, at: Any = ...) -> None:
    """Write a number into the weights of a checkpoint."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights[name][at] = value
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


class Passing(Watched):
    """A model whose call number `at` raises, once: a fault that is nobody's."""

    def __init__(self, model: Any, at: int) -> None:
        super().__init__(model, self._count, None)
        self._left = at

    def _count(self, _: mx.array) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("out of luck")


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


@cache
def compiled(engine: GenerationEngine, grammar: Grammar) -> Compiled:
    return engine.compile(grammar)


def answer_at_random(
    engine: GenerationEngine, jobs: abc.Sequence[tuple[str, dict[str, Any]]], seed: int = 0
) -> tuple[list[Answer], list[Pass]]:
    """Let jobs join at random moments; return the answers, and the decode steps."""
    chance = random.Random(seed)
    batch, waiting, rows, passes = Batch(engine), list(jobs), [], []
    while waiting or batch.is_busy:
        if waiting and (not batch.is_busy or chance.random() < 0.3):
            rows.append(batch.ask(*waiting.pop(0)))
        batch.hear(batch.prefill(64) if batch.is_reading else [])
        is_decoding = batch.is_decoding
        batch.hear(batch.decode())
        passes += [batch.size] if is_decoding else []
    assert not batch.faults
    return [batch.answers[row] for row in rows], passes


def load_adapter(engine: GenerationEngine, name: str, folder: Path) -> Adapter:
    steps = engine.adapters.add_in_steps(read_adapter(name, folder))
    return next(adapter for adapter in steps if adapter is not None)


def held(engine: GenerationEngine) -> int:
    """Count the bytes of KV that rows hold: all but weights and prefixes."""
    drafting = engine._drafts.sources[-1]
    models = [engine._model]
    if isinstance(drafting, DraftModel):
        models.append(drafting._model)
    weights = sum(array.nbytes for model in models for array in parameters(model))
    return engine.nbytes() - weights - engine.prefixes.pool_bytes
