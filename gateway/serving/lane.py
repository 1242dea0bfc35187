"""The one global MLX lock, with a fair queue of turns, and the one thread that runs MLX.

MLX is not thread-safe, and an array that was left unevaluated on one thread cannot be evaluated on
another. So everything that uses MLX, even to load or free a model, runs on this thread. `Pace`
bounds the tokens of a pass, so that a turn takes limited time.
"""

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Hashable,
    Iterable,
    Mapping,
)
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple

from gateway import clock, logs, metrics
from gateway.errors import ShuttingDown, Unavailable
from gateway.panics import as_exception
from gateway.serving.faults import DeviceHealth


class FairQueue:
    """Start-time fair queuing over kinds of work (Goyal, Vin and Cheng, 1996).

    Each kind has a clock, which a turn advances by its seconds divided by the kind's weight. The
    kind whose clock is furthest behind is next. A kind that was idle starts at the clock of the
    kind that has the current turn, so idle time earns no credit. Kinds that always wait get time in
    proportion to their weights, and wait for at most one turn of each other kind.

    `most_s` has the most seconds that count of one turn, for some kinds. Turns of all other kinds
    count in full.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        most_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._weights = weights
        self._most_s = most_s
        self._clocks: dict[str, float] = {}
        self._now = 0.0

    def choose(self, waiting: Iterable[str]) -> int:
        """Return the index of the kind that is next; among equals, the first in the list."""
        starts = [self._start(kind) for kind in waiting]
        return starts.index(min(starts))

    def begin(self, kind: str) -> None:
        """Start a turn of this kind."""
        self._now = self._clocks[kind] = self._start(kind)

    def end(self, kind: str, seconds: float) -> None:
        """End the current turn, which took `seconds`."""
        self._clocks[kind] = self._after(kind, seconds)

    def is_up(self, kind: str, seconds: float, waiting: Iterable[str]) -> bool:
        """Return True if the current turn should end, `seconds` after it began.

        It should end if a turn of the same kind waits, or if the clock of another waiting kind is
        not ahead of the current kind's.
        """
        current = self._after(kind, seconds)
        return any(other == kind or self._start(other) <= current for other in waiting)

    def _start(self, kind: str) -> float:
        return max(self._now, self._clocks.get(kind, 0.0))

    def _after(self, kind: str, seconds: float) -> float:
        seconds = min(seconds, self._most_s.get(kind, seconds))
        return self._now + seconds / self._weights.get(kind, 1.0)


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
log = logs.get("lane")

LOAD = "load"  # the kind of turns that load models, whose calls may take long
# The most seconds that count of one turn of a load: a slow disk must not delay the next load for
# minutes.
MOST_LOAD_S = 1.0


@dataclass(slots=True, eq=False)
class Beat:
    """A heartbeat: the current work of the lane's thread.

    Each call, and each step of a call, makes a new Beat. While the Beat stays the same object, the
    thread has made no progress.
    """

    kind: str
    # The longest time of earlier calls with this shape. None if it is unknown: for a load, and for
    # the first call with a shape, which compiles.
    usual_s: float | None = 0.0
    shape: Hashable = None
    owner: str = ""


class _Work:
    """A call for the lane's thread, with a future that is done once the call has ended.

    The future does not hold the call's result, so that a result which nobody takes can be freed on
    the lane's thread.
    """

    __slots__ = ("args", "beat", "done", "function", "loop", "result")

    def __init__(self, beat: Beat, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.beat = beat
        self.function = function
        self.args = args
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.result: Any = None

    def do(self, health: DeviceHealth) -> None:
        """Call the function on the current thread, which must be the lane's, and complete the
        future on its event loop.
        """
        try:
            self.result = self.function(*self.args)
        except BaseException as error:  # `as_exception` raises errors that must end the thread
            self.fail(health.see(as_exception(error)))
        else:
            self._settle(self.done.set_result, None)

    def fail(self, error: Exception) -> None:
        """Raise an error in the waiting caller."""
        self._settle(self.done.set_exception, error)

    def take(self) -> Any:
        """Return the result, and keep no reference to it."""
        result, self.result = self.result, None
        return result

    def drop(self) -> None:
        """Free the result on the calling thread."""
        self.result = None

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        def settle_once() -> None:
            if not self.done.done():
                settle(outcome)

        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
            self.loop.call_soon_threadsafe(settle_once)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A task that waits for the lane, with a future that is done once the task holds the lane."""

    kind: str
    owner: str
    gained: asyncio.Future[None]


class Lane:
    """The global MLX lock and the thread that runs MLX. A context manager: the thread runs from
    enter to exit.

    `weights` (default 1) divide the lane's time between kinds of work that wait. Within a kind,
    turns are first come, first served. The thread calls `on_close` before it ends, because MLX on
    CPU otherwise aborts the process. `health` sees every error that a call raises.
    """

    def __init__(
        self,
        on_close: Callable[[], None] = lambda: None,
        *,
        weights: Mapping[str, float] = MappingProxyType({}),
        health: DeviceHealth | None = None,
    ) -> None:
        self._on_close = on_close
        self.health = health or DeviceHealth()
        self._fair_queue = FairQueue(weights, {LOAD: MOST_LOAD_S})
        self._waiters: list[_Waiter] = []
        self._is_held = False
        # The time at which a turn of each kind and owner last ended.
        self._ended_at: dict[tuple[str, str], float] = {}
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name="lane", daemon=True)
        self._is_open = False
        self._has_ended = asyncio.Event()
        self._usual_s: dict[Hashable, float] = {}  # longest calls by shape; cleared by every load
        # The owner of unfinished work on the device, and a function that waits for that work.
        self._under_way: tuple[str, Callable[[], None]] | None = None
        self.beat: Beat | None = None  # written only by the thread; None while it has no work
        self.has_died = False

    @property
    def is_alive(self) -> bool:
        """Return True if the thread can run calls."""
        return self._is_open and not self.has_died

    @property
    def is_idle(self) -> bool:
        """Return True if nobody holds the lane."""
        return not self._is_held

    @contextlib.asynccontextmanager
    async def turn(self, kind: str, owner: str = "") -> AsyncIterator["Turn"]:
        """Wait for the lane, then hold it while entered.

        `kind` names the work for weights and metrics, and `owner` the model or task that does it.
        """
        self._check()
        requested = clock.now()
        await self._acquire(kind, owner)
        gained = clock.now()
        try:
            self._check()
            yield Turn(self, kind, owner, gained, gained - requested)
        finally:
            ended = self._ended_at[kind, owner] = clock.now()
            seconds = ended - gained
            self._fair_queue.end(kind, seconds)
            self._release()
            metrics.of(metrics.LANE_WAIT, kind).observe(gained - requested)
            metrics.of(metrics.LANE_HOLD, kind).observe(seconds)
            metrics.of(metrics.LANE_SECONDS, kind).inc(seconds)

    async def _acquire(self, kind: str, owner: str = "") -> None:
        if not self._is_held:
            self._is_held = True
            self._fair_queue.begin(kind)
            return
        waiter = _Waiter(kind, owner, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.gained
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.gained.cancelled():
                self._release()  # the task was given the lane just before it was cancelled
            raise

    def _release(self) -> None:
        """Pass the lane to the next waiter, or mark it free."""
        # A cancelled waiter stays in the list until its task runs, so it is removed here.
        self._waiters = [waiter for waiter in self._waiters if not waiter.gained.done()]
        if not self._waiters:
            self._is_held = False
            return
        chosen = self._waiters.pop(self._fair_queue.choose(waiter.kind for waiter in self._waiters))
        self._fair_queue.begin(chosen.kind)
        chosen.gained.set_result(None)

    def _is_up(self, kind: str, seconds: float) -> bool:
        # The list is copied, since the event loop's thread may change it meanwhile.
        return self._fair_queue.is_up(
            kind, seconds, [waiter.kind for waiter in tuple(self._waiters)]
        )

    async def _run(self, beat: Beat, function: Callable[..., Any], *args: Any) -> Any:
        self._check()
        work = _Work(beat, function, args)
        queued = clock.now()
        self._work.put(work)
        try:
            await asyncio.shield(work.done)
        except asyncio.CancelledError:
            # The call cannot be stopped: keep the turn until it has ended, however often this task
            # is cancelled. Its result, which may be a loaded engine, is freed on the lane's thread.
            while not work.done.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work.done])
            if not work.done.cancelled():
                work.done.exception()  # retrieved, so that asyncio does not log it
            self._work.put(_Work(beat, work.drop, ()))
            raise
        self._record(beat.shape, clock.now() - queued)
        return work.take()

    def _record(self, shape: Hashable, seconds: float) -> None:
        if shape is not None:
            self._usual_s[shape] = max(seconds, self._usual_s.get(shape, 0.0))

    def _check(self) -> None:
        if not self.is_alive:
            if self.has_died:
                raise Unavailable("The engine has stopped.", retry_after_s=1)
            raise ShuttingDown

    def _run_thread(self) -> None:
        while (work := self._work.get()) is not None:
            self.beat = work.beat
            try:
                self._settle(work.beat.owner)
                work.do(self.health)
            except BaseException:  # such as SystemExit, which ends a thread
                self.has_died = True  # set before the waiting caller can queue another call
                log.critical("lane_died", kind=work.beat.kind, exc_info=True)
                work.fail(Unavailable("The engine has stopped.", retry_after_s=1))
                break
            self.beat = None
            del work  # the call's result may hold arrays, which this thread should not keep
        self.beat = Beat("close")
        try:
            self._on_close()
        finally:
            self.beat = None
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                self._loop.call_soon_threadsafe(self._has_ended.set)

    def _settle(self, owner: str) -> None:
        """Wait for unfinished work that another owner has left on the device. If the work fails,
        MLX raises the error only once, at the first wait, which must not be in this owner's call.
        """
        if self._under_way is not None and self._under_way[0] != owner:
            (_, wait), self._under_way = self._under_way, None
            wait()

    async def __aenter__(self) -> "Lane":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._acquire("close")
        self._is_open = False
        self._work.put(None)
        self._release()  # each waiter gets the lane in turn, but then ShuttingDown is raised
        await self._has_ended.wait()  # unlike `join` on another thread, this can be cancelled
        self._thread.join()


class Turn:
    """A turn of the lane. Call it to run a function on the lane's thread, and await the result.

    `gained` is the time at which the turn began, and `waited_s` the seconds of the wait before.
    """

    def __init__(self, lane: Lane, kind: str, owner: str, gained: float, waited_s: float) -> None:
        self._lane = lane
        self._kind = kind
        self._owner = owner
        self.gained = gained
        self.waited_s = waited_s
        self._shape: Hashable = None
        self._usual_s: float | None = 0.0
        if kind == LOAD:
            self._usual_s = None
            lane._usual_s.clear()

    def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        """Call a function on the lane's thread."""
        return self._lane._run(self._beat(), function, *args)

    def set_shape(self, shape: Hashable) -> None:
        """Set the shape of the next calls. Earlier calls with this shape give their usual time."""
        self._shape = shape
        self._usual_s = self._lane._usual_s.get(shape)

    def beat(self) -> None:
        """Make a new heartbeat between the steps of a call. Must run on the lane's thread."""
        self._lane.beat = self._beat()

    def leave_under_way(self, wait: Callable[[], None]) -> None:
        """Let the device finish launched work after the turn. Must run on the lane's thread.

        `wait` is called before the next call of another owner. It must wait for the work, and store
        an error instead of raising it.
        """
        self._lane._under_way = self._owner, wait

    def _beat(self) -> Beat:
        return Beat(self._kind, self._usual_s, self._shape, self._owner)

    @property
    def is_contended(self) -> bool:
        """Return True if another turn waits. Safe on any thread."""
        return bool(self._lane._waiters)

    def seconds_alone(self, beside: Container[str]) -> float:
        """Return the seconds since another owner had or wanted a turn, not counting turns of the
        kinds in `beside`; inf if there was none. Safe on any thread.
        """
        lane, owner = self._lane, self._owner
        if any(
            waiter.owner != owner and waiter.kind not in beside for waiter in tuple(lane._waiters)
        ):
            return 0.0
        ended = [
            at
            for (kind, other), at in tuple(lane._ended_at.items())
            if other != owner and kind not in beside
        ]
        return clock.now() - max(ended, default=-math.inf)

    @property
    def is_up(self) -> bool:
        """Return True if another turn is due: a call of several steps should then end after the
        current step. Safe on any thread.
        """
        lane = self._lane
        return bool(lane._waiters) and lane._is_up(self._kind, clock.now() - self.gained)


START_TOKENS = 512  # tokens of the first pass, before any pass is measured
LEAST_TOKENS = 32  # a pass of fewer tokens takes no less time, since a pass has a fixed cost
MOST_GROWTH = 4  # most growth from pass to pass, since a short pass predicts a long one badly
WELL_WITHIN = 0.75  # share of the limit below which a small pass counts as fast


def allowed_tokens(allowed: int, tokens: int, seconds: float, limit_s: float) -> int:
    """Return how many padded tokens the next pass may have, given a measured pass.

    The measured pass had `tokens`, where `allowed` tokens were allowed, and counts as small if it
    had fewer than half of these. There are four cases:
    1. It wasn't small and took at least half of the limit: the number follows from its speed.
    2. It took less than half of the limit: the number follows from its speed, but never shrinks,
       and grows at most by MOST_GROWTH.
    3. It was small and within WELL_WITHIN of the limit: as in case 2, because most of its time may
       be the fixed cost of a pass.
    4. It was small and slower: something else may have delayed it, so the number at most halves.
    """
    if tokens <= 0 or seconds <= 0:
        return allowed
    in_limit = int(tokens * limit_s / seconds)
    is_small = 2 * tokens < allowed
    if 2 * seconds < limit_s or (is_small and seconds <= WELL_WITHIN * limit_s):
        return max(allowed, min(in_limit, MOST_GROWTH * allowed))
    return max(LEAST_TOKENS, in_limit, allowed // 2 if is_small else 0)


class Pace:
    """Estimates from earlier passes how many tokens a pass may have to take at most `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.tokens = START_TOKENS

    def note(self, tokens: int, seconds: float) -> None:
        """Adjust the estimate, after a pass of `tokens` padded tokens took `seconds`."""
        self.tokens = allowed_tokens(self.tokens, tokens, seconds, self.limit_s)
