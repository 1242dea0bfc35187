"""Bounds on the requests and tokens that wait for a model, and the deadlines of requests.

Also counts arrivals, which are requests being parsed or tokenized: a batcher can wait for them, so
that a burst of requests shares a batch.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from enum import StrEnum
from typing import Final

from gateway import clock, metrics
from gateway.clock import Stage
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs import Caller


class Arrival:
    """A request that is being parsed or tokenized, and is not queued yet."""

    def __init__(self, arrivals: "Arrivals") -> None:
        self._arrivals = arrivals

    def end(self) -> None:
        """Stop counting the request, which is now queued or over. A second call does nothing."""
        self._arrivals._end(self)


class Arrivals:
    """The requests that are on their way to the queue, in order of arrival."""

    def __init__(self) -> None:
        self._since: dict[Arrival, float] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def expect(self) -> Iterator[Arrival]:
        """Count a request as on its way until the context exits or `Arrival.end` is called."""
        arrival = Arrival(self)
        self._since[arrival] = clock.now()
        try:
            yield arrival
        finally:
            arrival.end()

    @property
    def count(self) -> int:
        """Return the number of requests that are on their way."""
        return len(self._since)

    @property
    def newest_age_s(self) -> float | None:
        """Return the seconds since the newest request arrived; None if none is on its way."""
        newest = next(reversed(self._since.values()), None)
        if newest is None:
            return None
        return clock.now() - newest

    async def yield_to_loop(self) -> None:
        """Yield to the event loop three times, so that requests already received are counted."""
        # Socket, reader and handler each need one iteration of the loop. Without this, a quarter of
        # bursts of ten requests were split over two batches.
        for _ in range(3):
            await asyncio.sleep(0)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until one of the counted requests is queued or over, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _end(self, arrival: Arrival) -> None:
        if self._since.pop(arrival, None) is not None:
            self._changed.set()
            self._changed = asyncio.Event()  # a new event for the next change


WINDOW_S: Final = 30.0
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 60.0
NO_BOUND: Final = 2**62


def retry_after_s(waiting: float, finished: float, seconds: float) -> float:
    """Estimate the seconds until a queue has drained, between LEAST_RETRY_S and MOST_RETRY_S.

    `finished` items were served in the last `seconds`. One more is counted as about to finish, so
    the estimate is short for a new queue, and grows with time for a stuck queue.
    """
    drained_s = waiting * seconds / (finished + 1)
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, drained_s))


class Noun(StrEnum):
    """The unit that an Admission counts, as error messages name it."""

    REQUESTS = "requests"
    CHOICES = "choices"
    TOKENS = "tokens"


_GAUGES = {
    Noun.REQUESTS: metrics.QUEUE_DEPTH,
    Noun.CHOICES: metrics.QUEUE_CHOICES,
    Noun.TOKENS: metrics.QUEUE_TOKENS,
}


class Admission:
    """A bound on the total of one unit, such as tokens, that all requests of a model hold while
    they wait or run.

    A request that would exceed `limit` is refused, unless no other request holds anything: a single
    request may hold any amount. The recent rate of releases is measured, for `retry_after_s`.
    """

    def __init__(
        self, model: str, noun: Noun, limit: int, now: Callable[[], float] = clock.now
    ) -> None:
        self._model = model
        self._noun = noun
        self._gauge = metrics.of(_GAUGES[noun], model)
        self._now = now
        self._held = 0
        self._finished = 0.0
        self._since = 0.0
        self.limit = limit

    @contextlib.contextmanager
    def admit(
        self, amount: int = 1, retry_after_s: float | None = None, *, is_more: bool = False
    ) -> Iterator[None]:
        """Hold `amount` while entered. Raises Overloaded if there is no room.

        `Retry-After` is `retry_after_s` or, by default, an estimate of when the queue has drained.
        `is_more` means that the request holds an amount already: it gets more only while the total
        of all requests stays within half of the limit.
        """
        held = self._held + amount
        is_greedy = is_more and 2 * held > self.limit
        if is_greedy or (self._held and held > self.limit):
            raise Overloaded(
                f"The model `{self._model}` has {self._held} {self._noun} waiting already.",
                retry_after_s=self.retry_after_s() if retry_after_s is None else retry_after_s,
            )
        if not self._held:  # the rate leaves out time in which nothing was held
            self.begin()
        self._held = held
        self._gauge.inc(amount)
        # However the request ends, its amount is released, and counts for the rate of releases.
        try:
            yield
        finally:
            self._release(amount)
            self._gauge.dec(amount)

    @property
    def limit(self) -> int:
        """Return the most that requests may hold together. A new limit holds for new requests."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        if self._noun is Noun.TOKENS:
            metrics.of(metrics.QUEUE_TOKENS_LIMIT, self._model).set(limit)

    def begin(self) -> None:
        """Start measuring the rate of releases anew: before now, nothing could be released."""
        self._since, self._finished = self._now(), 0.0

    def _release(self, amount: int) -> None:
        """Release `amount`, and halve the weight of older releases about every WINDOW_S."""
        self._held -= amount
        self._finished += amount
        age_s = self._now() - self._since
        if age_s > WINDOW_S:
            self._since += age_s / 2
            self._finished /= 2

    def retry_after_s(self) -> float:
        """Estimate the seconds until everything that is held now is released."""
        return retry_after_s(self._held, self._finished, self._now() - self._since)


@contextlib.asynccontextmanager
async def until_deadline(caller: Caller) -> AsyncIterator[None]:
    """Cancel the body at the caller's deadline and raise DeadlineExceeded."""
    limit = asyncio.timeout(caller.deadline - clock.now())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():  # the TimeoutError is from other code, such as of a slow disk
            raise
        raise DeadlineExceeded(caller.allowed_s) from None


@contextlib.asynccontextmanager
async def time_load(caller: Caller) -> AsyncIterator[None]:
    """Record the body's time as LOAD, and cancel it at the caller's deadline."""
    started = clock.now()
    caller.timings.stage = Stage.LOAD
    try:
        async with until_deadline(caller):
            yield
    finally:
        caller.timings.add(Stage.LOAD, started)
