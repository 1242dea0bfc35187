"""Figures in one process: our engine and mlx-lm's BatchGenerator in turn, on the same weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)
from benchmarks.steps import Steps

import mlx.core as mx  # isort: skip
from statistics import median

from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model

from benchmarks.device.results import Figure
from benchmarks.loading import load_generation
from gateway.engine.device import Device, clear_cache
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Sampling
from gateway.jobs.steps import SequenceParams
from gateway.settings import Settings

OURS, THEIRS = "gateway's engine", "BatchGenerator"
PREFILL_TOKENS: Final = int(Settings.model_fields["prefill_chunk_tokens"].default)
PROMPT_TOKENS: Final = 32
FIRST_WORD, LAST_WORD = 300, 4000  # tokens that are plain text
MIB: Final = 1 << 20
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a measurement: streams at once, tokens of each, prompts' lengths, and rounds."""

    streams: Sequence[int]
    tokens: int
    prompts: Sequence[int]
    rounds: int

    @classmethod
    def of(cls, *, is_small: bool) -> "Plan":
        if is_small:
            return cls((1, 8, 32), 16, (128, 512, 1024), 3)
        return cls((1, 8, 32, 128), 128, (512, 8192, 32_000), 5)


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of one batch: seconds, CPU seconds of this thread alone, and bytes at the peak."""

    seconds: float
    thread_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The same model twice: in our engine, and as mlx-lm loads it."""

    engine: GenerationEngine
    model: Any

    @classmethod
    def load(cls, folder: Path, device: Device) -> "Pair":
        """Load both; where they hold the same weights, once."""
        engine = load_generation(folder, name=folder.name, device=device)
        model, _ = load_model(folder, lazy=True)
        ours: Any = tree_flatten(engine._model.parameters())
        lazy: Any = tree_flatten(model.parameters())
        if _kinds(ours) == _kinds(lazy):
            model.update(engine._model.parameters())
        mx.eval(model.parameters())
        return cls(engine, model)

    def run(self, who: str, prompts: Prompts, tokens: int) -> Spent:
        """Answer prompts together, greedily, with this number of tokens each."""
        clear_cache()
        mx.reset_peak_memory()
        started, thread = time.perf_counter(), time.thread_time()
        if who == OURS:
            run_engine(self.engine, prompts, tokens)
        else:
            run_generator(self.model, prompts, tokens)
        seconds, thread_s = time.perf_counter() - started, time.thread_time() - thread
        return Spent(seconds, thread_s, mx.get_peak_memory())


def _kinds(weights: Sequence[tuple[str, mx.array]]) -> dict[str, tuple[Any, Any]]:
    return {path: (array.shape, array.dtype) for path, array in weights}


def run_engine(engine: GenerationEngine, prompts: Prompts, tokens: int) -> None:
    """Answer with our engine, reading as many tokens in a turn as the gateway does by default."""
    steps, sampling = Steps(engine), Sampling(temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        job = SequenceParams(prompt=prompt, max_tokens=tokens, sampling=sampling, is_bare=True)
        steps.join(number, job)
    count = 0
    while steps.is_busy:
        deltas = steps.prefill(PREFILL_TOKENS) if steps.is_reading else []
        for delta in (*deltas, *steps.decode()):
            if delta.error is not None:
                raise RuntimeError(delta.error)
            count += delta.tokens
    if count != tokens * len(prompts):
        raise RuntimeError(f"{count} tokens instead of {tokens * len(prompts)}")


def run_generator(model: Any, prompts: Prompts, tokens: int) -> None:
    """Answer with mlx-lm's generator, all rows in one batch."""
    generator: Any = BatchGenerator(model, completion_batch_size=max(8, len(prompts)))
    try:
        rows = set(generator.insert([list(prompt) for prompt in prompts], [tokens] * len(prompts)))
        while rows:
            answers = generator.next_generated()
            rows -= {answer.uid for answer in answers if answer.finish_reason is not None}
    finally:
        generator.close()


def draw_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [random.choices(range(FIRST_WORD, LAST_WORD), k=length) for _ in range(count)]


def measure_in_turn(
    pair: Pair, streams: int, length: int, tokens: int, rounds: int
) -> dict[str, list[Spent]]:
    """Let both answer in every round, each round other prompts of `length` tokens; the first round,
    in which shapes are made, does not count.
    """
    spent: dict[str, list[Spent]] = {OURS: [], THEIRS: []}
    for turn in range(rounds + 1):
        prompts = draw_prompts(streams, length, turn)
        for who, runs in spent.items():
            run = pair.run(who, prompts, tokens)
            if turn:
                runs.append(run)
    return spent


def measure_speed(folder: Path, shape: str, form: str, device: Device, plan: Plan) -> list[Figure]:
    """Measure tokens a second, time to first token, and memory at the peak."""
    pair = Pair.load(folder, device)
    dtype = name_dtype(form, device)
    figures: list[Figure] = []
    cases = [(streams, PROMPT_TOKENS, plan.tokens) for streams in plan.streams]
    for streams, length, tokens in (*cases, *((1, length, 1) for length in plan.prompts)):
        for who, spent in measure_in_turn(pair, streams, length, tokens, plan.rounds).items():
            seconds = median([run.seconds for run in spent])
            at, name = name_streams(streams), "tokens"
            value, unit = streams * tokens / seconds, "tokens/s"
            if tokens == 1:
                at, name = f"prompt of {length}", "time to first token"
                value, unit = 1e3 * seconds, "ms"
            peak = max(run.peak_bytes for run in spent) / MIB
            figures.append(Figure(name, value, unit, who, shape, dtype, at))
            figures.append(Figure("memory at the peak", peak, "MiB", who, shape, dtype, at))
    pair.engine.close()
    return figures


def measure_host(folder: Path, shape: str, form: str, device: Device, plan: Plan) -> list[Figure]:
    """Measure Python's CPU time for a token of a row, in its thread alone.

    The model is as deep as Qwen3 0.6B, with next to no work for the device; the device's own
    threads are not counted. Prompts of 32 tokens are counted.
    """
    pair = Pair.load(folder, device)
    figures = []
    for streams in plan.streams:
        for who, spent in measure_in_turn(
            pair, streams, PROMPT_TOKENS, plan.tokens, plan.rounds
        ).items():
            thread_s = median([run.thread_s for run in spent]) / (plan.tokens * streams)
            at, value = name_streams(streams), 1e6 * thread_s
            figures.append(Figure("host time", value, "µs/token", who, shape, form, at))
    pair.engine.close()
    return figures


def name_dtype(form: str, device: Device) -> str:
    """Say where the gateway computes in another type: on a CPU in float32, 4-bit weights too."""
    is_other = device is Device.CPU and form != "float32"
    return f"{form} (ours as float32)" if is_other else form


def name_streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"
