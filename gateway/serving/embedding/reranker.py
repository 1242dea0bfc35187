"""Scores pairs of a query and a document, in passes that requests share."""

from collections.abc import Generator, Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gateway import clock
from gateway.clock import Stage
from gateway.errors import ContextLengthExceeded, EngineFailed
from gateway.jobs import Vectors
from gateway.jobs.rerank import Pair, Reranked, RerankJob
from gateway.serving.admission import Arrival, Arrivals
from gateway.serving.embedding.policy import EmbeddingLimits
from gateway.serving.embedding.row_batcher import RowBatcher
from gateway.serving.lane import Lane
from gateway.serving.ports import RerankEngine
from gateway.serving.tokenize import SHORT_CHARS, SLICE_CHARS, ThreadPools, texts_kind

Part: TypeAlias = Sequence[tuple[str, Sequence[str]]]


class RerankBatcher(RowBatcher[Pair, Vectors]):
    """One cross-encoder's queue of requests, and the worker that scores their pairs."""

    kind = "rerank"

    def __init__(
        self,
        name: str,
        engine: RerankEngine,
        lane: Lane,
        pool: ThreadPools,
        limits: EmbeddingLimits,
        arrivals: Arrivals | None = None,
    ) -> None:
        super().__init__(name, self._score, self._score_in_steps, engine, lane, limits, arrivals)
        self.engine = engine
        self._pool = pool

    async def rerank(self, job: RerankJob, arrival: Arrival | None = None) -> Reranked:
        """Return a score for every document, in order. `arrival` ends once the pairs are queued.

        Raises Overloaded, ContextLengthExceeded, DeadlineExceeded, and EngineFailed.
        """
        timings = job.caller.timings
        async with self._begin(job.caller, arrival) as expected:
            started = clock.now()
            pairs = [pair for part in _slices(job) for pair in await self._encode(part, job)]
            timings.add(Stage.TOKENIZE, started)
            self._check(pairs, truncate=job.truncate)
            logits = await self._queue(pairs, timings, expected)
        tokens, truncated = sum(map(len, pairs)), sum(pair.cut > 0 for pair in pairs)
        self._count(timings, tokens, truncated)
        return Reranked(relevance(np.stack(logits), is_raw=job.is_raw), tokens, truncated)

    async def _encode(self, part: Part, job: RerankJob) -> list[Pair]:
        """Tokenize queries with their documents, on a thread unless the texts are short."""

        def encode() -> list[Pair]:
            return [
                pair
                for query, texts in part
                for pair in self.engine.encode_pairs(
                    query,
                    texts,
                    max_document_tokens=job.max_tokens_per_doc,
                    instruction=job.instruction,
                )
            ]

        chars = sum(len(query) + sum(map(len, texts)) for query, texts in part)
        if chars <= SHORT_CHARS:
            return encode()
        return await self._pool.run(encode, kind=texts_kind(chars))

    def _check(self, pairs: Sequence[Pair], *, truncate: bool) -> None:
        limit = self.engine.max_tokens
        cut = [pair for pair in pairs if pair.cut and len(pair) == limit]
        if cut and not truncate:
            tokens = max(len(pair) + pair.cut for pair in cut)
            raise ContextLengthExceeded(limit, tokens, noun="documents", part="documents")

    def _score(self, pairs: Sequence[Pair]) -> list[Vectors]:
        return self._listed(self.engine.score(pairs))

    def _score_in_steps(self, pairs: Sequence[Pair]) -> Generator[list[Vectors] | None]:
        for logits in self.engine.in_steps(pairs):
            yield None if logits is None else self._listed(logits)

    def _listed(self, logits: Vectors) -> list[Vectors]:
        if not np.isfinite(logits).all():
            raise EngineFailed(self._name, "a score is not finite.")
        return list(logits)


def _slices(job: RerankJob) -> Iterator[Part]:
    """Yield the job's queries, each with its documents, in slices of about SLICE_CHARS."""
    pairs = zip(job.queries or repeat(job.query), job.documents)  # noqa: B905
    part: dict[int, tuple[str, list[str]]] = {}
    chars = 0
    for index, (query, document) in enumerate(pairs):
        if part and chars + len(document) > SLICE_CHARS:
            yield list(part.values())
            part, chars = {}, 0
        part.setdefault(index if job.queries else 0, (query, []))[1].append(document)
        chars += len(document)
    yield list(part.values())


def relevance(logits: Vectors, *, is_raw: bool) -> npt.NDArray[np.float64]:
    """Return each row's probability of relevance, (rows,), or its log-odds if `is_raw`.

    The last label stands for relevance, as in llama.cpp with two labels. With several labels, the
    probability is that label's in a softmax.
    """
    odds = logits[:, -1].astype(np.float64)
    if logits.shape[1] > 1:
        odds = odds - np.logaddexp.reduce(logits[:, :-1].astype(np.float64), axis=1)
    if is_raw:
        return odds
    return np.exp(-np.logaddexp(0, -odds))
