"""What an embedding model is made to do: golden vectors, texts together and alone, its speed."""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from gateway.doctor import findings
from gateway.doctor.examination import Stage
from gateway.doctor.findings import Finding, Tolerance
from gateway.jobs import Vectors
from gateway.registry import EmbeddingSpec
from gateway.serving.ports import EmbeddingEngine

STAGES: Final = ("load", "vectors", "batch", "speed", "memory")
TEXTS_AT_ONCE: Final = (1, 32)


@dataclass(frozen=True, slots=True)
class Golden:
    """Texts, and their vectors as sentence-transformers gives them for the model of a source."""

    source: str
    texts: Sequence[str]
    vectors: Vectors

    def is_of(self, spec: EmbeddingSpec) -> bool:
        """Return True for that model, unless models.yaml pools it otherwise."""
        is_pooled_otherwise = (spec.pooling, spec.normalize) != (None, None)
        return str(spec.source) == self.source and not is_pooled_otherwise


def read_golden() -> Golden:
    """Read the ones that tests/golden/make_golden.py has written."""
    kept = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
    numbers = np.frombuffer(base64.b64decode(kept["vectors"]), dtype="<f2").astype(np.float32)
    return Golden(kept["source"], kept["texts"], numbers.reshape(len(kept["texts"]), -1))


class EmbeddingTrial:
    """An embedding engine on trial; `rate` gives texts a second, so many at once."""

    def __init__(
        self,
        engine: EmbeddingEngine,
        golden: Golden,
        allowed: Tolerance,
        rate: Callable[[int], float],
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
        """List what is tried, in order."""
        return (
            Stage("vectors", self._vectors),
            Stage("batch", self._batch),
            Stage("speed", self._speed),
        )

    def rest(self) -> None:
        """Let go of all but the weights: there is nothing else."""

    def close(self) -> None:
        """Let go of the weights."""
        self._engine.close()

    def _vectors(self) -> list[Finding]:
        if not self._is_golden:
            said = f"those that are known are of {self._golden.source} alone."
            return [Finding("vectors", "skip", said)]
        apart = _distance(self._golden.vectors, self._engine.embed(self._rows))
        return [findings.vectors(apart, len(self._rows), self._allowed)]

    def _batch(self) -> list[Finding]:
        alone = np.concatenate([self._engine.embed([row]) for row in self._rows])
        apart = _distance(alone, self._engine.embed(self._rows))
        return [findings.texts_together(apart, len(self._rows), self._allowed)]

    def _speed(self) -> list[Finding]:
        return [findings.speed("texts", {count: self._rate(count) for count in TEXTS_AT_ONCE})]


def _distance(vectors: Vectors, others: Vectors) -> float:
    """Return the longest difference of two rows, as a share of the first; NaN where one has it."""
    lengths = np.linalg.norm(vectors, axis=1)
    return float((np.linalg.norm(vectors - others, axis=1) / lengths).max())
