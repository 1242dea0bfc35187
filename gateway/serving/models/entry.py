"""A model in the cache and its state; and failed loads, which are not retried at once."""

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from gateway import clock
from gateway.errors import GatewayError, InsufficientMemory, ModelLoadFailed, ModelUnavailable
from gateway.registry import ModelSpec
from gateway.serving.budget import Share

UNAVAILABLE_S = 30.0  # so that not every request tries a dead network
BROKEN_S = 5.0  # shorter, as the file may be under repair


class Failures:
    """The last failure of each model."""

    def __init__(self) -> None:
        self._errors: dict[str, GatewayError] = {}
        self._until: dict[str, float] = {}

    def remember(self, model: str, error: GatewayError) -> None:
        """Keep an error of the model itself; a shutdown or a lack of room is not one."""
        match error:
            case ModelUnavailable():
                seconds = UNAVAILABLE_S
            case ModelLoadFailed() | InsufficientMemory():
                seconds = BROKEN_S
            case _:
                return
        # Without its traceback, whose frames hold the half-read model.
        self._errors[model] = copy_error(error)
        self._until[model] = clock.now() + seconds

    def forget(self, model: str) -> None:
        """Forget a model's failure, so that its next load is tried at once."""
        self._errors.pop(model, None)

    def clear(self) -> None:
        """Forget every failure."""
        self._errors.clear()

    def check(self, model: str) -> None:
        """Raise the error of this model's last load if it is recent."""
        if (error := self._errors.get(model)) is not None and clock.now() < self._until[model]:
            raise copy_error(error) from None

    def of(self, model: str) -> GatewayError | None:
        """Return the model's last failure, however long ago, if no load has succeeded since."""
        return self._errors.get(model)

    def models(self) -> tuple[str, ...]:
        """Return the models whose last load failed."""
        return tuple(self._errors)


def copy_error(error: GatewayError) -> GatewayError:
    """Return a copy of an error: one raised many times would gather the frames of each."""
    copy = type(error).__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    return copy


M = TypeVar("M")


class State(Enum):
    """How a cached model treats its callers."""

    LOADING = "loading"  # it waits for its files, room or weights: callers wait
    READY = "ready"  # callers enter at once
    YIELDING = "yielding"  # in use, while another model waits for its room: new callers wait
    RETIRING = "retiring"  # unloaded by hand: its callers finish, new ones load a copy
    LEAVING = "leaving"  # it has no callers and is being freed
    GONE = "gone"  # its memory is freed


# A load may fail and a task be cancelled at any time, so every state may move to GONE.
MOVES: Final = MappingProxyType(
    {
        State.LOADING: {State.READY, State.RETIRING, State.LEAVING, State.GONE},
        State.READY: {State.YIELDING, State.RETIRING, State.LEAVING, State.GONE},
        State.YIELDING: {State.READY, State.RETIRING, State.LEAVING, State.GONE},
        State.RETIRING: {State.LEAVING, State.GONE},
        State.LEAVING: {State.GONE},
        State.GONE: set[State](),
    }
)


class Entry(Generic[M]):
    """A model from its first request until its memory is freed.

    `state` decides what its callers do. Its load has got as far as the fields show:
    `needed_bytes` once its files are there, `share` once it has room, `model` once it is loaded.
    An adapter is a part of `base`: it is freed before that is, and its callers lease both. One that
    has no `base` is being fetched, and leaves once its files are there.
    """

    def __init__(self, spec: ModelSpec, base: "Entry[M] | None" = None) -> None:
        self.spec = spec
        self.base = base
        self.state = State.LOADING
        self.model: M | None = None
        self.adopt: Callable[[ModelSpec], None] = lambda _: None
        self.leaving = asyncio.Event()
        self.leases = 0
        self.last_used = 0.0
        self.is_successor = False  # an older copy still has callers, or was evicted
        self.needed_bytes: int | None = None
        self.admission: asyncio.Future[None] | None = None  # done when its wait for room ends
        self.admitted_at = 0.0
        self.spared_until = 0.0
        self.yielding_since = 0.0
        self.share: Share | None = None
        self.task: asyncio.Task[None] | None = None  # fetches, loads and frees it
        self._waiting: list[asyncio.Future[bool]] = []
        self._ttl: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Return True if new callers use it or wait for it."""
        return self.state in (State.LOADING, State.READY, State.YIELDING)

    @property
    def is_leaving(self) -> bool:
        """Return True if it is being freed, or has been."""
        return self.state in (State.LEAVING, State.GONE)

    @property
    def is_loaded(self) -> bool:
        """Return True if it is in memory and not being freed."""
        return self.model is not None and not self.is_leaving

    @property
    def is_waiting(self) -> bool:
        """Return True if it waits for room."""
        return self.needed_bytes is not None and self.share is None

    @property
    def waits_for_others(self) -> bool:
        """Return True if its callers wait for other models."""
        return self.is_waiting or self.state is State.YIELDING

    @property
    def nbytes(self) -> int:
        """Return the bytes it holds of the budget."""
        return 0 if self.share is None else self.share.nbytes

    @property
    def waiting_callers(self) -> int:
        """Return the number of callers that wait for it."""
        return sum(not each.done() for each in self._waiting)

    def may_move_to(self, state: State) -> bool:
        """Return True if this move is in MOVES."""
        return state in MOVES[self.state]

    def move_to(self, state: State) -> None:
        """Change the state. In READY, waiting callers enter; if it leaves, or retires after it
        yielded, they try another copy.

        Raises AssertionError for a move that is not in MOVES.
        """
        assert self.may_move_to(state), f"{self.spec.id}: {self.state} → {state} is not legal"
        before, self.state = self.state, state
        if state is State.LEAVING:
            self.start_ttl(None)
            self.leaving.set()
        if state is State.READY:
            self.admit_waiting()
        elif state is State.LEAVING or (state is State.RETIRING and before is State.YIELDING):
            self._settle(lambda each: each.set_result(False))

    def enter(self) -> None:
        """Begin a lease."""
        self.leases += 1
        self.start_ttl(None)

    def leave(self) -> None:
        """End a lease."""
        self.leases -= 1
        self.last_used = clock.now()

    def wait(self) -> asyncio.Future[bool]:
        """Return a future: True once the caller has a lease, False if it must try another entry.

        A failed load is its exception. A caller that stops waiting must pass it to `give_up`.
        """
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return waiting

    def give_up(self, waiting: asyncio.Future[bool]) -> None:
        """Stop waiting, and end the lease if it was granted at the same moment."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiting)
        if not waiting.done():
            waiting.cancel()
        elif not waiting.cancelled() and waiting.exception() is None and waiting.result():
            self.leave()

    def admit_waiting(self) -> None:
        """Begin the leases of all waiting callers at once, so that the next plan counts them."""

        def admit(waiting: asyncio.Future[bool]) -> None:
            self.enter()
            waiting.set_result(True)

        self._settle(admit)

    def refuse(self, error: GatewayError) -> None:
        """Raise a copy of the error in each waiting caller."""
        self._settle(lambda each: each.set_exception(copy_error(error)))

    def _settle(self, settle: Callable[[asyncio.Future[bool]], None]) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                settle(each)

    def start_ttl(self, ttl_s: float | None) -> None:
        """Leave after `ttl_s` seconds without a lease; never if it is None."""
        if self._ttl is not None:
            self._ttl.cancel()
            self._ttl = None
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._ttl = loop.call_later(ttl_s, self.move_to, State.LEAVING)
