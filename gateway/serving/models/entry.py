"""A model in the cache and its state. Remembers failed loads, so that none is retried at once."""

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

UNAVAILABLE_S = 30.0  # seconds until a retry: not every request should wait for a dead network
BROKEN_S = 5.0  # seconds until a retry of invalid files, which somebody may be repairing
M = TypeVar("M")
T = TypeVar("T")


class Failures:
    """The errors of models whose last load failed. For a time each error is raised again, instead
    of another try.
    """

    def __init__(self) -> None:
        self._errors: dict[str, tuple[GatewayError, float]] = {}

    def remember(self, model: str, error: GatewayError) -> None:
        """Remember an error that is due to the model. Other errors, such as a shutdown, are
        ignored.
        """
        match error:
            case ModelUnavailable() | ModelNotFound() | ModelRefused():
                seconds = UNAVAILABLE_S
            case ModelLoadFailed() | InsufficientMemory():
                seconds = BROKEN_S
            case _:
                return
        # A copy, because the frames of the error's traceback would keep a half-loaded model.
        self._errors[model] = (error.copy(), clock.now() + seconds)

    def forget(self, model: str) -> None:
        """Forget a model's failure, so that its next load is tried at once."""
        self._errors.pop(model, None)

    def clear(self) -> None:
        self._errors.clear()

    def check(self, model: str) -> None:
        """Raise the error of a model's last load if that failed recently."""
        error, until = self._errors.get(model, (None, 0.0))
        if error is not None and clock.now() < until:
            raise error.copy() from None

    def of(self, model: str) -> GatewayError | None:
        """Return the error of a model's last load, however old; None if that load succeeded."""
        return self._errors.get(model, (None, 0.0))[0]

    def models(self) -> tuple[str, ...]:
        """Return the models whose last load failed."""
        return tuple(self._errors)


async def shared(task: asyncio.Task[T]) -> T:
    """Wait for a task that several callers share. Cancelling a caller doesn't cancel the task."""
    try:
        return await asyncio.shield(task)
    except GatewayError as error:
        raise error.copy() from error


class State(Enum):
    """The state of a model in the cache."""

    LOADING = "loading"  # the model's files, room or weights are awaited, and callers wait
    READY = "ready"  # callers can use the model at once
    RETIRING = "retiring"  # unloaded on request: present callers finish, new ones load it anew
    LEAVING = "leaving"  # the model has no callers and is being freed
    GONE = "gone"  # the model's memory is freed


# The legal changes of state. Every state may change to GONE, since at any time a load may fail or a
# task may be cancelled.
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
        # For an adapter, the entry of its base model, which is freed after the adapter. Callers of
        # an adapter lease both.
        self.base = base
        self.state = State.LOADING
        self.leases = 0  # how many callers use or wait for the model, and so keep it in the cache
        self.last_used = 0.0
        self.task: asyncio.Task[None] | None = None  # fetches, loads and frees the model
        self.leaving = asyncio.Event()
        self._ttl: asyncio.TimerHandle | None = None

        # The progress of the model's load:
        self.needed_bytes: int | None = None  # known once the model's files are on disk
        # Done when the wait for room ends: with a share or, if the model leaves instead, with None.
        self.admission: asyncio.Future[Share | None] | None = None
        self.share: Share | None = None  # set once the model has room
        self.model: M | None = None
        self.adopt: Callable[[ModelSpec], None] = lambda _: None
        self.failure: GatewayError | None = None
        self.is_settled = asyncio.Event()  # set when the load has ended, successfully or not

    @property
    def is_open(self) -> bool:
        """Return True if new callers may use this entry or wait for its load."""
        return self.state in (State.LOADING, State.READY)

    @property
    def is_leaving(self) -> bool:
        """Return True if the model is being freed or has been freed."""
        return self.state in (State.LEAVING, State.GONE)

    @property
    def is_loaded(self) -> bool:
        """Return True if the model is in memory and is not being freed."""
        return self.model is not None and not self.is_leaving

    @property
    def waits_for_room(self) -> bool:
        return self.admission is not None and not self.admission.done()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the budget that the model holds."""
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
        """Wake the callers that wait for the load. `failure` is the load's error, if it failed."""
        self.failure = failure
        self.is_settled.set()

    def start_ttl(self, ttl_s: float | None) -> None:
        """Free the model after `ttl_s` seconds unless it gets a lease. None cancels the timer."""
        if self._ttl is not None:
            self._ttl.cancel()
            self._ttl = None
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._ttl = loop.call_later(ttl_s, self.move_to, State.LEAVING)
