"""A model in the cache and its state; and loads that failed, which are not tried again at once."""

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from gateway import metrics
from gateway.errors import GatewayError, InsufficientMemory, ModelLoadFailed, ModelUnavailable
from gateway.registry import ModelSpec
from gateway.serving.budget import Share

UNAVAILABLE_S = 30.0  # a dead network is not asked again by every request
BROKEN_S = 5.0  # nor a broken file read, which somebody may be mending


class Failures:
    """The last failure of each model."""

    def __init__(self) -> None:
        self._errors: dict[str, GatewayError] = {}
        self._until: dict[str, float] = {}

    def remember(self, model: str, error: GatewayError) -> None:
        """Keep a failure of a model itself; one of the moment, shutdown or no room, is let pass."""
        match error:
            case ModelUnavailable():
                seconds = UNAVAILABLE_S
            case ModelLoadFailed() | InsufficientMemory():
                seconds = BROKEN_S
            case _:
                return
        # A traceback's frames hold what was read of the model: only the facts are kept.
        self._errors[model] = fresh(error)
        self._until[model] = metrics.now() + seconds

    def forget(self, model: str) -> None:
        """Know nothing of a model any more: it is loaded, or to be tried afresh."""
        self._errors.pop(model, None)

    def clear(self) -> None:
        """Know nothing of any model."""
        self._errors.clear()

    def check(self, model: str) -> None:
        """Raise what a recent load of this model raised."""
        if (error := self._errors.get(model)) is not None and metrics.now() < self._until[model]:
            raise fresh(error) from None

    def of(self, model: str) -> GatewayError | None:
        """Give the model's last failure, however long ago, if no load succeeded since."""
        return self._errors.get(model)

    def models(self) -> tuple[str, ...]:
        """List the models whose last load failed."""
        return tuple(self._errors)


def fresh(error: GatewayError) -> GatewayError:
    """Copy an error that many are told: one object would gather the frames of every raise."""
    copy = type(error).__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    return copy


M = TypeVar("M")


class State(Enum):
    """What a model is to its callers."""

    LOADING = "loading"  # its files, its room, its weights: they wait
    READY = "ready"  # they are let in
    YIELDING = "yielding"  # in use, and another waits for its room: they wait
    RETIRING = "retiring"  # unloaded by hand: those inside finish, others load it anew
    LEAVING = "leaving"  # nobody is inside: it is being freed
    GONE = "gone"


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
    """A model from the moment it is asked for to the moment its memory is back."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.state = State.LOADING
        self.model: M | None = None
        self.adopt: Callable[[ModelSpec], None] = lambda _: None
        self.left = asyncio.Event()
        self.leases = 0
        self.last_used = 0.0
        self.is_successor = False  # of one that has its callers still, or was made to leave them
        self.needed_bytes: int | None = None
        self.admitted: asyncio.Future[None] | None = None  # by the room
        self.resumed = 0.0  # when it stopped waiting for room
        self.spared_until = 0.0
        self.yielding_since = 0.0
        self.share: Share | None = None
        self.keeper: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[bool]] = []
        self._rest: asyncio.TimerHandle | None = None

    @property
    def is_loaded(self) -> bool:
        """Return True if there is a model to use."""
        return self.model is not None and self.state not in (State.LEAVING, State.GONE)

    @property
    def is_waiting(self) -> bool:
        """Return True if it is known what it needs, and not yet given."""
        return self.needed_bytes is not None and self.share is None

    @property
    def waits_for_others(self) -> bool:
        """Return True if its callers wait for what other models do."""
        return self.is_waiting or self.state is State.YIELDING

    @property
    def nbytes(self) -> int:
        """Count what it holds of the budget."""
        return 0 if self.share is None else self.share.nbytes

    @property
    def asked(self) -> int:
        """Count the callers that wait for it."""
        return sum(not each.done() for each in self._waiting)

    def move(self, state: State) -> None:
        """Be in another state; callers that cannot have it in this one look for another."""
        assert state in MOVES[self.state], f"{self.spec.id}: {self.state} → {state}"
        was, self.state = self.state, state
        if state is State.LEAVING:
            self.rest(None)
            self.left.set()
        if state is State.READY:
            self.let_in()
        elif state is State.LEAVING or (state is State.RETIRING and was is State.YIELDING):
            self._settle(lambda each: each.set_result(False))

    def enter(self) -> None:
        """Begin a lease."""
        self.leases += 1
        self.rest(None)

    def leave(self) -> None:
        """End a lease."""
        self.leases -= 1
        self.last_used = metrics.now()

    def wait(self) -> asyncio.Future[bool]:
        """Return what becomes True with a lease, or False when another entry is to be asked.

        It fails as the load does. Whoever stops waiting says so to `give_up`.
        """
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return waiting

    def give_up(self, waiting: asyncio.Future[bool]) -> None:
        """Wait no longer, nor hold the lease that came at this very moment."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiting)
        if not waiting.done():
            waiting.cancel()
        elif not waiting.cancelled() and waiting.exception() is None and waiting.result():
            self.leave()

    def let_in(self) -> None:
        """Begin the leases of all who wait, now: whatever is decided next counts them."""

        def one(waiting: asyncio.Future[bool]) -> None:
            self.enter()
            waiting.set_result(True)

        self._settle(one)

    def refuse(self, error: GatewayError) -> None:
        """Fail those who wait, each with an error of its own."""
        self._settle(lambda each: each.set_exception(fresh(error)))

    def _settle(self, settle: Callable[[asyncio.Future[bool]], None]) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                settle(each)

    def rest(self, ttl_s: float | None) -> None:
        """Leave after so long a time without a lease; None is never."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._rest = loop.call_later(ttl_s, self.move, State.LEAVING)
