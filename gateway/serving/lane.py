"""The global MLX lock, and the one thread that runs MLX.

MLX is not thread-safe, and one thread cannot evaluate another thread's unevaluated array. So this
thread makes every call that uses MLX, even to load or free a model.
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
from gateway.errors import GatewayError, ShuttingDown, Unavailable
from gateway.panics import as_exception
from gateway.serving.faults import DeviceHealth


class FairQueue:
    """Start-time fair queuing over kinds of work (Goyal, Vin and Cheng, 1996).

    Each kind has a clock, which a turn advances by its seconds divided by the kind's weight. The
    kind whose clock is furthest behind is next. A kind that was idle starts at the clock of the
    current turn's kind. `most_s` bounds the seconds that count for a turn of some kinds.
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
        """Return the index of the next kind; among equals, the first."""
        starts = [self._start(kind) for kind in waiting]
        return starts.index(min(starts))

    def begin(self, kind: str) -> None:
        self._now = self._clocks[kind] = self._start(kind)

    def end(self, kind: str, seconds: float) -> None:
        self._clocks[kind] = self._after(kind, seconds)

    def is_up(self, kind: str, seconds: float, waiting: Iterable[str]) -> bool:
        """Return True if the current turn, which has taken `seconds`, should end."""
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

LOAD = "load"
MOST_LOAD_S = 1.0  # counted seconds of a load's turn, so that a slow disk doesn't delay later loads


@dataclass(slots=True, eq=False)
class Beat:
    """The current call, or step of a call, on the lane's thread.

    While the Beat stays the same object, the thread has made no progress.
    """

    kind: str
    # The longest time of earlier calls with this shape. None for loads and for the first call with
    # a shape, which compiles.
    usual_s: float | None = 0.0
    shape: Hashable = None
    owner: str = ""


class _Work:
    """A call for the lane's thread."""

    __slots__ = ("args", "beat", "done", "function", "loop", "result")

    def __init__(self, beat: Beat, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.beat = beat
        self.function = function
        self.args = args
        self.loop = asyncio.get_running_loop()
        # The future lacks the result, which must be freed on the lane's thread if nobody takes it.
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.result: Any = None

    def do(self, health: DeviceHealth) -> None:
        try:
            self.result = self.function(*self.args)
        except BaseException as error:  # `as_exception` raises the errors that must end the thread
            self.fail(health.see(as_exception(error)))
        else:
            self._settle(self.done.set_result, None)

    def fail(self, error: Exception) -> None:
        self._settle(self.done.set_exception, error)

    def take(self) -> Any:
        result, self.result = self.result, None
        return result

    def drop(self) -> None:
        self.result = None

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        def settle_once() -> None:
            if not self.done.done():
                settle(outcome)

        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
            self.loop.call_soon_threadsafe(settle_once)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A task that waits for the lane."""

    kind: str
    owner: str
    gained: asyncio.Future[None]


class Lane:
    """The global MLX lock, and the thread that runs MLX while this context is entered.

    `weights` (default 1) divide the lane's time between kinds of work. The thread calls `on_close`
    before it ends, because MLX on CPU otherwise aborts the process.
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
        self._ended_at: dict[tuple[str, str], float] = {}
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name="lane", daemon=True)
        self._is_open = False
        self._has_ended = asyncio.Event()
        self._usual_s: dict[Hashable, float] = {}
        # The owner of unfinished work on the device, and a function that waits for that work.
        self._under_way: tuple[str, Callable[[], None]] | None = None
        self.beat: Beat | None = None  # written only by the thread; None while it has no work
        self.has_died = False

    @property
    def is_alive(self) -> bool:
        return self._is_open and not self.has_died

    @property
    def is_idle(self) -> bool:
        return not self._is_held

    @contextlib.asynccontextmanager
    async def turn(self, kind: str, owner: str = "") -> AsyncIterator["Turn"]:
        """Wait for the lane, then hold it while entered; `owner` is a model or task."""
        self._check()
        turn = Turn(self, kind, owner)
        await turn.begin()
        try:
            self._check()
            yield turn
        finally:
            turn.end()

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
                self._release()  # the task got the lane just before it was cancelled
            raise

    def _release(self) -> None:
        # A cancelled waiter is in the list until its task runs.
        self._waiters = [waiter for waiter in self._waiters if not waiter.gained.done()]
        if not self._waiters:
            self._is_held = False
            return
        chosen = self._waiters.pop(self._fair_queue.choose(waiter.kind for waiter in self._waiters))
        self._fair_queue.begin(chosen.kind)
        chosen.gained.set_result(None)

    def _is_up(self, kind: str, seconds: float) -> bool:
        # The event loop's thread may change the list meanwhile, so it is copied.
        return self._fair_queue.is_up(
            kind, seconds, [waiter.kind for waiter in tuple(self._waiters)]
        )

    async def _run(self, beat: Beat, function: Callable[..., Any], *args: Any) -> Any:
        self._check()
        work = _Work(beat, function, args)
        queued = clock.now()
        self._work.put(work)
        # The thread may have died since the check, and then it takes no more calls.
        if self.has_died:
            work.fail(_stopped())
        try:
            await asyncio.shield(work.done)
        except asyncio.CancelledError:
            # The call cannot be stopped, so the turn is kept until it has ended. Its result, which
            # may be a loaded engine, is freed on the lane's thread.
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
                raise _stopped()
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
                work.fail(_stopped())
                self._refuse_queued()
                break
            self.beat = None
            del work  # this thread must not keep the result, which may hold arrays
        self.beat = Beat("close")
        try:
            self._on_close()
        finally:
            self.beat = None
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                self._loop.call_soon_threadsafe(self._has_ended.set)

    def _refuse_queued(self) -> None:
        # A task that was cancelled as it waited for the lane may have queued a call.
        with contextlib.suppress(queue.Empty):
            while True:
                if (work := self._work.get_nowait()) is not None:
                    work.fail(_stopped())

    def _settle(self, owner: str) -> None:
        # MLX raises the error of unfinished work once, at the first wait, which must not be in
        # another owner's call.
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
        self._release()
        await self._has_ended.wait()  # unlike `join` on another thread, this can be cancelled
        self._thread.join()


def _stopped() -> GatewayError:
    return Unavailable("The engine has stopped.", retry_after_s=1)


class Turn:
    """A turn of the lane, which began at `gained`; calling it runs a function on the lane."""

    def __init__(self, lane: Lane, kind: str, owner: str) -> None:
        self._lane = lane
        self._kind = kind
        self._owner = owner
        self._has_lane = False
        self._earlier_s = 0.0  # seconds that the turn held the lane before its last rest
        self.gained = 0.0
        self.waited_s = 0.0
        self._shape: Hashable = None
        self._usual_s: float | None = 0.0
        if kind == LOAD:
            self._usual_s = None
            lane._usual_s.clear()

    async def begin(self) -> None:
        requested = clock.now()
        await self._lane._acquire(self._kind, self._owner)
        self._has_lane = True
        self.gained = clock.now()
        waited_s = self.gained - requested
        self.waited_s += waited_s
        metrics.of(metrics.LANE_WAIT, self._kind).observe(waited_s)

    def end(self) -> None:
        if not self._has_lane:
            return
        self._has_lane = False
        lane, kind = self._lane, self._kind
        ended = lane._ended_at[kind, self._owner] = clock.now()
        seconds = ended - self.gained
        self._earlier_s += seconds
        lane._fair_queue.end(kind, seconds)
        lane._release()
        metrics.of(metrics.LANE_HOLD, kind).observe(seconds)
        metrics.of(metrics.LANE_SECONDS, kind).inc(seconds)

    async def rest(self) -> None:
        """Let the turns that are due go first, and wait for the lane again."""
        if self.is_up:
            self.end()
            await self.begin()

    @property
    def held_s(self) -> float:
        return self._earlier_s + clock.now() - self.gained

    def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        return self._lane._run(self._beat(), function, *args)

    def set_shape(self, shape: Hashable) -> None:
        self._shape = shape
        self._usual_s = self._lane._usual_s.get(shape)

    def beat(self) -> None:
        """Replace the Beat between the steps of a call. Must run on the lane's thread."""
        self._lane.beat = self._beat()

    def leave_under_way(self, wait: Callable[[], None]) -> None:
        """Let the device finish launched work after the turn. Must run on the lane's thread.

        Before another owner's call, `wait` must wait for the work and store its errors.
        """
        self._lane._under_way = self._owner, wait

    def _beat(self) -> Beat:
        return Beat(self._kind, self._usual_s, self._shape, self._owner)

    @property
    def is_contended(self) -> bool:
        return bool(self._lane._waiters)

    def seconds_alone(self, beside: Container[str]) -> float:
        """Return the seconds since another owner had or wanted a turn of a kind not in `beside`."""
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
        """Return True if another turn is due, so that this one should end."""
        lane = self._lane
        return bool(lane._waiters) and lane._is_up(self._kind, clock.now() - self.gained)


START_TOKENS = 512
LEAST_TOKENS = 32  # tokens; a smaller pass takes no less time
MOST_GROWTH = 4  # most growth from pass to pass, since a short pass predicts a long one badly
WELL_WITHIN = 0.75  # share of the limit below which a small pass counts as fast


def allowed_tokens(allowed: int, tokens: int, seconds: float, limit_s: float) -> int:
    """Return how many padded tokens the next pass may have, after a pass of `tokens` was measured.

    The number follows from the measured speed. It never shrinks after a pass that took less than
    half of the limit, and grows at most by MOST_GROWTH. After a slow pass of fewer than half of the
    `allowed` tokens, it at most halves, since something else may have delayed the pass.
    """
    if tokens <= 0 or seconds <= 0:
        return allowed
    in_limit = int(tokens * limit_s / seconds)
    is_small = 2 * tokens < allowed
    if 2 * seconds < limit_s or (is_small and seconds <= WELL_WITHIN * limit_s):
        return max(allowed, min(in_limit, MOST_GROWTH * allowed))
    return max(LEAST_TOKENS, in_limit, allowed // 2 if is_small else 0)


class Pace:
    """An estimate of the tokens that a pass may have to take at most `limit_s`.

    The first pass has no more than START_TOKENS, or fewer at `token_s` seconds each.
    """

    def __init__(self, limit_s: float, token_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self.tokens = START_TOKENS
        if token_s * START_TOKENS > limit_s:
            self.tokens = max(LEAST_TOKENS, int(limit_s / token_s))

    def note(self, tokens: int, seconds: float) -> None:
        self.tokens = allowed_tokens(self.tokens, tokens, seconds, self.limit_s)
