"""Limits each model's queue, counts requests that are arriving, and enforces deadlines."""

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
        """Stop counting the request, unless that has been done."""
        self._arrivals._end(self)


class Arrivals:
    """Counts the requests that will soon be queued. A batcher may wait for them."""

    def __init__(self) -> None:
        self._since: dict[Arrival, float] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def expect(self) -> Iterator[Arrival]:
        """Count a request as arriving until the context exits or `Arrival.end` is called."""
        arrival = Arrival(self)
        self._since[arrival] = clock.now()
        try:
            yield arrival
        finally:
            arrival.end()

    @property
    def count(self) -> int:
        return len(self._since)

    @property
    def newest_age_s(self) -> float | None:
        """Return the seconds since the newest request arrived; None if none is arriving."""
        newest = next(reversed(self._since.values()), None)
        if newest is None:
            return None
        return clock.now() - newest

    async def yield_to_loop(self) -> None:
        """Yield to the event loop, so that requests already received are counted."""
        # Socket, reader and handler each need one iteration of the loop.
        for _ in range(3):
            await asyncio.sleep(0)

    async def wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _end(self, arrival: Arrival) -> None:
        if self._since.pop(arrival, None) is not None:
            self._changed.set()
            self._changed = asyncio.Event()


WINDOW_S: Final = 30.0
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 60.0
NO_BOUND: Final = 2**62


def retry_after_s(waiting: float, finished: float, seconds: float) -> float:
    """Estimate the seconds until `waiting` items are done, if `finished` items took `seconds`."""
    drained_s = waiting * seconds / (finished + 1)
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, drained_s))


class Noun(StrEnum):
    """The unit that an Admission counts."""

    REQUESTS = "requests"
    CHOICES = "choices"
    TOKENS = "tokens"


_GAUGES = {
    Noun.REQUESTS: metrics.QUEUE_DEPTH,
    Noun.CHOICES: metrics.QUEUE_CHOICES,
    Noun.TOKENS: metrics.QUEUE_TOKENS,
}


class Admission:
    """A bound on the units, such as tokens, that all requests of a model hold together.

    A request that would exceed `limit` is refused, unless other requests hold nothing.
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

        `is_more` means that the request already holds an amount. It gets more only if all requests
        together then hold at most half of the limit.
        """
        held = self._held + amount
        is_greedy = is_more and 2 * held > self.limit
        if is_greedy or (self._held and held > self.limit):
            raise Overloaded(
                f"The model `{self._model}` has {self._held} {self._noun} waiting already.",
                retry_after_s=self.retry_after_s() if retry_after_s is None else retry_after_s,
            )
        if not self._held:  # idle time would make `retry_after_s` too long
            self.begin()
        self._held = held
        self._gauge.inc(amount)
        try:
            yield
        finally:
            self._release(amount)
            self._gauge.dec(amount)

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        if self._noun is Noun.TOKENS:
            metrics.of(metrics.QUEUE_TOKENS_LIMIT, self._model).set(limit)

    def begin(self) -> None:
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
        return retry_after_s(self._held, self._finished, self._now() - self._since)


@contextlib.asynccontextmanager
async def until_deadline(caller: Caller) -> AsyncIterator[None]:
    """Cancel the body at the caller's deadline and raise DeadlineExceeded."""
    limit = asyncio.timeout(caller.deadline - clock.now())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():  # the body raised the TimeoutError for another reason
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
