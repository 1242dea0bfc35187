"""Who may wait for a model: so many requests and so many tokens, each until its deadline.

And who is on the way: requests being read or tokenised, so that a burst can be waited for.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from enum import StrEnum
from typing import Final

from gateway import metrics
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs import Caller, Stage


class Arrival:
    """One request on its way, until it waits in a queue, or is answered without."""

    def __init__(self, arrivals: "Arrivals") -> None:
        self._arrivals = arrivals

    def over(self) -> None:
        """Note that it has arrived, or never will. The second call does nothing."""
        self._arrivals._over(self)


class Arrivals:
    """Those on their way, in the order they came."""

    def __init__(self) -> None:
        self._since: dict[Arrival, float] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def expected(self) -> Iterator[Arrival]:
        """Announce a request while entered, unless it is over sooner."""
        arrival = Arrival(self)
        self._since[arrival] = metrics.now()
        try:
            yield arrival
        finally:
            arrival.over()

    @property
    def count(self) -> int:
        """Count those on their way."""
        return len(self._since)

    @property
    def newest_age_s(self) -> float | None:
        """Tell how long ago the newest of them came; None when there is none."""
        newest = next(reversed(self._since.values()), None)
        return None if newest is None else metrics.now() - newest

    async def looked(self) -> None:
        """Let those be counted whose bytes are here already, unread: a socket, its reader and the
        request take a round of the loop each. A burst of ten was cut in two a quarter of the time.
        """
        for _ in range(3):
            await asyncio.sleep(0)

    async def changed(self, timeout_s: float) -> None:
        """Wait until another one is over, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _over(self, arrival: Arrival) -> None:
        if self._since.pop(arrival, None) is not None:
            self._changed.set()
            self._changed = asyncio.Event()  # for the next change


WINDOW_S: Final = 30.0
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 60.0
NO_BOUND: Final = 2**62


def retry_after_s(waiting: float, finished: float, seconds: float) -> float:
    """Tell a caller who is refused when to come back: when what waits will have been served.

    `finished` of it were, in the last `seconds`. One more is taken to be about to finish: so a
    queue of which nothing is known yet says soon, and one that nothing leaves says ever later.
    """
    drained_s = waiting * seconds / (finished + 1)
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, drained_s))


class Bounded:
    """How much is held of what is bounded, and how fast it has been let go of late."""

    def __init__(self, limit: int, clock: Callable[[], float] = metrics.now) -> None:
        self.held = 0
        self.limit = limit
        self._clock = clock
        self._finished = 0.0
        self._since = 0.0

    def has_room(self, amount: int) -> bool:
        """Tell whether so much more may be held; anything may alone."""
        return self.held == 0 or self.held + amount <= self.limit

    def hold(self, amount: int) -> None:
        """Hold so much more. Time in which nothing was held says nothing of how fast it goes."""
        if self.held == 0:
            self.begin()
        self.held += amount

    def begin(self) -> None:
        """Measure from now on."""
        self._since, self._finished = self._clock(), 0.0

    def let_go(self, amount: int) -> None:
        """Let go of so much; what went long ago is forgotten by halves."""
        self.held -= amount
        self._finished += amount
        if (age_s := self._clock() - self._since) > WINDOW_S:
            self._since += age_s / 2
            self._finished /= 2

    def retry_after_s(self) -> float:
        """Tell how long all that is held will take to go, in seconds, within bounds."""
        return retry_after_s(self.held, self._finished, self._clock() - self._since)


class Noun(StrEnum):
    """What is bounded: it is told so to who is refused."""

    REQUESTS = "requests"
    CHOICES = "choices"
    TOKENS = "tokens"


_GAUGES = {
    Noun.REQUESTS: metrics.QUEUE_DEPTH,
    Noun.CHOICES: metrics.QUEUE_CHOICES,
    Noun.TOKENS: metrics.QUEUE_TOKENS,
}


class Admission:
    """Counts what a model's requests hold of one thing, waiting and running, and refuses those
    beyond `limit` of it. A request that is alone may hold any amount.
    """

    def __init__(self, model: str, noun: Noun, limit: int) -> None:
        self._model = model
        self._noun = noun
        self._bounded = Bounded(limit)
        self._gauge = metrics.of(_GAUGES[noun], model)

    @contextlib.contextmanager
    def admitted(
        self, amount: int = 1, retry_after_s: float | None = None, *, is_more: bool = False
    ) -> Iterator[None]:
        """Hold so much while entered; raises Overloaded where there is no room.

        Who is refused is to come back when all that is held will have gone, or in
        `retry_after_s`. A request that holds some already and wants more leaves others half.
        """
        bounded = self._bounded
        is_greedy = is_more and 2 * (bounded.held + amount) > bounded.limit
        if is_greedy or not bounded.has_room(amount):
            if retry_after_s is None:
                retry_after_s = bounded.retry_after_s()
            raise Overloaded(
                f"The model `{self._model}` has {bounded.held} {self._noun} waiting already.",
                retry_after_s=retry_after_s,
            )
        bounded.hold(amount)
        self._gauge.inc(amount)
        try:
            yield
        finally:
            bounded.let_go(amount)
            self._gauge.dec(amount)

    @property
    def limit(self) -> int:
        """Return how much may be held. A lower one holds for those to come."""
        return self._bounded.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._bounded.limit = limit

    def begin(self) -> None:
        """Measure how fast they go from now on: until now they could not."""
        self._bounded.begin()


@contextlib.asynccontextmanager
async def until_deadline(caller: Caller) -> AsyncIterator[None]:
    """End what is inside at the caller's deadline; raises DeadlineExceeded then."""
    limit = asyncio.timeout(caller.deadline - metrics.now())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():  # another's, a disk's say
            raise
        raise DeadlineExceeded(caller.allowed_s) from None


@contextlib.asynccontextmanager
async def waiting_for_load(caller: Caller) -> AsyncIterator[None]:
    """Wait for a model to be loaded, inside, until the caller's deadline."""
    started = metrics.now()
    caller.timings.stage = Stage.LOAD
    try:
        async with until_deadline(caller):
            yield
    finally:
        caller.timings.add(Stage.LOAD, metrics.now() - started)
