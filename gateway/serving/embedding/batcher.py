"""Computes vectors of texts, and scores from their vectors, in passes that requests share."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway import clock, metrics
from gateway.clock import Stage
from gateway.errors import BadRequest, ContextLengthExceeded, Overloaded, Part
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.embed import Embedded, EmbedJob, Output, TextOutputs
from gateway.jobs.rerank import Reranked, RerankJob
from gateway.serving.admission import Arrival, Arrivals
from gateway.serving.embedding.policy import EmbeddingLimits
from gateway.serving.embedding.row_batcher import RowBatcher
from gateway.serving.lane import Lane
from gateway.serving.ports import EmbeddingEngine
from gateway.serving.tokenize import ThreadPools, tokenize

Scores = npt.NDArray[np.float64]
HELD_NUMBERS: Final = 1 << 26  # 256 MiB of a model's multi-vectors, of all requests together


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text's token ids, and the outputs asked for it."""

    ids: TokenIds
    outputs: tuple[Output, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class EmbeddedText:
    """The outputs computed of a text, and its number of tokens."""

    outputs: TextOutputs
    tokens: int
    is_truncated: bool


class EmbeddingCache:
    """An LRU cache of at most `size` dense vectors, by digests of a text and a salt."""

    def __init__(self, model: str, size: int) -> None:
        self._size = size
        self._vectors: OrderedDict[bytes, EmbeddedText] = OrderedDict()
        self._hits = metrics.of(metrics.EMBEDDING_CACHE, model, "hit")
        self._misses = metrics.of(metrics.EMBEDDING_CACHE, model, "miss")

    def resize(self, size: int) -> None:
        self._size = size
        while len(self._vectors) > size:
            self._vectors.popitem(last=False)

    def get(self, text: str, salt: str, *, truncate: bool) -> EmbeddedText | None:
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

    def put(self, text: str, salt: str, embedded: EmbeddedText) -> None:
        if not self._size:
            return
        key = _digest(text, salt)
        # The copy lets the whole pass's array, of which the vector is a view, be freed.
        copied = TextOutputs(dense=np.array(embedded.outputs.dense))
        self._vectors[key] = replace(embedded, outputs=copied)
        self._vectors.move_to_end(key)
        if len(self._vectors) > self._size:
            self._vectors.popitem(last=False)


def _digest(text: str, salt: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, salt=salt.encode()).digest()


class EmbeddingBatcher(RowBatcher[TextRow, TextOutputs]):
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
        computed = (self._compute, self._compute_in_steps)
        super().__init__(name, *computed, engine, lane, limits, arrivals)
        self.engine = engine
        self._pool = pool
        self._cache = EmbeddingCache(name, limits.cache_size)
        self._numbers = 0  # numbers of the multi-vectors that requests hold together

    def adopt(self, limits: EmbeddingLimits) -> None:
        super().adopt(limits)
        self._cache.resize(limits.cache_size)

    async def embed(self, job: EmbedJob, arrival: Arrival | None = None) -> Embedded:
        """Return the outputs of every input, in order. `arrival` ends once the inputs are queued.

        Raises BadRequest for an output that the model does not have, Overloaded,
        ContextLengthExceeded, DeadlineExceeded, and EngineFailed.
        """
        if not job.outputs:
            job = replace(job, outputs=self.engine.outputs[:1])
        check_outputs(self.engine, self._name, job.outputs)
        async with self._begin(job.caller, arrival) as expected:
            prompt = choose_prompt(self.engine, self._name, job)
            texts = [prompt + text for text in job.texts]
            return await self._embed(job, texts, expected, [prompt])

    async def rerank(self, job: RerankJob, arrival: Arrival | None = None) -> Reranked:
        """Return a score for each document: (1 + cosine) / 2, or the cosine if `is_raw`.

        A model without dense vectors compares multi-vectors, by `max_sims`. Raises the errors of
        `embed`.
        """
        with contextlib.ExitStack() as held:
            return await self._rerank(job, arrival, held)

    async def _rerank(
        self, job: RerankJob, arrival: Arrival | None, held: contextlib.ExitStack
    ) -> Reranked:
        is_late = is_late_interaction(self.engine)
        output: Output = "multi_vector" if is_late else "dense"
        check_outputs(self.engine, self._name, (output,))
        defaults = (job.prompt_name, self.engine.default_prompt_name)
        query_prompt = find_prompt(self.engine, (*QUERY_PROMPTS, *defaults))
        document_prompt = find_prompt(self.engine, (*DOCUMENT_PROMPTS, *defaults))
        queries = [query_prompt + text for text in job.queries or [job.query]]
        texts = [*queries, *(document_prompt + text for text in job.documents)]
        embed_job = EmbedJob(
            caller=job.caller, texts=texts, truncate=job.truncate, outputs=(output,)
        )
        async with self._begin(job.caller, arrival) as expected:
            cut = 0
            if is_late or job.max_tokens_per_doc is not None:
                documents = texts[len(queries) :]
                rows = await self._tokenize(embed_job, documents)
                max_tokens = self.engine.max_tokens
                if job.max_tokens_per_doc is not None:
                    start = len(self.engine.encode([document_prompt])[0])
                    max_tokens = min(max_tokens, start + job.max_tokens_per_doc)
                if job.truncate or max_tokens < self.engine.max_tokens:
                    rows, over = fit_to_context(
                        rows, self.engine, max_tokens, truncate=True, prompts=[document_prompt]
                    )
                    cut = len(over)
                asked = await self._tokenize(embed_job, queries, is_query=is_late)
                if is_late:
                    most = self.engine.query_tokens
                    asked, over = fit_to_context(
                        asked, self.engine, most, truncate=job.truncate, prompts=[query_prompt]
                    )
                    cut += len(over)
                rows = [*asked, *rows]
                if is_late:
                    held.enter_context(self._hold(rows, job.max_numbers, part="documents"))
                embed_job, texts = replace(embed_job, token_rows=rows, texts=()), []
            try:
                prompts = [query_prompt, document_prompt]
                embedded = await self._embed(embed_job, texts, expected, prompts)
            except ContextLengthExceeded as error:
                queried = await self._tokenize(embed_job, queries, is_query=is_late)
                longest = max(map(len, queried))
                if longest > self.engine.max_tokens:
                    raise
                raise ContextLengthExceeded(
                    self.engine.max_tokens, error.tokens, noun="documents", part="documents"
                ) from None
        if cut:
            metrics.of(metrics.TRUNCATED, self._name).inc(cut)
        if is_late:
            compare = partial(max_sims, is_mean=not job.is_raw)
            matrices, count = embedded.multi_vector, len(queries)
            scores = await asyncio.to_thread(compare, matrices[:count], matrices[count:])
        else:
            scores = cosines(embedded.vectors[: len(queries)], embedded.vectors[len(queries) :])
        return Reranked(
            scores if job.is_raw else (1 + scores) / 2,
            embedded.prompt_tokens,
            embedded.truncated + cut,
        )

    def _compute(self, rows: Sequence[TextRow]) -> list[TextOutputs]:
        """Compute the outputs that any of the rows asks for in one pass; give each its own."""
        asked = {output for row in rows for output in row.outputs}
        ids = [row.ids for row in rows]
        if asked == {"dense"}:
            return [TextOutputs(dense=vector) for vector in self.engine.embed(ids)]
        return [
            TextOutputs(**{output: getattr(computed, output) for output in row.outputs})
            for row, computed in zip(rows, self.engine.embed_outputs(ids, asked), strict=True)
        ]

    def _compute_in_steps(self, rows: Sequence[TextRow]) -> Generator[list[TextOutputs] | None]:
        asked = {output for row in rows for output in row.outputs}
        return self.engine.in_steps([row.ids for row in rows], asked)

    async def _embed(
        self, job: EmbedJob, texts: Sequence[str], arrival: Arrival, prompts: Sequence[str]
    ) -> Embedded:
        """Return the outputs of texts that begin with `prompts`, or of the job's rows of ids."""
        salt = job.caller.cache_salt
        kept_rows: list[EmbeddedText | None] = [None] * len(texts or job.token_rows)
        is_cached = bool(texts) and job.outputs == ("dense",) and job.max_tokens is None
        if is_cached:
            kept_rows = [self._cache.get(text, salt, truncate=job.truncate) for text in texts]
        missing = [index for index, row in enumerate(kept_rows) if row is None]
        if missing:
            new = await self._compute_texts(
                job, [texts[index] for index in missing if texts], arrival, prompts
            )
            for index, row in zip(missing, new, strict=True):
                kept_rows[index] = row
                if is_cached:
                    self._cache.put(texts[index], salt, row)
        rows = [row for row in kept_rows if row is not None]
        tokens = sum(row.tokens for row in rows)
        truncated = sum(row.is_truncated for row in rows)
        self._count(job.caller.timings, tokens, truncated)
        for output in job.outputs:
            metrics.of(metrics.EMBEDDING_OUTPUTS, self._name, output).inc(len(rows))
        results = [row.outputs for row in rows]
        dense = [each.dense for each in results if each.dense is not None]
        vectors = np.stack(dense) if dense else np.zeros((len(rows), 0), np.float32)
        if job.dimensions is not None and job.dimensions < self.engine.dimensions:
            vectors = self.engine.shorten(vectors, job.dimensions)
        sparse = [each.sparse for each in results if each.sparse is not None]
        matrices = [each.multi_vector for each in results if each.multi_vector is not None]
        return Embedded(vectors, tokens, truncated, sparse, matrices)

    async def _compute_texts(
        self, job: EmbedJob, texts: Sequence[str], arrival: Arrival, prompts: Sequence[str]
    ) -> list[EmbeddedText]:
        is_query = is_late_interaction(self.engine) and job.prompt_name == ROLES[0]
        rows = await self._tokenize(job, texts, is_query=is_query)
        most = self.engine.query_tokens if is_query and texts else self.engine.max_tokens
        rows, truncated = fit_to_context(
            *(rows, self.engine, most),
            truncate=job.truncate,
            max_tokens=job.max_tokens,
            prompts=prompts,
        )
        asked = [TextRow(row, job.outputs) for row in rows]
        with contextlib.ExitStack() as held:
            if "multi_vector" in job.outputs:
                held.enter_context(self._hold(rows, job.max_numbers))
            results = await self._queue(asked, job.caller.timings, arrival)
        return [
            EmbeddedText(result, len(row), index in truncated)
            for index, (row, result) in enumerate(zip(rows, results, strict=True))
        ]

    @contextlib.contextmanager
    def _hold(
        self, rows: Sequence[TokenIds], max_numbers: int | None, part: Part = "prompt"
    ) -> Iterator[None]:
        """Count the numbers of the rows' multi-vectors while entered; None counts nothing.

        Raises BadRequest for more than `max_numbers`, and Overloaded if all requests together would
        have more than HELD_NUMBERS, unless the others have none.
        """
        width = self.engine.token_dimensions
        tokens = sum(min(len(row), self.engine.max_tokens) for row in rows)
        numbers = 0 if max_numbers is None else tokens * width
        if max_numbers is not None and numbers > max_numbers:
            raise BadRequest(
                f"The texts have {tokens} tokens together, and a vector of {width} numbers each. "
                f"A request may have those of {max_numbers // width} tokens: send fewer texts at "
                "once.",
                part=part,
            )
        if numbers and self._numbers and self._numbers + numbers > HELD_NUMBERS:
            raise Overloaded(
                f"The model `{self._name}` has the vectors of {self._numbers // width} tokens in "
                "memory already.",
                retry_after_s=self._tokens.retry_after_s(),
            )
        self._numbers += numbers
        try:
            yield
        finally:
            self._numbers -= numbers

    async def _tokenize(
        self, job: EmbedJob, texts: Sequence[str], *, is_query: bool = False
    ) -> list[TokenIds]:
        if not texts:
            check_ids(self.engine, self._name, job.token_rows)
            return list(job.token_rows)
        started = clock.now()
        encode = self.engine.encode_start if job.truncate else self.engine.encode
        if is_query:
            encode = self.engine.encode_query
        has_patterns = self.engine.has_patterns
        rows = await tokenize(encode, texts, self._pool, has_patterns=has_patterns)
        job.caller.timings.add(Stage.TOKENIZE, started)
        return rows


def check_outputs(engine: EmbeddingEngine, model: str, outputs: Sequence[Output]) -> None:
    """Raise BadRequest for an output that the model does not have."""
    missing = [output for output in outputs if output not in engine.outputs]
    if missing:
        names = " and ".join(f"`{name}`" for name in engine.outputs)
        raise BadRequest(
            f"The model `{model}` has no `{missing[0]}` output; it has {names}: ask for that "
            "with `output` at /v1/embeddings.",
            part="output",
            code="unsupported_model",
        )


def is_late_interaction(engine: EmbeddingEngine) -> bool:
    """Return True for a model, such as ColBERT, whose texts have one vector a token alone."""
    return "multi_vector" in engine.outputs and "dense" not in engine.outputs


ROLES: Final = ("query", "document")  # prompt names that such a model has in any case


def choose_prompt(engine: EmbeddingEngine, model: str, job: EmbedJob) -> str:
    """Return the job's prompt, or the model's default prompt, to put before each text.

    Raises BadRequest for a prompt that the model does not have.
    """
    if job.prompt_names is not None:
        return find_prompt(engine, job.prompt_names)
    name = job.prompt_name or engine.default_prompt_name
    if not job.texts or name is None:
        return ""
    if is_late_interaction(engine) and name in ROLES and name not in engine.prompts:
        return ""
    if name not in engine.prompts:
        names = ", ".join(sorted(engine.prompts)) or "none"
        raise BadRequest(
            f"The model `{model}` has no prompt `{name}`; it has: {names}.", part="prompt_name"
        )
    return engine.prompts[name]


QUERY_PROMPTS: Final = ("query",)
DOCUMENT_PROMPTS: Final = ("document", "passage")  # the names in Qwen3's and e5's files


def find_prompt(engine: EmbeddingEngine, names: Sequence[str | None]) -> str:
    """Return the first known prompt of `names`, or no text."""
    for name in names:
        if name is not None and name in engine.prompts:
            return engine.prompts[name]
    return ""


def cosines(queries: Vectors, documents: Vectors) -> Scores:
    """Return the cosine of each document with its query, or with the only query, (documents,)."""
    ones, document_rows = queries.astype(np.float64), documents.astype(np.float64)
    lengths = np.linalg.norm(ones, axis=1) * np.linalg.norm(document_rows, axis=1)
    cosines: Scores = (ones * document_rows).sum(axis=1) / np.where(lengths, lengths, 1)
    return np.clip(cosines, -1, 1)


def max_sims(queries: Sequence[Vectors], documents: Sequence[Vectors], *, is_mean: bool) -> Scores:
    """Return the MaxSim of each document with its query, or with the only query, (documents,).

    That is the sum, or the mean, over the query's vectors of the greatest cosine with one of the
    document's vectors, as all have length 1.
    """
    scores = []
    for index, document in enumerate(documents):
        query = queries[index if len(queries) > 1 else 0]
        most = (query @ document.T).max(axis=1, initial=-1.0).clip(max=1).astype(np.float64)
        scores.append(most.mean() if is_mean else most.sum())
    return np.array(scores)


def check_ids(engine: EmbeddingEngine, model: str, rows: Sequence[TokenIds]) -> None:
    """Raise BadRequest for ids outside the vocabulary: MLX would read past the embedding table."""
    size = engine.vocab_size
    for row in rows:
        if not all(0 <= token < size for token in row):
            raise BadRequest(
                f"Token ids of the model `{model}` are 0 to {size - 1}.", part="prompt"
            )


def fit_to_context(
    rows: list[TokenIds],
    engine: EmbeddingEngine,
    context: int,
    *,
    truncate: bool,
    max_tokens: int | None = None,
    prompts: Sequence[str] = ("",),
) -> tuple[list[TokenIds], set[int]]:
    """Return the rows, and the indices of the rows that had to be truncated.

    Without `truncate`, raises ContextLengthExceeded for a row of more tokens than the context, and
    BadRequest for one that has more than `max_tokens`. Raises BadRequest for a cut that leaves only
    special tokens and one of the `prompts`, which would give all texts the same vector.
    """
    limit = min(context, max_tokens or context)
    over = [index for index, row in enumerate(rows) if len(row) > limit]
    if over and not truncate:
        tokens = len(rows[over[0]])
        if tokens > context:
            raise ContextLengthExceeded(context, tokens, noun="input")
        message = f"Input {over[0]} has {tokens} tokens, and 'max_tokens' is {limit}."
        raise BadRequest(message, part="prompt")
    # A prompt's last space belongs to the text's first token.
    bare = engine.encode([prompt.rstrip(" ") for prompt in prompts]) if over else []
    for index in over:
        if is_bare(engine, rows[index], limit, bare):
            lengths = range(limit + 1, len(rows[index]))
            enough = (n for n in lengths if not is_bare(engine, rows[index], n, bare))
            least = next(enough, len(rows[index]))
            name: str = "'max_tokens'"
            part: Part = "max_tokens"
            if limit == context:
                name, part = "The model's limit", "prompt"
            raise BadRequest(
                f"{name} is {limit}, which leaves only special tokens and the prompt of input "
                f"{index}: it should be at least {least}.",
                part=part,
            )
        rows[index] = engine.truncate(rows[index], limit)
    return rows, set(over)


def is_bare(engine: EmbeddingEngine, row: TokenIds, limit: int, bare: Sequence[TokenIds]) -> bool:
    """Return True if a cut row is too long still, or equal to one of the `bare` ones, also cut."""
    kept = engine.truncate(row, limit)
    return len(kept) > limit or any(kept == engine.truncate(one, limit) for one in bare)
