"""What each kind of model is made to do: load, be tried stage by stage, and close.

A trial raises nothing: a stage that fails is a finding, and the next one is tried.
"""

import base64
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from gateway.bench.figures import median
from gateway.bench.workloads import PERSON
from gateway.doctor import findings
from gateway.doctor.findings import Finding, Tolerance
from gateway.errors import EngineFailed, GatewayError
from gateway.jobs import (
    Caller,
    GenerateJob,
    Grammar,
    Sampling,
    SequenceDelta,
    SequenceParams,
    TokenLogprob,
    Vectors,
    Verdict,
)
from gateway.logs import human_bytes
from gateway.registry import EmbeddingSpec
from gateway.serving.ports import EmbeddingEngine, GenerationEngine, RerankEngine

STAGES: Final[Mapping[str, Sequence[str]]] = {
    "embedding": ("load", "vectors", "batch", "speed", "memory"),
    "rerank": ("load", "batch", "speed", "memory"),
    "chat": ("load", "batch", "alone", "together", "speed", "fused", "memory"),
}
LOAD: Final = "load"
MEMORY: Final = "memory"


@dataclass(frozen=True, slots=True)
class Stage:
    """Something to try. If the process dies, its name is what was under way."""

    name: str
    run: Callable[[], Sequence[Finding]]


class Trial(Protocol):
    """A loaded model with its dtype, and the stages to try on it."""

    dtype: str

    def stages(self) -> Sequence[Stage]:
        """Return what is tried, in order."""

    def release(self) -> None:
        """Release all memory but the weights."""

    def close(self) -> None:
        """Release the weights."""


Event: TypeAlias = str | Finding
Rate: TypeAlias = Callable[[int], float]  # units a second, for a number of rows at once


def run_trial(open_: Callable[[], Trial], held_bytes: Callable[[], int]) -> Iterator[Event]:
    """Yield the name of each stage as it begins, and then its findings.

    A stage that raises has failed, and the next ones are still tried.
    """
    yield LOAD
    before, started = held_bytes(), time.perf_counter()
    try:
        trial = open_()
    except Exception as error:
        yield Finding(LOAD, "fail", _describe(error))
        return
    loaded, seconds = held_bytes(), time.perf_counter() - started
    message = f"{human_bytes(loaded - before)}, {trial.dtype}, in {seconds:.1f} seconds."
    measured = {"seconds": seconds, "bytes": loaded - before, "dtype": trial.dtype}
    yield Finding(LOAD, "ok", message, measured)
    for stage in trial.stages():
        yield stage.name
        yield from _try_stage(stage)
    yield MEMORY
    yield from _try_stage(Stage(MEMORY, lambda: [_judge_memory(trial, held_bytes, before, loaded)]))


def _try_stage(stage: Stage) -> Sequence[Finding]:
    try:
        return stage.run()
    except Exception as error:
        return [Finding(stage.name, "fail", _describe(error))]


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, GatewayError) else f"{type(error).__name__}: {error}"


def _judge_memory(trial: Trial, held_bytes: Callable[[], int], before: int, loaded: int) -> Finding:
    trial.release()
    idle = held_bytes()
    trial.close()
    return findings.judge_memory(before, loaded, idle, held_bytes())


TEXTS_AT_ONCE: Final = (1, 32)


@dataclass(frozen=True, slots=True)
class Golden:
    """Texts and their vectors, made by sentence-transformers with the model of `source`."""

    source: str
    texts: Sequence[str]
    vectors: Vectors

    def is_of(self, spec: EmbeddingSpec) -> bool:
        """Return True if a spec is that model, unless models.yaml changes its pooling."""
        is_pooled_otherwise = (spec.pooling, spec.normalize) != (None, None)
        return str(spec.source) == self.source and not is_pooled_otherwise


def read_golden() -> Golden:
    """Read the golden vectors, which tests/golden/make_golden.py wrote."""
    kept = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
    numbers = np.frombuffer(base64.b64decode(kept["vectors"]), dtype="<f2").astype(np.float32)
    return Golden(kept["source"], kept["texts"], numbers.reshape(len(kept["texts"]), -1))


class EmbeddingTrial:
    """The trial of an embedding engine; `rate` returns texts a second, for a number at once."""

    def __init__(
        self,
        engine: EmbeddingEngine,
        golden: Golden,
        allowed: Tolerance,
        rate: Rate,
        *,
        dtype: str,
        is_golden: bool,
    ) -> None:
        self.dtype = dtype
        self._engine = engine
        self._golden = golden
        self._allowed = allowed
        self._rate = rate
        self._is_golden = is_golden
        self._rows = [engine.truncate(row) for row in engine.encode(golden.texts)]

    def stages(self) -> Sequence[Stage]:
        """Return what is tried, in order."""
        return (
            Stage("vectors", self._vectors),
            Stage("batch", self._batch),
            Stage("speed", self._speed),
        )

    def release(self) -> None:
        """Do nothing: an embedding engine holds only its weights."""

    def close(self) -> None:
        """Release the weights."""
        self._engine.close()

    def _vectors(self) -> list[Finding]:
        if not self._is_golden:
            message = f"those that are known are of {self._golden.source} alone."
            return [Finding("vectors", "skip", message)]
        distance = _distance(self._golden.vectors, self._engine.embed(self._rows))
        return [findings.judge_vectors(distance, len(self._rows), self._allowed)]

    def _batch(self) -> list[Finding]:
        alone = np.concatenate([self._engine.embed([row]) for row in self._rows])
        distance = _distance(alone, self._engine.embed(self._rows))
        return [findings.judge_texts_together(distance, len(self._rows), self._allowed)]

    def _speed(self) -> list[Finding]:
        return [
            findings.judge_speed("texts", {count: self._rate(count) for count in TEXTS_AT_ONCE})
        ]


class RerankTrial:
    """The trial of a cross-encoder; `rate` returns pairs a second, for a number of requests."""

    def __init__(
        self,
        engine: RerankEngine,
        texts: Sequence[str],
        allowed: Tolerance,
        rate: Rate,
        *,
        dtype: str,
    ) -> None:
        self.dtype = dtype
        self._engine = engine
        self._allowed = allowed
        self._rate = rate
        self._pairs = engine.encode_pairs("Hello", texts)

    def stages(self) -> Sequence[Stage]:
        """Return what is tried, in order."""
        return (Stage("batch", self._batch), Stage("speed", self._speed))

    def release(self) -> None:
        """Do nothing: a cross-encoder holds only its weights."""

    def close(self) -> None:
        """Release the weights."""
        self._engine.close()

    def _batch(self) -> list[Finding]:
        alone = np.concatenate([self._engine.score([pair]) for pair in self._pairs])
        together = self._engine.score(self._pairs)
        size = float(np.sqrt((alone.astype(np.float64) ** 2).mean()))
        distance = float(np.abs(alone - together).max()) / size if size else math.nan
        return [findings.judge_pairs_together(distance, len(self._pairs), self._allowed)]

    def _speed(self) -> list[Finding]:
        return [
            findings.judge_speed("pairs", {count: self._rate(count) for count in TEXTS_AT_ONCE})
        ]


def _distance(vectors: Vectors, others: Vectors) -> float:
    """Return the largest difference of two rows, as a share of the first; NaN if one is."""
    lengths = np.linalg.norm(vectors, axis=1)
    return float((np.linalg.norm(vectors - others, axis=1) / lengths).max())


ROWS_AT_ONCE: Final = (1, 8)
TURNS: Final = 3  # of a comparison of two speeds
TOKENS: Final = 24  # of each greedy answer, which may not end sooner
FORM_TOKENS: Final = 256  # more than the longest answer that the schema allows
STEPS: Final = 4  # that the first rows run before one leaves and others join
LIKELIEST: Final = 5
EXPECTED: Final = "Paris"
PROMPTS: Final = (
    "What is the capital of France?",
    "Count from one to twelve, in words.",
    "A gateway keeps one lane to its device, and every request waits its turn on it. Texts to "
    "embed arrive in storms, questions come one by one, and neither should keep the other waiting "
    "for long. Say in one sentence what the gateway has to take care of.",
)
_CALLER: Final = Caller(request_id="doctor", deadline=math.inf, allowed_s=math.inf)
_FORM: Final = Grammar("json_schema", json.dumps(PERSON), strict=True)
_GREEDY: Final = Sampling(temperature=0)
_SAMPLED: Final = Sampling(temperature=1, seed=7)


@dataclass(slots=True)
class Answer:
    """The answer of a row so far, and its number of pieces."""

    text: str = ""
    pieces: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_whole: bool = False

    def add(self, delta: SequenceDelta) -> None:
        """Add a delta; raises EngineFailed."""
        if delta.error is not None:
            raise EngineFailed("the model", delta.error)
        self.text += delta.text
        self.pieces += 1
        self.logprobs += delta.logprobs
        self.is_whole = delta.finish_reason == "stop"


class GenerationTrial:
    """The trial of a chat engine; `rate` returns tokens a second, for a number of rows at once.

    `open_fused` loads the model again, with `fuse_projections`, for its rate; None skips that.
    `knows_paris` is True for a model that is known to answer the first prompt right. `keep` keeps
    the self-test's verdict for the gateway.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        allowed: Tolerance,
        rate: Rate,
        open_fused: Callable[[], AbstractContextManager[Rate]] | None,
        *,
        dtype: str,
        template_args: Mapping[str, Any],
        prefill_chunk_tokens: int,
        knows_paris: bool,
        keep: Callable[[Verdict], None],
    ) -> None:
        self.dtype = dtype
        self._keep = keep
        self._engine = engine
        self._open_fused = open_fused
        self._knows_paris = knows_paris
        self._allowed = allowed
        self._rate = rate
        self._template_args = template_args
        self._prefill_chunk_tokens = prefill_chunk_tokens

    def stages(self) -> Sequence[Stage]:
        """Return what is tried, in order."""
        return (
            Stage("batch", self._batch),
            Stage("alone", self._answer),
            Stage("together", self._together),
            Stage("speed", self._speed),
            Stage("fused", self._fused),
        )

    def release(self) -> None:
        """Release the KV of kept prompts."""
        self._engine.clear_prefixes()

    def close(self) -> None:
        """Release the weights."""
        self._engine.close()

    def _batch(self) -> list[Finding]:
        """Run the engine's self-test, and apply and keep its verdict, as the gateway does."""
        *_, verdict = self._engine.self_test()
        self._engine.apply_verdict(verdict)
        self._keep(verdict)
        return [findings.judge_rows_together(verdict, self._allowed)]

    def _answer(self) -> list[Finding]:
        text = self._alone[0].text
        return [findings.judge_answer(text, EXPECTED, is_known_to=self._knows_paris)]

    @cached_property
    def _alone(self) -> list[Answer]:
        return [self._run_alone(prompt) for prompt in PROMPTS]

    def _run_alone(self, prompt: str) -> Answer:
        with self._rows() as answers:
            row = self._join(self._greedy(prompt), answers)
            for _ in self._step(answers):
                pass
        return answers[row]

    def _together(self) -> list[Finding]:
        """Run rows of every kind: greedy, held to a schema, sampled, leaving, joining late."""
        alone = self._alone
        with self._rows() as answers:
            return self._run_together(alone, answers)

    def _run_together(self, alone: Sequence[Answer], answers: dict[int, Answer]) -> list[Finding]:
        engine = self._engine
        held = self._plan("Describe a person called Ada, as JSON.", FORM_TOKENS, grammar=_FORM)
        form = self._join(held, answers)
        leaving = self._plan(
            "Tell me a long story.", 2 * TOKENS, replace(_SAMPLED, min_tokens=TOKENS)
        )
        gone = self._join(leaving, answers)
        greedy = [self._join(self._greedy(prompt), answers) for prompt in PROMPTS[:-1]]
        steps = self._step(answers)
        for _ in range(STEPS):
            next(steps, None)
        rows, pieces = engine.rows, answers[gone].pieces
        engine.leave(gone)
        left = engine.rows
        greedy.append(self._join(self._greedy(PROMPTS[-1]), answers))
        self._join(self._plan("Tell me a short story.", TOKENS, _SAMPLED), answers)
        for _ in steps:
            pass
        partings = [
            findings.find_parting(each.logprobs, answers[row].logprobs)
            for each, row in zip(alone, greedy, strict=True)
        ]
        may_think = held.is_thinking or held.may_think
        answer = answers[form]
        return [
            findings.judge_greedy(partings, TOKENS, len(answers) - 1, self._allowed),
            findings.judge_structured(
                answer.text, PERSON, is_whole=answer.is_whole, may_think=may_think
            ),
            findings.judge_cancelled(rows, left, answers[gone].pieces - pieces),
            *findings.judge_faults(engine.take_faults()),
        ]

    def _speed(self) -> list[Finding]:
        return [findings.judge_speed("tokens", {rows: self._rate(rows) for rows in ROWS_AT_ONCE})]

    def _fused(self) -> list[Finding]:
        """Measure the model and the same with fused projections in turn."""
        if self._open_fused is None:
            return [Finding("fused", "skip", "the model is fused, or memory has no room for two.")]
        with self._open_fused() as fused_rate:
            gains = {
                rows: median([fused_rate(rows) / self._rate(rows) for _ in range(TURNS)])
                for rows in ROWS_AT_ONCE
            }
        return [findings.judge_fused(gains)]

    def _greedy(self, prompt: str) -> SequenceParams:
        sampling = replace(_GREEDY, min_tokens=TOKENS)
        return self._plan(prompt, TOKENS, sampling, logprobs=LIKELIEST)

    def _plan(
        self,
        text: str,
        max_tokens: int,
        sampling: Sampling = _GREEDY,
        *,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> SequenceParams:
        [row] = self._engine.prepare(
            GenerateJob(
                caller=_CALLER,
                messages=[{"role": "user", "content": text}],
                sampling=sampling,
                max_tokens=max_tokens,
                grammar=grammar,
                logprobs=logprobs,
                template_args=self._template_args,
            )
        )
        if row.grammar is None:
            return row
        return replace(row, compiled=self._engine.compile(row.grammar))

    @contextmanager
    def _rows(self) -> Iterator[dict[int, Answer]]:
        """Yield the answers of rows, without kept prompts before; all rows leave at exit."""
        self._engine.clear_prefixes()
        answers: dict[int, Answer] = {}
        try:
            yield answers
        finally:
            for row in answers:
                self._engine.leave(row)

    def _join(self, job: SequenceParams, answers: dict[int, Answer]) -> int:
        row = self._engine.join(job)
        answers[row] = Answer()
        return row

    def _step(self, answers: Mapping[int, Answer]) -> Iterator[None]:
        """Prefill and decode until no row is left; between two steps rows may join and leave."""
        engine = self._engine
        while engine.is_prefilling or engine.is_decoding:
            read = engine.prefill(self._prefill_chunk_tokens) if engine.is_prefilling else ()
            for delta in (*read, *engine.decode()):
                answers[delta.sequence_id].add(delta)
            yield
