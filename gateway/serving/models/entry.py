"""A model in the cache and its state; and failed loads, which are not retried at once."""

import asyncio
from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from gateway import clock
from gateway.errors import (
    GatewayError,
    InsufficientMemory,
    ModelLoadFailed,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
)
from gateway.registry import ModelSpec
from gateway.serving.budget import Share

UNAVAILABLE_S = 30.0  # seconds until a new try: not every request should try a dead network
BROKEN_S = 5.0  # a shorter pause, as the file may be under repair
M = TypeVar("M")
T = TypeVar("T")


class Failures:
    """The last failure of each model."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[GatewayError, float]] = {}  # errors, each until a time

    def remember(self, model: str, error: GatewayError) -> None:
        """Keep an error of the model itself; a shutdown or a lack of room is not one."""
        match error:
            case ModelUnavailable() | ModelNotFound() | ModelRefused():
                seconds = UNAVAILABLE_S
            case ModelLoadFailed() | InsufficientMemory():
                seconds = BROKEN_S
            case _:
                return
        # The copy has no traceback, whose frames would hold the half-read model.
        self._errors[model] = (error.copy(), clock.now() + seconds)

    def forget(self, model: str) -> None:
        """Let a model's next load be tried at once."""
        self._errors.pop(model, None)

    def clear(self) -> None:
        self._errors.clear()

    def check(self, model: str) -> None:
        """Raise the error of this model's last load if it is recent."""
        error, until = self._errors.get(model, (None, 0.0))
        if error is not None and clock.now() < until:
            raise error.copy() from None

    def of(self, model: str) -> GatewayError | None:
        """Return the model's last failure, however long ago, if no load has succeeded since."""
        return self._errors.get(model, (None, 0.0))[0]

    def models(self) -> tuple[str, ...]:
        """Return the models whose last load failed."""
        return tuple(self._errors)


async def shared(task: asyncio.Task[T]) -> T:
    """Wait for a task that others wait for too: it goes on if one of them leaves."""
    try:
        return await asyncio.shield(task)
    except GatewayError as error:
        raise error.copy() from error


class State(Enum):
    """How a cached model treats its callers."""

    LOADING = "loading"  # it waits for its files, room or weights: callers wait
    READY = "ready"  # callers enter at once
    RETIRING = "retiring"  # unloaded by hand: its callers finish, new ones load a copy
    LEAVING = "leaving"  # it has no callers and is being freed
    GONE = "gone"  # its memory is freed


# A load may fail and a task be cancelled at any time, so every state may move to GONE.
MOVES: Final = MappingProxyType(
    {
        State.LOADING: {State.READY, State.RETIRING, State.LEAVING, State.GONE},
        State.READY: {State.RETIRING, State.LEAVING, State.GONE},
        State.RETIRING: {State.LEAVING, State.GONE},
        State.LEAVING: {State.GONE},
        State.GONE: set[State](),
    }
)


class Entry(Generic[M]):
    """A model from its first request until its memory is freed."""

    def __init__(self, spec: ModelSpec, base: "Entry[M] | None" = None) -> None:
        self.spec = spec
        # An adapter is a part of its base: freed before that is, and its callers lease both.
        self.base = base
        self.state = State.LOADING
        self.leases = 0  # callers that use it or wait for it: while there are any, it stays
        self.last_used = 0.0
        self.task: asyncio.Task[None] | None = None  # fetches, loads and frees it
        self.leaving = asyncio.Event()
        self._ttl: asyncio.TimerHandle | None = None

        # The progress of its load:
        self.needed_bytes: int | None = None  # known once its files are there
        # Done when its wait for room ends: with None if it leaves instead.
        self.admission: asyncio.Future[Share | None] | None = None
        self.share: Share | None = None  # held once it has room
        self.model: M | None = None
        self.adopt: Callable[[ModelSpec], None] = lambda _: None
        self.failure: GatewayError | None = None
        self.is_settled = asyncio.Event()  # the load has ended, well or not

    @property
    def is_open(self) -> bool:
        """Return True if new callers use it or wait for it."""
        return self.state in (State.LOADING, State.READY)

    @property
    def is_leaving(self) -> bool:
        """Return True if it is being freed, or has been."""
        return self.state in (State.LEAVING, State.GONE)

    @property
    def is_loaded(self) -> bool:
        """Return True if it is in memory and not being freed."""
        return self.model is not None and not self.is_leaving

    @property
    def waits_for_room(self) -> bool:
        return self.admission is not None and not self.admission.done()

    @property
    def nbytes(self) -> int:
        """Return the bytes it holds of the budget."""
        if self.share is None:
            return 0
        return self.share.nbytes

    def may_move_to(self, state: State) -> bool:
        return state in MOVES[self.state]

    def move_to(self, state: State) -> None:
        """Change the state. Raises AssertionError for a move that is not in MOVES."""
        assert self.may_move_to(state), f"{self.spec.id}: {self.state} → {state} is not legal"
        self.state = state
        if state is State.LEAVING:
            self.start_ttl(None)
            self.leaving.set()
            if self.admission is not None and not self.admission.done():
                self.admission.set_result(None)

    def enter(self) -> None:
        """Begin a lease."""
        self.leases += 1
        self.start_ttl(None)

    def leave(self) -> None:
        """End a lease."""
        self.leases -= 1
        self.last_used = clock.now()

    def settle(self, failure: GatewayError | None = None) -> None:
        """Wake the callers that wait for the load, which has ended."""
        self.failure = failure
        self.is_settled.set()

    def start_ttl(self, ttl_s: float | None) -> None:
        """Leave after `ttl_s` seconds without a lease; never if it is None."""
        if self._ttl is not None:
            self._ttl.cancel()
            self._ttl = None
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._ttl = loop.call_later(ttl_s, self.move_to, State.LEAVING)
