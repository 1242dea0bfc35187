"""Scripted engines for the checks of doctor --engine: right in all, until one thing is spoilt."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gateway.jobs import (
    GenerateJob,
    Likelihood,
    SequenceDelta,
    SequenceParams,
    TokenIds,
    TokenLogprob,
    Vectors,
)
from tests.fakes import ScriptedChat, ScriptedEmbedder

ADA = {"name": "Ada", "age": 36, "is_member": True, "likes": ["music"]}


@dataclass
class Embedder(ScriptedEmbedder):
    """One whose vectors may be wrong: always, or in a batch."""

    max_tokens: int = 1000
    is_off: bool = False
    is_off_in_batches: bool = False
    is_no_number: bool = False

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        vectors = super().embed(rows)
        if self.is_off:
            vectors[:, 2] += 1
        if self.is_off_in_batches and len(rows) > 1:
            vectors[-1, 2] += 1
        if self.is_no_number:
            vectors[0, 0] = np.nan
        return vectors


@dataclass
class Writer(ScriptedChat):
    """One that repeats each question after “Paris: ”, or gives Ada where a form is asked for.

    `other` is what it says in the place of each sixth character while rows run together, and
    `nats` how much likelier than that the right one is alone.
    """

    max_context: int = 2000
    form: str = json.dumps(ADA)
    knows_paris: bool = True
    other: str | None = None
    nats: float = 9.0
    keeps_rows: bool = False
    hears_the_gone: bool = False
    breaks: bool = False
    gone: list[int] = field(default_factory=list)

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        begin = "Paris: " if self.knows_paris else ""
        answer = self.form if job.grammar else begin + job.messages[-1]["content"]
        most = 2000 if job.max_tokens is None else job.max_tokens
        return [
            replace(row, prompt=list(map(ord, answer)), max_tokens=most)
            for row in super().prepare(job)
        ]

    def leave(self, row: int) -> None:
        if row in self._running:
            self.gone.append(row)
            if self.keeps_rows:
                return
        super().leave(row)

    def decode(self) -> list[SequenceDelta]:
        deltas = super().decode()
        if self.breaks:
            deltas += [SequenceDelta(row, error="NaN") for row in list(self._running)[:1]]
        return deltas + [
            SequenceDelta(row, "still here") for row in self.gone if self.hears_the_gone
        ]

    def _next(self, row: int) -> list[SequenceDelta]:
        is_beside = len(self._running) > 1
        deltas = super()._next(row)
        if self._jobs[row].logprobs is None:
            return deltas
        return [self._scored(each, is_beside) if each.text else each for each in deltas]

    def _scored(self, delta: SequenceDelta, is_beside: bool) -> SequenceDelta:
        right = _likely(delta.text, -0.1)
        top = [right]
        if self.other is not None:
            top.append(_likely(self.other, -0.1 - self.nats))
        is_off = is_beside and self.other is not None and self._said[delta.sequence_id] % 6 == 0
        chosen = top[-1] if is_off else right
        return replace(delta, text=chosen.token, logprobs=[TokenLogprob(chosen, top)])


def _likely(text: str, logprob: float) -> Likelihood:
    return Likelihood(text, text.encode(), logprob)
