"""Texts → vectors, and the cosine of vectors as a score, in passes that requests share."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gateway import clock, metrics
from gateway.clock import Stage
from gateway.errors import ContextLengthExceeded
from gateway.jobs import TokenIds
from gateway.jobs.embed import Embedded, EmbedJob
from gateway.jobs.rerank import Reranked, RerankJob
from gateway.serving.admission import Arrival, Arrivals
from gateway.serving.embedding.policy import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    EmbeddingCache,
    EmbeddingLimits,
    TextVector,
    add_prompts,
    check_ids,
    cosines,
    find_prompt,
    fit_to_context,
)
from gateway.serving.embedding.row_batcher import RowBatcher
from gateway.serving.lane import Lane
from gateway.serving.ports import EmbeddingEngine
from gateway.serving.tokenize import ThreadPools, tokenize


class EmbeddingBatcher(RowBatcher[TokenIds]):
    """One embedding model's queue of requests, and the worker that embeds their inputs."""

    kind = "embedding"

    def __init__(
        self,
        name: str,
        engine: EmbeddingEngine,
        lane: Lane,
        pool: ThreadPools,
        limits: EmbeddingLimits,
        arrivals: Arrivals | None = None,
    ) -> None:
        super().__init__(name, engine.embed, engine.probe, lane, limits, arrivals)
        self.engine = engine  # for its facts about the model
        self._pool = pool
        self._cache = EmbeddingCache(name, limits.cache_size)

    def adopt(self, limits: EmbeddingLimits) -> None:
        """Apply new limits, also to waiting requests."""
        super().adopt(limits)
        self._cache.resize(limits.cache_size)

    async def embed(self, job: EmbedJob, arrival: Arrival | None = None) -> Embedded:
        """Return a vector for every input, in order. `arrival` ends once the inputs are queued.

        Raises Overloaded when too much waits, ContextLengthExceeded for an over-long
        input, DeadlineExceeded, and EngineFailed when the model fails, or a vector is not finite.
        """
        async with self._begin(job.caller, arrival) as expected:
            return await self._embed(job, add_prompts(self.engine, self._name, job), expected)

    async def rerank(self, job: RerankJob, arrival: Arrival | None = None) -> Reranked:
        """Return (1 + cosine) / 2 of each document's and its query's vectors; if raw, the cosine.

        The texts have the model's prompts for queries and for documents, if it has them. Raises
        what `embed` does.
        """
        query_prompt = find_prompt(self.engine, QUERY_PROMPTS, job.prompt_name)
        document_prompt = find_prompt(self.engine, DOCUMENT_PROMPTS, job.prompt_name)
        queries = [query_prompt + text for text in job.queries or [job.query]]
        texts = [*queries, *(document_prompt + text for text in job.documents)]
        embed_job = EmbedJob(caller=job.caller, texts=texts, truncate=job.truncate)
        async with self._begin(job.caller, arrival) as expected:
            cut = 0
            if job.max_tokens_per_doc is not None:
                rows = await self._tokenize(embed_job, texts)
                max_tokens = len(self.engine.encode([document_prompt])[0]) + job.max_tokens_per_doc
                if max_tokens < self.engine.max_tokens:
                    cut = sum(len(row) > max_tokens for row in rows[len(queries) :])
                    rows[len(queries) :] = [
                        self.engine.truncate(row, max_tokens) for row in rows[len(queries) :]
                    ]
                embed_job, texts = replace(embed_job, token_rows=rows, texts=()), []
            try:
                embedded = await self._embed(embed_job, texts, expected)
            except ContextLengthExceeded as error:
                longest = max(map(len, await self._tokenize(embed_job, queries)))
                if longest > self.engine.max_tokens:
                    raise
                raise ContextLengthExceeded(
                    self.engine.max_tokens, error.tokens, noun="documents", part="documents"
                ) from None
        if cut:
            metrics.of(metrics.TRUNCATED, self._name).inc(cut)
        scores = cosines(embedded.vectors[: len(queries)], embedded.vectors[len(queries) :])
        return Reranked(
            scores if job.is_raw else (1 + scores) / 2,
            embedded.prompt_tokens,
            embedded.truncated + cut,
        )

    async def _embed(self, job: EmbedJob, texts: Sequence[str], arrival: Arrival) -> Embedded:
        salt = job.caller.cache_salt
        kept_rows = [self._cache.get(text, salt, truncate=job.truncate) for text in texts]
        kept_rows = kept_rows or [None] * len(job.token_rows)
        missing = [index for index, row in enumerate(kept_rows) if row is None]
        if missing:
            new = await self._compute_texts(
                job, [texts[index] for index in missing if texts], arrival
            )
            for index, row in zip(missing, new, strict=True):
                kept_rows[index] = row
                if texts:
                    self._cache.put(texts[index], salt, row)
        rows = [row for row in kept_rows if row is not None]
        tokens = sum(row.tokens for row in rows)
        truncated = sum(row.is_truncated for row in rows)
        self._count(job.caller.timings, tokens, truncated)
        vectors = np.stack([row.vector for row in rows])
        if job.dimensions is not None and job.dimensions < self.engine.dimensions:
            vectors = self.engine.shorten(vectors, job.dimensions)
        return Embedded(vectors, tokens, truncated)

    async def _compute_texts(
        self, job: EmbedJob, texts: Sequence[str], arrival: Arrival
    ) -> list[TextVector]:
        """Embed texts or, if there are none, the job's token ids."""
        rows = await self._tokenize(job, texts)
        rows, truncated = fit_to_context(self.engine, rows, truncate=job.truncate)
        vectors = await self._queue(rows, job.caller.timings, arrival)
        return [
            TextVector(vector, len(row), index in truncated)
            for index, (row, vector) in enumerate(zip(rows, vectors, strict=True))
        ]

    async def _tokenize(self, job: EmbedJob, texts: Sequence[str]) -> list[TokenIds]:
        if not texts:
            check_ids(self.engine, self._name, job.token_rows)
            return list(job.token_rows)
        started = clock.now()
        encode = self.engine.encode_start if job.truncate else self.engine.encode
        has_patterns = self.engine.has_patterns
        rows = await tokenize(encode, texts, self._pool, has_patterns=has_patterns)
        job.caller.timings.add(Stage.TOKENIZE, started)
        return rows
