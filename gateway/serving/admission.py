"""Who may wait for a model: so many requests and so many tokens, each until its deadline."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from gateway import metrics
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs import Caller, Stage

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
        self._limit = limit
        self._clock = clock
        self._finished = 0.0
        self._since = 0.0

    def has_room(self, amount: int) -> bool:
        """Tell whether so much more may be held; anything may alone."""
        return self.held == 0 or self.held + amount <= self._limit

    def hold(self, amount: int) -> None:
        """Hold so much more. Time in which nothing was held says nothing of how fast it goes."""
        if self.held == 0:
            self._since, self._finished = self._clock(), 0.0
        self.held += amount

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


class Place:
    """One request's place."""

    __slots__ = ("_admission", "tokens")

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self.tokens = 0

    def hold(self, tokens: int) -> None:
        """Count the request's tokens, now that they are known; raises Overloaded when those of
        others leave no room. One request alone may have any number.
        """
        self._admission._hold(tokens)
        self.tokens = tokens


class Admission:
    """Counts a model's requests and their tokens, waiting and running, and refuses those beyond
    `limit` requests or `max_tokens`.
    """

    def __init__(self, model: str, limit: int, max_tokens: int = NO_BOUND) -> None:
        self._model = model
        self._requests = Bounded(limit)
        self._tokens = Bounded(max_tokens)
        self._depth = metrics.of(metrics.QUEUE_DEPTH, model)
        self._depth_tokens = metrics.of(metrics.QUEUE_TOKENS, model)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[Place]:
        """Hold a place while entered; raises Overloaded where there is none."""
        if not self._requests.has_room(1):
            raise self._refusal(self._requests, "requests")
        place = Place(self)
        self._requests.hold(1)
        self._depth.inc()
        try:
            yield place
        finally:
            self._requests.let_go(1)
            self._depth.dec()
            self._tokens.let_go(place.tokens)
            self._depth_tokens.dec(place.tokens)

    def _hold(self, tokens: int) -> None:
        if not self._tokens.has_room(tokens):
            raise self._refusal(self._tokens, "tokens")
        self._tokens.hold(tokens)
        self._depth_tokens.inc(tokens)

    def _refusal(self, bounded: Bounded, noun: str) -> Overloaded:
        metrics.of(metrics.REJECTED, self._model).inc()
        return Overloaded(
            f"The model `{self._model}` has {bounded.held} {noun} waiting already.",
            retry_after_s=bounded.retry_after_s(),
        )


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
async def waiting_for(model: str, caller: Caller) -> AsyncIterator[None]:
    """Wait for a model to be loaded, inside, until the caller's deadline."""
    started = metrics.now()
    caller.timings.model, caller.timings.stage = model, Stage.LOAD
    try:
        async with until_deadline(caller):
            yield
    finally:
        caller.timings.add(Stage.LOAD, metrics.now() - started)
