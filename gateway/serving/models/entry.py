"""A model in the cache and its state, and the failures of loads."""

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

UNAVAILABLE_S = 30.0  # seconds until a retry if the hub fails or lacks the model
BROKEN_S = 5.0  # seconds until a retry of a failed load
M = TypeVar("M")
T = TypeVar("T")


class Failures:
    """The errors of models whose last load failed, which are raised again for a while."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[GatewayError, float]] = {}

    def remember(self, model: str, error: GatewayError) -> None:
        """Remember an error that is due to the model, and ignore others, such as a shutdown."""
        match error:
            case ModelUnavailable() | ModelNotFound() | ModelRefused():
                seconds = UNAVAILABLE_S
            case ModelLoadFailed() | InsufficientMemory():
                seconds = BROKEN_S
            case _:
                return
        # The original error's traceback would keep a half-loaded model.
        self._errors[model] = (error.copy(), clock.now() + seconds)

    def forget(self, model: str) -> None:
        self._errors.pop(model, None)

    def clear(self) -> None:
        self._errors.clear()

    def check(self, model: str) -> None:
        error, until = self._errors.get(model, (None, 0.0))
        if error is not None and clock.now() < until:
            raise error.copy() from None

    def of(self, model: str) -> GatewayError | None:
        """Return the error of a model's last load, however old; None if that load succeeded."""
        return self._errors.get(model, (None, 0.0))[0]

    def models(self) -> tuple[str, ...]:
        return tuple(self._errors)


async def shared(task: asyncio.Task[T]) -> T:
    """Wait for a shared task, which goes on if a caller is cancelled."""
    try:
        return await asyncio.shield(task)
    except GatewayError as error:
        raise error.copy() from error


class State(Enum):
    """The state of a model in the cache."""

    LOADING = "loading"  # the model waits for files, room or weights
    READY = "ready"
    RETIRING = "retiring"  # the model is unloaded once its callers finish
    LEAVING = "leaving"  # the model is being freed
    GONE = "gone"


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
        # An adapter's base model is freed after the adapter.
        self.base = base
        self.state = State.LOADING
        self.leases = 0
        self.last_used = 0.0
        self.task: asyncio.Task[None] | None = None
        self.leaving = asyncio.Event()
        self._ttl: asyncio.TimerHandle | None = None

        self.needed_bytes: int | None = None  # known once the model's files are on disk
        # The model's share, once it has room, or None if the model leaves before.
        self.admission: asyncio.Future[Share | None] | None = None
        self.share: Share | None = None
        self.model: M | None = None
        self.adopt: Callable[[ModelSpec], None] = lambda _: None
        self.failure: GatewayError | None = None
        self.is_settled = asyncio.Event()  # set when the load has succeeded or failed

    @property
    def is_open(self) -> bool:
        """Return True if new callers may use the model or wait for it."""
        return self.state in (State.LOADING, State.READY)

    @property
    def is_leaving(self) -> bool:
        return self.state in (State.LEAVING, State.GONE)

    @property
    def is_loaded(self) -> bool:
        return self.model is not None and not self.is_leaving

    @property
    def waits_for_room(self) -> bool:
        return self.admission is not None and not self.admission.done()

    @property
    def nbytes(self) -> int:
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
        self.leases += 1
        self.start_ttl(None)

    def leave(self) -> None:
        self.leases -= 1
        self.last_used = clock.now()

    def settle(self, failure: GatewayError | None = None) -> None:
        self.failure = failure
        self.is_settled.set()

    def start_ttl(self, ttl_s: float | None) -> None:
        """Free the model after `ttl_s` seconds without a lease. None cancels the timer."""
        if self._ttl is not None:
            self._ttl.cancel()
            self._ttl = None
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._ttl = loop.call_later(ttl_s, self.move_to, State.LEAVING)
