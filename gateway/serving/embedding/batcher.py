"""Computes vectors of texts, and scores from their cosines, in passes that requests share."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway import clock, metrics
from gateway.clock import Stage
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.embed import Embedded, EmbedJob
from gateway.jobs.rerank import Reranked, RerankJob
from gateway.serving.admission import Arrival, Arrivals
from gateway.serving.embedding.policy import EmbeddingLimits
from gateway.serving.embedding.row_batcher import RowBatcher
from gateway.serving.lane import Lane
from gateway.serving.ports import EmbeddingEngine
from gateway.serving.tokenize import ThreadPools, tokenize

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TextVector:
    """A text's vector, (dimensions,), and its number of tokens."""

    vector: Vector
    tokens: int
    is_truncated: bool


class EmbeddingCache:
    """An LRU cache of at most `size` vectors, by digests of a text and a salt."""

    def __init__(self, model: str, size: int) -> None:
        self._size = size
        self._vectors: OrderedDict[bytes, TextVector] = OrderedDict()
        self._hits = metrics.of(metrics.EMBEDDING_CACHE, model, "hit")
        self._misses = metrics.of(metrics.EMBEDDING_CACHE, model, "miss")

    def resize(self, size: int) -> None:
        self._size = size
        while len(self._vectors) > size:
            self._vectors.popitem(last=False)

    def get(self, text: str, salt: str, *, truncate: bool) -> TextVector | None:
        """Return a text's vector or None. A truncated text's vector is found only if `truncate`."""
        if not self._size:
            return None
        key = _digest(text, salt)
        vector = self._vectors.get(key)
        if vector is None or (vector.is_truncated and not truncate):
            self._misses.inc()
            return None
        self._vectors.move_to_end(key)
        self._hits.inc()
        return vector

    def put(self, text: str, salt: str, vector: TextVector) -> None:
        if not self._size:
            return
        key = _digest(text, salt)
        # The copy lets the whole request's array, of which the vector is a view, be freed.
        self._vectors[key] = replace(vector, vector=vector.vector.copy())
        self._vectors.move_to_end(key)
        if len(self._vectors) > self._size:
            self._vectors.popitem(last=False)


def _digest(text: str, salt: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, salt=salt.encode()).digest()


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
        super().__init__(name, engine.embed, engine, lane, limits, arrivals)
        self.engine = engine
        self._pool = pool
        self._cache = EmbeddingCache(name, limits.cache_size)

    def adopt(self, limits: EmbeddingLimits) -> None:
        super().adopt(limits)
        self._cache.resize(limits.cache_size)

    async def embed(self, job: EmbedJob, arrival: Arrival | None = None) -> Embedded:
        """Return a vector for every input, in order. `arrival` ends once the inputs are queued.

        Raises Overloaded, ContextLengthExceeded, DeadlineExceeded, and EngineFailed.
        """
        async with self._begin(job.caller, arrival) as expected:
            return await self._embed(job, add_prompts(self.engine, self._name, job), expected)

    async def rerank(self, job: RerankJob, arrival: Arrival | None = None) -> Reranked:
        """Return a score for each document: (1 + cosine) / 2, or the cosine if `is_raw`.

        Raises the errors of `embed`.
        """
        defaults = (job.prompt_name, self.engine.default_prompt_name)
        query_prompt = find_prompt(self.engine, (*QUERY_PROMPTS, *defaults))
        document_prompt = find_prompt(self.engine, (*DOCUMENT_PROMPTS, *defaults))
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
        kept_rows: list[TextVector | None] = [None] * (len(texts) or len(job.token_rows))
        is_cached = bool(texts) and job.max_tokens is None
        if is_cached:
            kept_rows = [self._cache.get(text, salt, truncate=job.truncate) for text in texts]
        missing = [index for index, row in enumerate(kept_rows) if row is None]
        if missing:
            new = await self._compute_texts(
                job, [texts[index] for index in missing if texts], arrival
            )
            for index, row in zip(missing, new, strict=True):
                kept_rows[index] = row
                if is_cached:
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
        rows = await self._tokenize(job, texts)
        rows, truncated = fit_to_context(
            self.engine, rows, truncate=job.truncate, max_tokens=job.max_tokens
        )
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


def add_prompts(engine: EmbeddingEngine, model: str, job: EmbedJob) -> list[str]:
    """Return the job's texts, each after the job's prompt or the model's default prompt.

    Raises BadRequest for a prompt that the model does not have.
    """
    if job.prompt_names is not None:
        prompt = find_prompt(engine, job.prompt_names)
        return [prompt + text for text in job.texts]
    name = job.prompt_name or engine.default_prompt_name
    if not job.texts or name is None:
        return list(job.texts)
    if name not in engine.prompts:
        names = ", ".join(sorted(engine.prompts)) or "none"
        raise BadRequest(
            f"The model `{model}` has no prompt `{name}`; it has: {names}.", part="prompt_name"
        )
    return [engine.prompts[name] + text for text in job.texts]


QUERY_PROMPTS: Final = ("query",)
DOCUMENT_PROMPTS: Final = ("document", "passage")  # the names in Qwen3's and e5's files


def find_prompt(engine: EmbeddingEngine, names: Sequence[str | None]) -> str:
    """Return the first known prompt of `names`, or no text."""
    for name in names:
        if name is not None and name in engine.prompts:
            return engine.prompts[name]
    return ""


def cosines(queries: Vectors, documents: Vectors) -> npt.NDArray[np.float64]:
    """Return the cosine of each document with its query, or with the only query, (documents,)."""
    ones, document_rows = queries.astype(np.float64), documents.astype(np.float64)
    lengths = np.linalg.norm(ones, axis=1) * np.linalg.norm(document_rows, axis=1)
    cosines: npt.NDArray[np.float64] = (ones * document_rows).sum(axis=1) / np.where(
        lengths, lengths, 1
    )
    return np.clip(cosines, -1, 1)


def check_ids(engine: EmbeddingEngine, model: str, rows: Sequence[TokenIds]) -> None:
    """Raise BadRequest for ids outside the vocabulary: MLX would read past the embedding table."""
    size = engine.vocab_size
    for row in rows:
        if not all(0 <= token < size for token in row):
            raise BadRequest(
                f"Token ids of the model `{model}` are 0 to {size - 1}.", part="prompt"
            )


def fit_to_context(
    engine: EmbeddingEngine, rows: list[TokenIds], *, truncate: bool, max_tokens: int | None = None
) -> tuple[list[TokenIds], set[int]]:
    """Return the rows, and the indices of the rows that had to be truncated.

    Without `truncate`, raises ContextLengthExceeded for a row that is too long for the model, and
    BadRequest for one that has more than `max_tokens`.
    """
    limit = min(engine.max_tokens, max_tokens or engine.max_tokens)
    over = [index for index, row in enumerate(rows) if len(row) > limit]
    if over and not truncate:
        tokens = len(rows[over[0]])
        if tokens > engine.max_tokens:
            raise ContextLengthExceeded(engine.max_tokens, tokens, noun="input")
        message = f"Input {over[0]} has {tokens} tokens, and 'max_tokens' is {limit}."
        raise BadRequest(message, part="prompt")
    for index in over:
        rows[index] = engine.truncate(rows[index], limit)
    return rows, set(over)
