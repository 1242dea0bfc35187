"""Waiting inputs → one padded pass → each caller's vectors."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np

from gateway import logs, metrics
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    EngineFailed,
    GatewayError,
    Unavailable,
)
from gateway.jobs import Embedded, EmbedJob, TokenIds, Vectors
from gateway.serving.admission import Admission, until_deadline
from gateway.serving.lane import Lane, Run
from gateway.serving.ports import EmbeddingEngine
from gateway.serving.tokens import TokenPool

log = logs.get("embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLimits:
    """How much goes into one pass, and how long a burst is waited for."""

    max_batch_size: int
    max_batch_tokens: int
    batch_window_s: float
    queue_limit: int


@dataclass(slots=True, eq=False)
class _Ticket:
    """One input waiting for its vector."""

    tokens: TokenIds
    vector: asyncio.Future[Vectors]

    @property
    def is_gone(self) -> bool:
        return self.vector.done()


def take_batch(lengths: Sequence[int], max_rows: int, max_tokens: int) -> int:
    """Count how many of the oldest inputs fit in one padded batch.

    A padded batch costs its longest row times its rows. The first input is always taken, so
    that an over-long one is served alone rather than never.
    """
    longest = 0
    for rows, length in enumerate(lengths[:max_rows]):
        longest = max(longest, length)
        if rows and longest * (rows + 1) > max_tokens:
            return rows
    return min(len(lengths), max_rows)


class EmbeddingBatcher:
    """One model's queue of inputs. A context manager: leaving it fails what still waits."""

    def __init__(
        self,
        name: str,
        engine: EmbeddingEngine,
        lane: Lane,
        pool: TokenPool,
        limits: EmbeddingLimits,
    ) -> None:
        self._name = name
        self._engine = engine
        self._lane = lane
        self._pool = pool
        self._limits = limits
        self._waiting: deque[_Ticket] = deque()
        self._admission = Admission(name, limits.queue_limit)
        self._arriving = 0
        self._arrived = asyncio.Event()

    @property
    def engine(self) -> EmbeddingEngine:
        """Give the engine, for what it says of the model."""
        return self._engine

    async def embed(self, job: EmbedJob) -> Embedded:
        """Give a vector for every input, in order.

        Raises Overloaded when too many requests wait, ContextLengthExceeded for an over-long
        input, DeadlineExceeded, and EngineFailed when the model gave no number.
        """
        try:
            with self._admission.admitted():
                async with until_deadline(job.caller):
                    return await self._embed(job)
        except asyncio.CancelledError:
            metrics.CANCELLED.labels(self._name).inc()
            raise

    async def _embed(self, job: EmbedJob) -> Embedded:
        tickets, truncated = await self._enqueue(job)
        try:
            vectors = np.stack(await asyncio.gather(*(ticket.vector for ticket in tickets)))
        finally:
            for ticket in tickets:
                ticket.vector.cancel()
        read = sum(len(ticket.tokens) for ticket in tickets)
        metrics.TOKENS_IN.labels(self._name).inc(read)
        if truncated:
            metrics.TRUNCATED.labels(self._name).inc(truncated)
        if job.dimensions is not None and job.dimensions < self._engine.dimensions:
            vectors = self._engine.shorten(vectors, job.dimensions)
        return Embedded(vectors, read, truncated)

    async def _enqueue(self, job: EmbedJob) -> tuple[list[_Ticket], int]:
        self._arriving += 1
        try:
            rows = await self._tokenise(job)
            rows, truncated = self._fitted(rows, truncate=job.truncate)
            loop = asyncio.get_running_loop()
            tickets = [_Ticket(row, loop.create_future()) for row in rows]
            self._waiting.extend(tickets)
            return tickets, truncated
        finally:
            self._arriving -= 1
            self._arrived.set()

    async def _tokenise(self, job: EmbedJob) -> list[TokenIds]:
        if job.token_rows:
            return self._known(job.token_rows)
        name = job.prompt_name or self._engine.default_prompt_name
        if name is not None and name not in self._engine.prompts:
            known = ", ".join(sorted(self._engine.prompts)) or "none"
            raise BadRequest(
                f"The model `{self._name}` has no prompt `{name}`; it has: {known}.",
                param="prompt_name",
            )
        prompt = self._engine.prompts[name] if name is not None else ""
        texts = [prompt + text for text in job.texts]
        return list(await self._pool.run(self._engine.encode, texts))

    def _known(self, rows: Sequence[TokenIds]) -> list[TokenIds]:
        """Refuse ids outside the vocabulary: MLX would read past its table unasked."""
        size = self._engine.vocab_size
        for row in rows:
            if not all(0 <= token < size for token in row):
                raise BadRequest(
                    f"Token ids of the model `{self._name}` are 0 to {size - 1}.",
                    param="input",
                )
        return list(rows)

    def _fitted(self, rows: list[TokenIds], *, truncate: bool) -> tuple[list[TokenIds], int]:
        limit = self._engine.max_tokens
        over = [i for i, row in enumerate(rows) if len(row) > limit]
        if over and not truncate:
            raise ContextLengthExceeded(limit, len(rows[over[0]]), param="input", noun="input")
        for i in over:
            rows[i] = self._engine.truncate(rows[i])
        return rows, len(over)

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                try:
                    await self._collect()
                    async with self._lane.turn("embedding") as run:
                        await self._pass(run)
                except Exception as error:  # whatever it was, those who come later are served
                    log.error("batch_failed", model=self._name, exc_info=True)
                    _refuse(self._waiting, _told(self._name, error))
                    self._waiting.clear()

    async def _collect(self) -> None:
        """Give a burst that is still being tokenised time to arrive, if the lane is idle."""
        if self._limits.max_batch_size == 1:
            return
        patience = asyncio.timeout(self._limits.batch_window_s)
        with contextlib.suppress(TimeoutError):
            async with patience:
                while self._arriving and len(self._waiting) < self._limits.max_batch_size:
                    self._arrived.clear()
                    await self._arrived.wait()

    async def _pass(self, run: Run) -> None:
        """Choose only now, holding the lane: whatever waits is the batch."""
        if not (batch := self._take()):
            return
        try:
            await self._together(run, batch)
        except asyncio.CancelledError:
            _refuse(batch, _unloaded(self._name))
            raise
        except Exception as error:
            _refuse(batch, _told(self._name, error))
            raise
        metrics.BATCH_ROWS.labels(self._name).observe(len(batch))

    async def _together(self, run: Run, batch: list[_Ticket]) -> None:
        try:
            _answer(batch, await run(self._engine.embed, [ticket.tokens for ticket in batch]))
        except Exception as error:
            log.warning("batch_failed", model=self._name, rows=len(batch), error=str(error))
            await self._one_by_one(run, batch, error)

    async def _one_by_one(self, run: Run, batch: list[_Ticket], error: Exception) -> None:
        """Find the row at fault: each is tried once more, alone."""
        for ticket in batch:
            if len(batch) > 1:
                try:
                    _answer([ticket], await run(self._engine.embed, [ticket.tokens]))
                    continue
                except Exception as alone:
                    error = alone
            _refuse([ticket], _told(self._name, error))

    def _take(self) -> list[_Ticket]:
        while self._waiting and self._waiting[0].is_gone:
            self._waiting.popleft()
        present = [ticket for ticket in self._waiting if not ticket.is_gone]
        rows = take_batch(
            [len(ticket.tokens) for ticket in present],
            self._limits.max_batch_size,
            self._limits.max_batch_tokens,
        )
        self._waiting = deque(present[rows:])
        return present[:rows]

    def end(self, error: GatewayError) -> None:
        """Refuse what waits; a pass under way still answers."""
        _refuse(self._waiting, error)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["EmbeddingBatcher"]:
        """Serve the queue while entered; what still waits at the end is refused."""
        worker = asyncio.create_task(self._work(), name=f"embed {self._name}")
        try:
            yield self
        finally:
            worker.cancel()
            await asyncio.wait([worker])
            _refuse(self._waiting, _unloaded(self._name))


def _answer(batch: Sequence[_Ticket], vectors: Vectors) -> None:
    if len(vectors) != len(batch):
        raise ValueError(f"{len(vectors)} vectors were given for {len(batch)} inputs")
    for ticket, vector in zip(batch, vectors, strict=True):
        if not ticket.is_gone:
            ticket.vector.set_result(vector)


def _refuse(batch: Sequence[_Ticket], error: GatewayError) -> None:
    for ticket in batch:
        if not ticket.is_gone:
            ticket.vector.set_exception(error)


def _unloaded(model: str) -> GatewayError:
    return Unavailable(f"The model `{model}` was unloaded meanwhile.", retry_after_s=1)


def _told(model: str, error: Exception) -> GatewayError:
    return error if isinstance(error, GatewayError) else EngineFailed(model, str(error))
