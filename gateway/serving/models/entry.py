"""A model in the cache and its state; and loads that failed, which are not tried again at once."""

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

UNAVAILABLE_S = 30.0  # so that not every request tries a dead network again
BROKEN_S = 5.0  # shorter, as somebody may be repairing the file


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
        # Without its traceback, whose frames hold what was read of the model.
        self._errors[model] = fresh(error)
        self._until[model] = clock.now() + seconds

    def forget(self, model: str) -> None:
        """Forget a model's failure: it is loaded, or is to be tried again."""
        self._errors.pop(model, None)

    def clear(self) -> None:
        """Forget every failure."""
        self._errors.clear()

    def check(self, model: str) -> None:
        """Raise the error of this model's last load, if it was recent."""
        if (error := self._errors.get(model)) is not None and clock.now() < self._until[model]:
            raise fresh(error) from None

    def of(self, model: str) -> GatewayError | None:
        """Return the model's last failure, however long ago, if no load has succeeded since."""
        return self._errors.get(model)

    def models(self) -> tuple[str, ...]:
        """Return the models whose last load failed."""
        return tuple(self._errors)


def fresh(error: GatewayError) -> GatewayError:
    """Return a copy of an error raised more than once: one object would gather every frame."""
    copy = type(error).__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    return copy


M = TypeVar("M")


class State(Enum):
    """What a cached model does with its callers."""

    LOADING = "loading"  # its files, room or weights are not there yet: callers wait
    READY = "ready"  # callers enter at once
    YIELDING = "yielding"  # in use, and another model waits for its room: new callers wait
    RETIRING = "retiring"  # unloaded by hand: those inside finish, new callers load a copy
    LEAVING = "leaving"  # without callers: it is being freed
    GONE = "gone"  # its memory is back


# A load may fail and a keeper be cancelled at any time, so every state has its way to GONE.
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
    """A model from the moment it is asked for to the moment its memory is back.

    `state` says what happens to its callers. How far its load has come follows from what it has:
    `needed_bytes` once its files are there, `share` once it has its room, `model` once it is
    loaded.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.state = State.LOADING
        self.model: M | None = None
        self.adopt: Callable[[ModelSpec], None] = lambda _: None
        self.left = asyncio.Event()
        self.leases = 0
        self.last_used = 0.0
        self.is_successor = False  # an older copy has callers still, or was evicted from them
        self.needed_bytes: int | None = None
        self.admitted: asyncio.Future[None] | None = None  # by the room
        self.resumed = 0.0  # when it stopped waiting for room
        self.spared_until = 0.0
        self.yielding_since = 0.0
        self.share: Share | None = None
        self.keeper: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[bool]] = []
        self._ttl: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Return True if new callers use it, or wait for it."""
        return self.state in (State.LOADING, State.READY, State.YIELDING)

    @property
    def is_leaving(self) -> bool:
        """Return True if it is being freed, or has been."""
        return self.state in (State.LEAVING, State.GONE)

    @property
    def is_loaded(self) -> bool:
        """Return True if there is a model to use."""
        return self.model is not None and not self.is_leaving

    @property
    def is_waiting(self) -> bool:
        """Return True if it waits for room: its size is known, and it has no share."""
        return self.needed_bytes is not None and self.share is None

    @property
    def waits_for_others(self) -> bool:
        """Return True if its callers wait for what other models do."""
        return self.is_waiting or self.state is State.YIELDING

    @property
    def nbytes(self) -> int:
        """Return the bytes of the budget that it holds."""
        return 0 if self.share is None else self.share.nbytes

    @property
    def asked(self) -> int:
        """Return how many callers wait for it."""
        return sum(not each.done() for each in self._waiting)

    def may(self, state: State) -> bool:
        """Return True if the state can follow the present one."""
        return state in MOVES[self.state]

    def to(self, state: State) -> None:
        """Change the state, and settle the callers that wait.

        In READY they enter. When it leaves, or retires having yielded, they look for another copy.
        Raises AssertionError for a move that is not in MOVES.
        """
        assert self.may(state), f"{self.spec.id}: {self.state} → {state} is not a legal move"
        was, self.state = self.state, state
        if state is State.LEAVING:
            self.start_ttl(None)
            self.left.set()
        if state is State.READY:
            self.let_in()
        elif state is State.LEAVING or (state is State.RETIRING and was is State.YIELDING):
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
        """Return a future: True once it holds a lease, False if another entry must be asked.

        It fails as the load does. A caller that stops waiting must hand it to `give_up`.
        """
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return waiting

    def give_up(self, waiting: asyncio.Future[bool]) -> None:
        """Stop waiting, and end the lease if it was granted at this very moment."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiting)
        if not waiting.done():
            waiting.cancel()
        elif not waiting.cancelled() and waiting.exception() is None and waiting.result():
            self.leave()

    def let_in(self) -> None:
        """Begin the leases of all waiting callers now, so that the next decision counts them."""

        def one(waiting: asyncio.Future[bool]) -> None:
            self.enter()
            waiting.set_result(True)

        self._settle(one)

    def refuse(self, error: GatewayError) -> None:
        """Fail the waiting callers, each with its own copy of the error."""
        self._settle(lambda each: each.set_exception(fresh(error)))

    def _settle(self, settle: Callable[[asyncio.Future[bool]], None]) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                settle(each)

    def start_ttl(self, ttl_s: float | None) -> None:
        """Leave after `ttl_s` seconds without a lease, or, if None, never."""
        if self._ttl is not None:
            self._ttl.cancel()
            self._ttl = None
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._ttl = loop.call_later(ttl_s, self.to, State.LEAVING)
