"""Embeds the inputs of waiting requests in shared, padded passes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import numpy as np

from gateway import clock, logs, metrics
from gateway.errors import EngineFailed, GatewayError, Unavailable
from gateway.jobs import Embedded, EmbedJob, Stage, Timings, TokenIds, Vectors
from gateway.serving.admission import Admission, Arrival, Arrivals, Noun, until_deadline
from gateway.serving.embedding.policy import (
    EmbeddingCache,
    EmbeddingLimits,
    TextVector,
    add_prompts,
    check_ids,
    fit_to_context,
    patience,
    take_batch,
    window,
)
from gateway.serving.lane import Lane, Turn
from gateway.serving.pace import Pace
from gateway.serving.ports import EmbeddingEngine
from gateway.serving.tokenize import ThreadPools, Tokeniser
from gateway.serving.workers import run_forever


class EmbedRequest:
    """One request's inputs, taken shortest first to keep padding low."""

    def __init__(self, rows: Sequence[TokenIds], timings: Timings) -> None:
        self.arrived = clock.now()
        self.vectors: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        self._rows = rows
        self._timings = timings
        self._order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        self._taken = 0
        self._left = len(rows)
        self._array: Vectors | None = None
        self._inferred_s = 0.0
        self._lane_s = 0.0
        self._turn: Turn | None = None  # the last one that embedded inputs of it

    @property
    def is_over(self) -> bool:
        """Return True if it has vectors or an error, or its caller has left."""
        return self.vectors.done()

    @property
    def is_waiting(self) -> bool:
        """Return True if any of its inputs wait for a batch."""
        return not self.is_over and self._taken < len(self._order)

    @property
    def waiting(self) -> int:
        """Return the number of inputs that wait."""
        return len(self._order) - self._taken

    def lengths(self, most: int) -> list[int]:
        """Return the lengths in tokens of the next inputs, at most `most`."""
        return [len(self._rows[i]) for i in self._order[self._taken : self._taken + most]]

    def take(self, count: int) -> "list[Input]":
        """Take the next inputs, for a batch."""
        taken = self._order[self._taken : self._taken + count]
        self._taken += count
        return [Input(self, index, self._rows[index]) for index in taken]

    def note_pass(self, seconds: float, turn: Turn) -> None:
        """Add the seconds of a pass and, once a turn, of the wait for the lane before it.

        That wait may have begun before the request arrived.
        """
        self._inferred_s += seconds
        if turn is not self._turn:
            self._turn = turn
            self._lane_s += max(0.0, min(turn.waited_s, turn.gained - self.arrived))

    def answer(self, index: int, vector: Vectors) -> None:
        """Add one input's vector, (dimensions,); the last one completes the result."""
        if self._array is None:
            self._array = np.empty((len(self._rows), len(vector)), dtype=np.float32)
        self._array[index] = vector
        self._left -= 1
        if self._left == 0 and not self.is_over:
            self.vectors.set_result(self._array)

    def close(self) -> None:
        """Record the stage it reached, and take part in no further pass."""
        self._timings.stage = Stage.INFERENCE if self._taken else Stage.QUEUE
        self.vectors.cancel()

    def write_timings(self) -> None:
        """Record the time in each stage: what was neither lane nor inference was queue."""
        waited = clock.now() - self.arrived
        add = self._timings.add
        add(Stage.QUEUE, max(0.0, waited - self._inferred_s - self._lane_s))
        add(Stage.LANE, self._lane_s)
        add(Stage.INFERENCE, self._inferred_s)

    def refuse(self, error: GatewayError) -> None:
        """Fail with an error unless it is over."""
        if not self.is_over:
            self.vectors.set_exception(error)


class Input:
    """One input inside a batch."""

    __slots__ = ("index", "request", "tokens")

    def __init__(self, request: EmbedRequest, index: int, tokens: TokenIds) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens


log = logs.get("embedding")


class EmbeddingBatcher:
    """One model's queue of requests, and the worker that embeds their inputs."""

    def __init__(
        self,
        name: str,
        engine: EmbeddingEngine,
        lane: Lane,
        pool: ThreadPools,
        limits: EmbeddingLimits,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._lane = lane
        self._limits = limits
        self._tokeniser = Tokeniser(engine.encode, pool)
        self._truncating = Tokeniser(engine.encode_start, pool)
        self._arrivals = arrivals or Arrivals()
        self._pace = Pace(limits.pass_limit_s)
        self._cache = EmbeddingCache(name, limits.cache_size)
        self._waiting: list[EmbedRequest] = []
        self._tokens = Admission(name, Noun.TOKENS, limits.queue_max_tokens)
        self._arrived = asyncio.Event()

    @property
    def engine(self) -> EmbeddingEngine:
        """Return the engine, for its facts about the model."""
        return self._engine

    @property
    def tickets(self) -> int:
        """Return the number of requests with inputs that wait."""
        return sum(request.is_waiting for request in self._waiting)

    def adopt(self, limits: EmbeddingLimits) -> None:
        """Apply new limits, also to waiting requests."""
        self._limits = limits
        self._pace.limit_s = limits.pass_limit_s
        self._tokens.limit = limits.queue_max_tokens
        self._cache.resize(limits.cache_size)

    async def embed(self, job: EmbedJob, arrival: Arrival | None = None) -> Embedded:
        """Return a vector for every input, in order. `arrival` ends once the inputs are queued.

        Raises Overloaded when too much waits, ContextLengthExceeded for an over-long
        input, DeadlineExceeded, and EngineFailed when the model fails, or a vector is not finite.
        """
        timings = job.caller.timings
        timings.model, timings.stage = self._name, Stage.TOKENISE
        async with until_deadline(job.caller):
            if arrival is not None:
                return await self._embed(job, arrival)
            with self._arrivals.expect() as arrival:
                return await self._embed(job, arrival)

    async def _embed(self, job: EmbedJob, arrival: Arrival) -> Embedded:
        texts = add_prompts(self._engine, self._name, job)
        found = [self._cache.get(text, truncate=job.truncate) for text in texts]
        found = found or [None] * len(job.token_rows)
        if missing := [index for index, each in enumerate(found) if each is None]:
            new = await self._compute(job, [texts[index] for index in missing if texts], arrival)
            for index, each in zip(missing, new, strict=True):
                found[index] = each
                if texts:
                    self._cache.put(texts[index], each)
        every = [each for each in found if each is not None]
        tokens = sum(each.tokens for each in every)
        truncated = sum(each.is_truncated for each in every)
        timings = job.caller.timings
        timings.tokens_in, timings.stage = tokens, None
        metrics.of(metrics.TOKENS_IN, self._name).inc(tokens)
        if truncated:
            metrics.of(metrics.TRUNCATED, self._name).inc(truncated)
        vectors = np.stack([each.vector for each in every])
        if job.dimensions is not None and job.dimensions < self._engine.dimensions:
            vectors = self._engine.shorten(vectors, job.dimensions)
        return Embedded(vectors, tokens, truncated)

    async def _compute(
        self, job: EmbedJob, texts: Sequence[str], arrival: Arrival
    ) -> list[TextVector]:
        """Embed texts or, if there are none, the job's token ids."""
        rows = await self._tokenise(job, texts)
        rows, truncated = fit_to_context(self._engine, rows, truncate=job.truncate)
        with self._tokens.admit(sum(map(len, rows))):
            vectors = await self._wait_for(EmbedRequest(rows, job.caller.timings), arrival)
        return [
            TextVector(vector, len(row), index in truncated)
            for index, (row, vector) in enumerate(zip(rows, vectors, strict=True))
        ]

    async def _wait_for(self, request: EmbedRequest, arrival: Arrival) -> Vectors:
        self._waiting.append(request)
        self._arrived.set()
        arrival.end()
        try:
            vectors = await request.vectors
        finally:
            request.close()
        request.write_timings()
        return vectors

    async def _tokenise(self, job: EmbedJob, texts: Sequence[str]) -> list[TokenIds]:
        if not texts:
            check_ids(self._engine, self._name, job.token_rows)
            return list(job.token_rows)
        started = clock.now()
        tokeniser = self._truncating if job.truncate else self._tokeniser
        rows = await tokeniser.tokenise(texts)
        job.caller.timings.add(Stage.TOKENISE, clock.now() - started)
        return rows

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._has_work():
                await self._collect()
                async with self._lane.turn("embedding") as turn:
                    await self._pass(turn)
                    # Several passes a turn, where others wait and it is not their turn yet.
                    while self._has_work() and turn.is_contended and not turn.is_up:
                        await self._pass(turn)

    def _end_failed(self, error: Exception) -> None:
        self.end(_as_gateway_error(self._name, error))

    def _has_work(self) -> bool:
        self._waiting = [request for request in self._waiting if request.is_waiting]
        return bool(self._waiting)

    async def _collect(self) -> None:
        """While the lane is idle, wait for the rest of a burst of requests."""
        is_first = True
        await self._arrivals.yield_to_loop()
        while self._lane.is_idle and self._has_work():
            arrivals, limits = self._arrivals, self._limits
            more_s = patience(
                sum(request.waiting for request in self._waiting),
                clock.now() - self._waiting[0].arrived,
                window(len(self._waiting) + arrivals.count, limits),
                limits,
                newest_age_s=arrivals.newest_age_s,
            )
            if more_s <= 0:
                if is_first:
                    metrics.of(metrics.FAST_PATH, self._name).inc()
                return
            is_first = False
            await arrivals.wait_for_change(more_s)

    async def _pass(self, turn: Turn) -> None:
        """Embed a batch, chosen now that the lane is held."""
        if not (batch := self._take()):
            return
        started = clock.now()
        try:
            await self._run(turn, batch)
        except asyncio.CancelledError:
            _refuse(batch, _unloaded_error(self._name))
            raise
        except Exception as error:
            _refuse(batch, _as_gateway_error(self._name, error))
            raise
        self._record(batch, turn, started)

    def _take(self) -> list[Input]:
        self._has_work()
        most = self._limits.max_batch_size
        requests = self._waiting[:most]
        lengths = [request.lengths(most) for request in requests]
        tokens = min(self._limits.max_batch_tokens, self._pace.tokens)
        counts = take_batch(lengths, most, tokens)
        pairs = zip(requests, counts, strict=True)
        chosen = [each for request, count in pairs for each in request.take(count)]
        return sorted(chosen, key=lambda each: len(each.tokens))

    async def _run(self, turn: Turn, batch: list[Input]) -> None:
        turn.set_shape((self._name, len(batch).bit_length(), len(batch[-1].tokens).bit_length()))
        try:
            _answer(batch, await turn(self._engine.embed, [each.tokens for each in batch]))
        except Exception as error:
            log.warning("batch_failed", model=self._name, rows=len(batch), error=str(error))
            await self._retry_alone(turn, batch, error)

    async def _retry_alone(self, turn: Turn, batch: list[Input], error: Exception) -> None:
        """Embed each input alone, so that only those at fault fail."""
        for each in batch:
            if len(batch) > 1:
                try:
                    _answer([each], await turn(self._engine.embed, [each.tokens]))
                    continue
                except Exception as alone:
                    error = alone
            _refuse([each], _as_gateway_error(self._name, error))

    def _record(self, batch: Sequence[Input], turn: Turn, started: float) -> None:
        seconds = clock.now() - started
        for request in {each.request for each in batch}:
            request.note_pass(seconds, turn)
        padded = len(batch) * max(1, len(batch[-1].tokens))
        self._pace.note(padded, seconds)
        metrics.of(metrics.BATCH_ROWS, self._name).observe(len(batch))
        metrics.of(metrics.BATCH_PADDING, self._name).observe(
            1 - sum(len(each.tokens) for each in batch) / padded
        )
        log.debug(
            "batch",
            kind="embedding",
            model=self._name,
            rows=len(batch),
            padded_tokens=padded,
            ms=round(1000 * seconds, 2),
        )

    def end(self, error: GatewayError) -> None:
        """Fail every waiting request with an error."""
        for request in self._waiting:
            request.refuse(error)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["EmbeddingBatcher"]:
        """Serve the queue while entered; requests that still wait at the end fail."""
        worker = asyncio.create_task(
            run_forever(f"embed {self._name}", self._work, self._end_failed)
        )
        try:
            yield self
        finally:
            worker.cancel()
            await asyncio.wait([worker])
            self.end(_unloaded_error(self._name))


def _answer(batch: Sequence[Input], vectors: Vectors) -> None:
    if len(vectors) != len(batch):
        raise ValueError(f"{len(vectors)} vectors were given for {len(batch)} inputs")
    for each, vector in zip(batch, vectors, strict=True):
        each.request.answer(each.index, vector)


def _refuse(batch: Sequence[Input], error: GatewayError) -> None:
    for each in batch:
        each.request.refuse(error)


def _unloaded_error(model: str) -> GatewayError:
    return Unavailable(f"The model `{model}` was unloaded meanwhile.", retry_after_s=1)


def _as_gateway_error(model: str, error: Exception) -> GatewayError:
    return error if isinstance(error, GatewayError) else EngineFailed(model, str(error))
