"""Computes the rows of waiting requests in shared, padded passes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence, Sized
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

from gateway import clock, logs, metrics
from gateway.clock import Stage, Timings
from gateway.errors import DeviceLost, Fault, GatewayError, Unavailable
from gateway.jobs import Caller
from gateway.serving.admission import Admission, Arrival, Arrivals, Noun, until_deadline
from gateway.serving.embedding.policy import EmbeddingLimits, patience, take_batch, window
from gateway.serving.faults import run_forever
from gateway.serving.lane import Lane, Pace, Turn
from gateway.serving.ports import RowEngine

R = TypeVar("R", bound=Sized)
T = TypeVar("T")

log = logs.get("embedding")


class RowRequest(Generic[R, T]):
    """The rows of one request and their results. Short rows are first, which keeps padding low."""

    def __init__(self, rows: Sequence[R], timings: Timings) -> None:
        self.arrived = clock.now()
        self.results: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
        self._rows = rows
        self._timings = timings
        timings.stage = Stage.QUEUE
        self._order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        self._taken = 0
        self._results: dict[int, T] = {}
        self._inferred_s = 0.0
        self._lane_s = 0.0
        self._turn: Turn | None = None

    @property
    def is_over(self) -> bool:
        return self.results.done()

    @property
    def is_waiting(self) -> bool:
        return not self.is_over and self._taken < len(self._order)

    @property
    def waiting(self) -> int:
        return len(self._order) - self._taken

    def lengths(self, most: int) -> list[int]:
        """Return the lengths in tokens of at most `most` rows to take next."""
        return [len(self._rows[i]) for i in self._order[self._taken : self._taken + most]]

    def take(self, count: int) -> "list[Row[R, T]]":
        tickets = self._order[self._taken : self._taken + count]
        self._taken += count
        self._timings.stage = Stage.INFERENCE
        return [Row(self, index, self._rows[index]) for index in tickets]

    def note_pass(self, seconds: float, turn: Turn) -> None:
        """Count the seconds of a pass and, once per turn, of the wait for the lane."""
        self._inferred_s += seconds
        if turn is not self._turn:
            self._turn = turn
            # The wait may have begun before the request arrived.
            self._lane_s += max(0.0, min(turn.waited_s, turn.gained - self.arrived))

    def answer(self, index: int, result: T) -> None:
        if self.is_over:
            return
        self._results[index] = result
        if len(self._results) == len(self._rows):
            self.results.set_result([self._results[i] for i in range(len(self._rows))])

    def close(self) -> None:
        """Stop waiting for results, so that waiting rows are never computed."""
        self.results.cancel()
        self._results.clear()

    def write_timings(self) -> None:
        """Record the seconds in each stage; all but LANE and INFERENCE count as QUEUE."""
        now, add = clock.now(), self._timings.add
        inferred_since = now - self._inferred_s
        lane_since = inferred_since - self._lane_s
        add(Stage.QUEUE, self.arrived, max(self.arrived, lane_since))
        add(Stage.LANE, lane_since, inferred_since)
        add(Stage.INFERENCE, inferred_since, now)

    def refuse(self, error: GatewayError) -> None:
        if not self.is_over:
            self.results.set_exception(error)


class Row(NamedTuple, Generic[R, T]):
    """A row in a batch."""

    request: RowRequest[R, T]
    position: int
    row: R


class RowBatcher(Generic[R, T]):
    """One model's queue of requests, and the worker that computes their rows.

    `compute` gets rows sorted by length, and returns a result for each. `in_steps` yields None
    after each step, and finally the results. Both run on the lane.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        name: str,
        compute: Callable[[Sequence[R]], Sequence[T]],
        in_steps: Callable[[Sequence[R]], Generator[Sequence[T] | None]],
        engine: RowEngine,
        lane: Lane,
        limits: EmbeddingLimits,
        arrivals: Arrivals | None,
    ) -> None:
        self._name = name
        self._compute = compute
        self._in_steps = in_steps
        self._probe = engine.probe
        self._lane = lane
        self._limits = limits
        self._arrivals = arrivals or Arrivals()
        self._pace = Pace(limits.pass_limit_s, engine.token_s)
        self._waiting: list[RowRequest[R, T]] = []
        self._tokens = Admission(name, Noun.TOKENS, limits.queue_max_tokens)
        self._arrived = asyncio.Event()

    @property
    def tickets(self) -> int:
        return sum(request.is_waiting for request in self._waiting)

    def adopt(self, limits: EmbeddingLimits) -> None:
        self._limits = limits
        self._pace.limit_s = limits.pass_limit_s
        self._tokens.limit = limits.queue_max_tokens

    @contextlib.asynccontextmanager
    async def _begin(self, caller: Caller, arrival: Arrival | None) -> AsyncIterator[Arrival]:
        timings = caller.timings
        timings.model, timings.stage = self._name, Stage.TOKENIZE
        async with until_deadline(caller):
            if arrival is not None:
                yield arrival
                return
            with self._arrivals.expect() as own_arrival:
                yield own_arrival

    async def _queue(self, rows: Sequence[R], timings: Timings, arrival: Arrival) -> list[T]:
        """Queue rows and return their results. Raises Overloaded if too many tokens are queued."""
        with self._tokens.admit(sum(map(len, rows))):
            request: RowRequest[R, T] = RowRequest(rows, timings)
            self._waiting.append(request)
            self._arrived.set()
            arrival.end()
            try:
                results = await request.results
            finally:
                request.close()
            request.write_timings()
            return results

    def _count(self, timings: Timings, tokens: int, truncated: int) -> None:
        timings.tokens_in, timings.stage = tokens, None
        metrics.count_prompt(self._name, tokens)
        if truncated:
            metrics.of(metrics.TRUNCATED, self._name).inc(truncated)

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._has_work():
                await self._collect()
                async with self._lane.turn(self.kind) as turn:
                    await self._pass(turn)
                    # Go on in this turn until the other turns' waits end it.
                    while self._has_work() and turn.is_contended and not turn.is_up:
                        await self._pass(turn)

    def _end_failed(self, error: Exception) -> None:
        self.end(self._as_error(error))

    def _as_error(self, error: Exception) -> GatewayError:
        return self._lane.health.as_error(self._name, error)

    def _has_work(self) -> bool:
        self._waiting = [request for request in self._waiting if request.is_waiting]
        return bool(self._waiting)

    async def _collect(self) -> None:
        """Wait for the rest of a burst of requests, while the lane is idle."""
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
        # The batch is chosen now, so that it has requests that came during the wait for the lane.
        batch = self._take()
        if not batch:
            return
        started = turn.held_s
        try:
            self._lane.health.check()
            await self._run(turn, batch)
        except asyncio.CancelledError:
            _refuse(batch, _unloaded_error(self._name))
            raise
        except DeviceLost as error:
            _refuse(batch, error)
            self.end(error)
            return
        except Exception as error:
            _refuse(batch, self._as_error(error))
            raise
        self._record(batch, turn, started)

    def _take(self) -> list[Row[R, T]]:
        self._has_work()
        max_rows = self._limits.max_batch_size
        requests = self._waiting[:max_rows]
        lengths = [request.lengths(max_rows) for request in requests]
        tokens = min(self._limits.max_batch_tokens, self._pace.tokens)
        counts = take_batch(lengths, max_rows, tokens)
        pairs = zip(requests, counts, strict=True)
        chosen = [ticket for request, count in pairs for ticket in request.take(count)]
        return sorted(chosen, key=lambda ticket: len(ticket.row))

    async def _run(self, turn: Turn, batch: list[Row[R, T]]) -> None:
        turn.set_shape((self._name, len(batch).bit_length(), len(batch[-1].row).bit_length()))
        try:
            await self._answer_rows(turn, batch)
        except Exception as error:
            log.warning("batch_failed", model=self._name, rows=len(batch), error=str(error))
            await self._retry_alone(turn, batch, error)

    async def _answer_rows(self, turn: Turn, batch: Sequence[Row[R, T]]) -> None:
        """Compute rows. One that takes longer than a pass should gives the lane back in between."""
        rows = [ticket.row for ticket in batch]
        if len(rows) > 1 or len(rows[0]) <= self._pace.tokens:
            _answer(batch, await turn(self._compute, rows))
            return
        steps, results = self._in_steps(rows), None
        try:
            while results is None and not batch[0].request.is_over:
                await turn.rest()
                self._lane.health.check()
                results = await turn(_advance, steps, self._pace.limit_s)
        finally:
            with contextlib.suppress(GatewayError):  # the lane has ended
                await turn(steps.close)  # arrays are freed where they were made
        if results is not None:
            _answer(batch, results)

    async def _retry_alone(self, turn: Turn, batch: list[Row[R, T]], error: Exception) -> None:
        """Compute each row alone, so that only the rows at fault fail."""
        fault = await self._note(turn, error)
        # A batch of one row is retried only after memory was freed or compiled code turned off.
        if fault is Fault.PRESSURE:
            await turn(self._lane.health.shed)
        for row in batch:
            if len(batch) > 1 or fault in (Fault.PRESSURE, Fault.COMPILER):
                try:
                    await self._answer_rows(turn, [row])
                    continue
                except Exception as alone:
                    error = alone
                    await self._note(turn, error)
            _refuse([row], self._as_error(error))

    async def _note(self, turn: Turn, error: Exception) -> Fault:
        """Record the error of a pass, and return its fault. Raises DeviceLost."""
        health = self._lane.health
        fault = health.classify(error)
        await turn(health.note, fault, str(error), self._probe)
        return fault

    def _record(self, batch: Sequence[Row[R, T]], turn: Turn, started: float) -> None:
        seconds = turn.held_s - started
        for request in {ticket.request for ticket in batch}:
            request.note_pass(seconds, turn)
        padded = len(batch) * max(1, len(batch[-1].row))
        if not all(ticket.request.results.cancelled() for ticket in batch):  # it may be unfinished
            self._pace.note(padded, seconds)
        metrics.of(metrics.BATCH_ROWS, self._name).observe(len(batch))
        metrics.of(metrics.BATCH_PADDING, self._name).observe(
            1 - sum(len(ticket.row) for ticket in batch) / padded
        )
        log.debug(
            "batch",
            kind=self.kind,
            model=self._name,
            rows=len(batch),
            padded_tokens=padded,
            ms=round(1000 * seconds, 2),
        )

    def end(self, error: GatewayError) -> None:
        for request in self._waiting:
            request.refuse(error)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve the queue while entered. Requests that wait at exit fail with Unavailable."""
        worker = asyncio.create_task(
            run_forever(f"{self.kind} {self._name}", self._work, self._end_failed)
        )
        try:
            yield self
        finally:
            worker.cancel()
            await asyncio.wait([worker])
            self.end(_unloaded_error(self._name))


def _advance(steps: Iterator[Sequence[T] | None], seconds: float) -> Sequence[T] | None:
    """Run steps for about this time; return the results, or None if steps are left."""
    until = clock.now() + seconds
    for results in steps:
        if results is not None or clock.now() >= until:
            return results
    raise ValueError("a pass ended without results")


def _answer(batch: Sequence[Row[R, T]], results: Sequence[T]) -> None:
    if len(results) != len(batch):
        raise ValueError(f"{len(results)} results were given for {len(batch)} rows")
    for ticket, result in zip(batch, results, strict=True):
        ticket.request.answer(ticket.position, result)


def _refuse(batch: Sequence[Row[R, T]], error: GatewayError) -> None:
    for ticket in batch:
        ticket.request.refuse(error)


def _unloaded_error(model: str) -> GatewayError:
    return Unavailable(f"The model `{model}` was unloaded meanwhile.", retry_after_s=1)
