"""Bounds on the requests and tokens that wait for a model, each until its deadline.

Also the arrivals: requests being read or tokenized, so that a batcher can wait for a burst.
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
    """A request that is being read or tokenized: it will be queued, or ends first."""

    def __init__(self, arrivals: "Arrivals") -> None:
        self._arrivals = arrivals

    def end(self) -> None:
        """Stop counting it, as it is queued or ended. A second call does nothing."""
        self._arrivals._end(self)


class Arrivals:
    """Requests that are on their way, in order of arrival."""

    def __init__(self) -> None:
        self._since: dict[Arrival, float] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def expect(self) -> Iterator[Arrival]:
        """Count a request as on its way while entered, or until its `end`."""
        arrival = Arrival(self)
        self._since[arrival] = clock.now()
        try:
            yield arrival
        finally:
            arrival.end()

    @property
    def count(self) -> int:
        """Return how many requests are on their way."""
        return len(self._since)

    @property
    def newest_age_s(self) -> float | None:
        """Return the seconds since the newest of them came, or None if there is none."""
        newest = next(reversed(self._since.values()), None)
        if newest is None:
            return None
        return clock.now() - newest

    async def yield_to_loop(self) -> None:
        """Yield three times, so that requests whose bytes have arrived are counted."""
        # Socket, reader and handler each need one iteration of the loop. Without this, a burst of
        # ten was cut in two a quarter of the time.
        for _ in range(3):
            await asyncio.sleep(0)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until one of them ends, for at most `timeout_s`."""
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
    """Return the seconds that a queue needs to drain, between LEAST_RETRY_S and MOST_RETRY_S.

    `finished` of it were served in the last `seconds`. One more is counted as about to finish:
    the time of a new queue is short, and that of a stuck one grows.
    """
    drained_s = waiting * seconds / (finished + 1)
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, drained_s))


class Noun(StrEnum):
    """The bounded thing, as the error message names it."""

    REQUESTS = "requests"
    CHOICES = "choices"
    TOKENS = "tokens"


_GAUGES = {
    Noun.REQUESTS: metrics.QUEUE_DEPTH,
    Noun.CHOICES: metrics.QUEUE_CHOICES,
    Noun.TOKENS: metrics.QUEUE_TOKENS,
}


class Admission:
    """A bound on one thing that a model's requests hold, waiting and running, and the recent rate
    at which they release it. Requests beyond `limit` are refused, but one that is alone may hold
    any amount.
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

        `Retry-After` is the time the queue needs to drain, unless `retry_after_s` is given. A
        request that holds some already (`is_more`) leaves half of the limit to others.
        """
        held = self._held + amount
        is_greedy = is_more and 2 * held > self.limit
        if is_greedy or (self._held and held > self.limit):
            raise Overloaded(
                f"The model `{self._model}` has {self._held} {self._noun} waiting already.",
                retry_after_s=self.retry_after_s() if retry_after_s is None else retry_after_s,
            )
        if not self._held:  # time in which nothing was held does not count for the rate
            self.begin()
        self._held = held
        self._gauge.inc(amount)
        # The amount is released however the request ends, and counts for the rate.
        try:
            yield
        finally:
            self._release(amount)
            self._gauge.dec(amount)

    @property
    def limit(self) -> int:
        """Return how much may be held. A lower limit applies to new requests."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        if self._noun is Noun.TOKENS:
            metrics.of(metrics.QUEUE_TOKENS_LIMIT, self._model).set(limit)

    def begin(self) -> None:
        """Start measuring the rate, as nothing could be released until now."""
        self._since, self._finished = self._now(), 0.0

    def _release(self, amount: int) -> None:
        """Release `amount`. Older releases count by half and less."""
        self._held -= amount
        self._finished += amount
        age_s = self._now() - self._since
        if age_s > WINDOW_S:
            self._since += age_s / 2
            self._finished /= 2

    def retry_after_s(self) -> float:
        """Return the seconds until all that is held will be released, within bounds."""
        return retry_after_s(self._held, self._finished, self._now() - self._since)


@contextlib.asynccontextmanager
async def until_deadline(caller: Caller) -> AsyncIterator[None]:
    """Cancel the body at the caller's deadline and raise DeadlineExceeded."""
    limit = asyncio.timeout(caller.deadline - clock.now())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():  # another timeout, such as a disk's
            raise
        raise DeadlineExceeded(caller.allowed_s) from None


@contextlib.asynccontextmanager
async def time_load(caller: Caller) -> AsyncIterator[None]:
    """Time the body as loading, and cancel it at the caller's deadline."""
    started = clock.now()
    caller.timings.stage = Stage.LOAD
    try:
        async with until_deadline(caller):
            yield
    finally:
        caller.timings.add(Stage.LOAD, started)
