"""Scripted engines: no maths, but a seam to hold, fail and watch every call."""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gateway.app.opening import Size
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import (
    Caller,
    EmbedJob,
    GenerateJob,
    Grammar,
    Pass,
    RowDelta,
    RowJob,
    Sampling,
    TokenIds,
    Vectors,
)
from gateway.registry import ChatSpec, EmbeddingSpec, ModelSpec
from gateway.serving.ports import EmbeddingEngine, GenerationEngine

FAR = 1e12  # a deadline beyond every test


class Gate:
    """Holds the lane's thread until opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def close(self) -> None:
        self._open.clear()
        self.reached.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(20), "the test never opened the gate"


@dataclass
class ScriptedEmbedder:
    """A text's tokens are its characters; its vector is (length, first token, 0, 1)."""

    dimensions: int = 4
    max_tokens: int = 100
    vocab_size: int = 0x110000
    prompts: Mapping[str, str] = field(default_factory=lambda: {"query": "?"})
    default_prompt_name: str | None = None
    gate: Gate = field(default_factory=Gate)
    batches: list[list[int]] = field(default_factory=list)
    poison: str | None = None
    is_closed: bool = False

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]

    def truncate(self, tokens: TokenIds) -> list[int]:
        return list(tokens[: self.max_tokens])

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        return vectors[:, :dimensions]

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        self.batches.append([len(row) for row in rows])
        self.gate.pass_through()
        if self.poison and any(ord(self.poison) in row for row in rows):
            raise RuntimeError("poisoned")
        return np.array([[len(row), row[0], 0, 1] for row in rows], dtype=np.float32)

    def nbytes(self) -> int:
        return 1

    def close(self) -> None:
        self.is_closed = True


@dataclass
class ScriptedWriter:
    """Answers a conversation with its last message, or a prompt with itself, a character a step;
    or, if there is a `script`, with its deltas, one a step.
    """

    max_context: int = 100
    gate: Gate = field(default_factory=Gate)
    steps: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    fail_at_step: int | None = None
    is_closed: bool = False
    last_pass: Pass = field(default_factory=Pass)
    script: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[GenerateJob] = field(default_factory=list)
    kept_bytes: int = 0
    curtailed: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, RowJob] = field(default_factory=dict)
    _running: dict[int, list[int]] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    _prompts: dict[int, TokenIds] = field(default_factory=dict)

    def plan(self, job: GenerateJob) -> list[RowJob]:
        self.jobs.append(job)
        noun = "messages" if job.prompt is None else "prompt"
        text = job.messages[-1]["content"] if job.prompt is None else _text(job.prompt)
        if text == "refuse me":
            raise BadRequest("The template refuses.", param=noun)
        room = self.max_context - len(text)
        if room < 1:
            raise ContextLengthExceeded(self.max_context, len(text), param=noun)
        wanted = min(job.max_tokens or room, room)
        row = RowJob(
            prompt=[ord(c) for c in text],
            max_tokens=wanted,
            sampling=job.sampling,
            stop=job.stop,
            grammar=job.grammar,
            is_open=job.max_tokens is None,
        )
        return [row] * job.n

    def compile(self, grammar: Grammar) -> object:
        if "bad" in grammar.source:
            raise BadRequest("The grammar is bad.", param="response_format")
        return grammar

    def join(self, job: RowJob) -> int:
        row = len(self.joined) + 1
        self.joined.append(row)
        self._waiting[row] = job
        self._prompts[row] = job.prompt
        return row

    def leave(self, row: int) -> None:
        self.left.append(row)
        self._waiting.pop(row, None)
        self._running.pop(row, None)

    def curtail(self, row: int, max_tokens: int) -> None:
        self.curtailed[row] = max_tokens
        said = len(self._prompts[row]) - len(self._running[row])
        self._running[row] = [*self._running[row][: max_tokens - said], -1]

    def forget(self) -> None:
        self.kept_bytes = 0

    def prefill(self, token_budget: int) -> list[RowDelta]:
        lengths = [len(job.prompt) for job in self._waiting.values()]
        rows = len(lengths)
        self.last_pass = Pass(rows, sum(lengths), rows * max(lengths, default=0))
        for row, job in self._waiting.items():
            self._running[row] = list(job.prompt)[: job.max_tokens]
            if job.max_tokens < len(job.prompt):
                self._running[row].append(-1)
        self._waiting.clear()
        return []

    def decode(self) -> list[RowDelta]:
        self.gate.pass_through()
        rows = len(self._running)
        self.last_pass = Pass(rows, rows, rows)
        self.steps.append(rows)
        if self.fail_at_step == len(self.steps):
            raise RuntimeError("the step failed")
        return [delta for row in list(self._running) for delta in self._next(row)]

    def settle(self) -> None: ...

    def _next(self, row: int) -> list[RowDelta]:
        if self.script:
            at = self._places.get(row, 0)
            self._places[row] = at + 1
            if at + 1 == len(self.script):
                del self._running[row]
            return [RowDelta(row, **self.script[at])]
        said = self._running[row]
        if not said or said[0] == -1:
            del self._running[row]
            return [RowDelta(row, "", 1 - len(said), "length" if said else "stop")]
        return [RowDelta(row, chr(said.pop(0)), 1)]

    @property
    def rows(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def is_prefilling(self) -> bool:
        return bool(self._waiting)

    @property
    def is_decoding(self) -> bool:
        return bool(self._running)

    def nbytes(self) -> int:
        return 1

    def close(self) -> None:
        self.is_closed = True


def _text(prompt: str | TokenIds) -> str:
    return prompt if isinstance(prompt, str) else "".join(map(chr, prompt))


@dataclass
class ScriptedEngines:
    """Loads scripted engines, counting; a model in `failing` fails."""

    embedder: ScriptedEmbedder = field(default_factory=ScriptedEmbedder)
    writer: ScriptedWriter = field(default_factory=ScriptedWriter)
    loads: list[str] = field(default_factory=list)
    failing: dict[str, Exception] = field(default_factory=dict)
    load_gate: Gate = field(default_factory=Gate)
    sizes: dict[str, int] = field(default_factory=dict)
    device: str = "scripted"
    memory_bytes: int = 1 << 30
    active_bytes: int = 12
    cached_bytes: int = 34
    tidied: int = 0

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def tidy(self) -> None:
        self.tidied += 1

    async def folder(self, spec: ModelSpec) -> Path:
        return Path()

    async def size(self, spec: ModelSpec, folder: Path) -> Size:
        return Size(self.sizes.get(spec.id, 1))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return None

    def embedding(
        self, spec: EmbeddingSpec, folder: Path
    ) -> Generator[EmbeddingEngine | None, None, None]:
        self._load(spec)
        yield None
        yield self.embedder

    def generation(
        self, spec: ChatSpec, folder: Path
    ) -> Generator[GenerationEngine | None, None, None]:
        self._load(spec)
        yield None
        yield self.writer

    def _load(self, spec: ModelSpec) -> None:
        self.loads.append(spec.id)
        self.load_gate.pass_through()
        if spec.id in self.failing:
            raise self.failing[spec.id]


def caller(deadline: float = FAR) -> Caller:
    return Caller(request_id="req-test", deadline=deadline, allowed_s=600)


def embed_job(*texts: str, deadline: float = FAR, truncate: bool = False) -> EmbedJob:
    return EmbedJob(caller=caller(deadline), texts=texts, truncate=truncate)


def generate_job(
    text: str, *, n: int = 1, max_tokens: int | None = None, deadline: float = FAR
) -> GenerateJob:
    return GenerateJob(
        caller=caller(deadline),
        messages=[{"role": "user", "content": text}],
        sampling=Sampling(temperature=0),
        n=n,
        max_tokens=max_tokens,
    )
