"""The one road to the device: a lock for whose turn it is, a thread to work on.

MLX is not thread-safe, and an array left unevaluated on one thread cannot be evaluated on
another: so everything that touches it, loading and freeing too, runs on this thread.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple

from gateway import clock, logs, metrics
from gateway.errors import Unavailable


class FairQueue:
    """Start-time fair queuing over kinds of work (Goyal, Vin and Cheng, 1996).

    Every kind has a clock that its turns move on by their seconds, divided by the kind's weight;
    the kind whose clock is furthest behind is next. A kind that was idle starts where the one in
    service started, so that idleness saves nothing up. Kinds that always wait get time in
    proportion to their weights, and each one's turn comes after at most one turn of each other.

    `most_s` says of how long a turn counts at most, by kind: one that has none counts in full.
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
        """Return the place of the kind that is next; of equals the first to wait."""
        starts = [self._start(kind) for kind in waiting]
        return starts.index(min(starts))

    def begin(self, kind: str) -> None:
        """Note that a turn of this kind begins."""
        self._now = self._clocks[kind] = self._start(kind)

    def end(self, kind: str, seconds: float) -> None:
        """Note that the turn begun last ends, after so many seconds."""
        self._clocks[kind] = self._after(kind, seconds)

    def is_up(self, kind: str, seconds: float, waiting: Iterable[str]) -> bool:
        """Return True if one of those that wait is due before a turn goes on that began last.

        Another's wish for the same kind of work ends it too.
        """
        mine = self._after(kind, seconds)
        return any(other == kind or self._start(other) <= mine for other in waiting)

    def _start(self, kind: str) -> float:
        return max(self._now, self._clocks.get(kind, 0.0))

    def _after(self, kind: str, seconds: float) -> float:
        seconds = min(seconds, self._most_s.get(kind, seconds))
        return self._now + seconds / self._weights.get(kind, 1.0)


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
log = logs.get("lane")

LOAD = "load"  # the kind of turn whose calls may take long
MOST_LOAD_S = 1.0  # of one that counts: a slow disk must not bar the next load for minutes


@dataclass(slots=True, eq=False)
class Beat:
    """A sign of life: what the lane's thread does, and how long that took at most so far; None
    where nobody knows, as for a load and the first call of a shape, which compiles.

    A new one is made for every call, and for every step of a call of many: one that stays has
    not moved.
    """

    kind: str
    usual_s: float | None = 0.0
    shape: Hashable = None


class _Work:
    """A call for the lane's thread, and the future that tells that it is over.

    The result is not in the future: one that nobody takes is dropped on the lane's thread.
    """

    __slots__ = ("args", "beat", "function", "loop", "over", "result")

    def __init__(self, beat: Beat, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.beat = beat
        self.function = function
        self.args = args
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        self.result: Any = None

    def do(self) -> None:
        """Run on the lane's thread; settle the future on its own loop."""
        try:
            self.result = self.function(*self.args)
        except StopIteration as error:  # the one exception that no future takes
            self.fail(RuntimeError(f"{self.function} raised {error!r}"))
        except Exception as error:  # the caller decides what it means
            self.fail(error)
        else:
            self._settle(self.over.set_result, None)

    def fail(self, error: Exception) -> None:
        """Fail the waiting caller, as there is no result."""
        self._settle(self.over.set_exception, error)

    def take(self) -> Any:
        """Return the result, and drop it here."""
        result, self.result = self.result, None
        return result

    def drop(self) -> None:
        """Drop the result on this thread."""
        self.result = None

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        def unless_gone() -> None:
            if not self.over.done():
                settle(outcome)

        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
            self.loop.call_soon_threadsafe(unless_gone)


@dataclass(slots=True, eq=False)
class _Waiting:
    """Somebody in line: the kind of their work, and what tells them that the lane is theirs."""

    kind: str
    gained: asyncio.Future[None]


class Lane:
    """A context manager: the thread lives from enter to exit.

    `weights` say how kinds of work that wait share the lane's time, 1 where they say nothing;
    within a kind, first come is first served. `on_close` is the thread's last act (MLX on CPU
    aborts the process without it).
    """

    def __init__(
        self,
        on_close: Callable[[], None] = lambda: None,
        *,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._on_close = on_close
        self._shares = FairQueue(weights, {LOAD: MOST_LOAD_S})
        self._line: list[_Waiting] = []
        self._is_held = False
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="lane", daemon=True)
        self._is_open = False
        self._has_ended = asyncio.Event()
        self._usual_s: dict[Hashable, float] = {}  # by shape; forgotten at every load
        self.beat: Beat | None = None  # written by the thread alone; None while it has no work
        self.has_died = False

    @property
    def is_alive(self) -> bool:
        """Return True if the thread can still work."""
        return self._is_open and not self.has_died

    @property
    def is_idle(self) -> bool:
        """Return True if a turn would begin at once."""
        return not self._is_held

    @contextlib.asynccontextmanager
    async def turn(self, kind: str) -> AsyncIterator["Turn"]:
        """Wait in line, then hold the lane; `kind` names the work for shares and metrics."""
        self._check()
        asked = clock.now()
        await self._gain(kind)
        gained = clock.now()
        try:
            self._check()
            yield Turn(self, kind, gained, gained - asked)
        finally:
            seconds = clock.now() - gained
            self._shares.end(kind, seconds)
            self._hand_on()
            metrics.of(metrics.LANE_WAIT, kind).observe(gained - asked)
            metrics.of(metrics.LANE_HOLD, kind).observe(seconds)
            metrics.of(metrics.LANE_SECONDS, kind).inc(seconds)

    async def _gain(self, kind: str) -> None:
        if not self._is_held:
            self._is_held = True
            self._shares.begin(kind)
            return
        mine = _Waiting(kind, asyncio.get_running_loop().create_future())
        self._line.append(mine)
        try:
            await mine.gained
        except asyncio.CancelledError:
            if mine in self._line:
                self._line.remove(mine)
            elif not mine.gained.cancelled():
                self._hand_on()  # it was given to us just as we left
            raise

    def _hand_on(self) -> None:
        """Pass the free lane to the next in line."""
        # Whoever is being cancelled stands in line until they next run.
        self._line = [each for each in self._line if not each.gained.done()]
        if not self._line:
            self._is_held = False
            return
        chosen = self._line.pop(self._shares.choose(each.kind for each in self._line))
        self._shares.begin(chosen.kind)
        chosen.gained.set_result(None)

    def _is_up(self, kind: str, seconds: float) -> bool:
        # A copy: the line may change meanwhile, on the loop's thread.
        return self._shares.is_up(kind, seconds, [each.kind for each in tuple(self._line)])

    async def _run(self, beat: Beat, function: Callable[..., Any], *args: Any) -> Any:
        self._check()
        work = _Work(beat, function, args)
        asked = clock.now()
        self._work.put(work)
        try:
            await asyncio.shield(work.over)
        except asyncio.CancelledError:
            # The call cannot be stopped: keep the turn until it is over, however often we are
            # told to leave. What it made, a loaded engine perhaps, is freed where it was made.
            while not work.over.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work.over])
            if not work.over.cancelled():
                work.over.exception()  # retrieved, as no caller is left
            self._work.put(_Work(beat, work.drop, ()))
            raise
        self._learn(beat.shape, clock.now() - asked)
        return work.take()

    def _learn(self, shape: Hashable, seconds: float) -> None:
        if shape is not None:
            self._usual_s[shape] = max(seconds, self._usual_s.get(shape, 0.0))

    def _check(self) -> None:
        if not self.is_alive:
            state = "engine has stopped" if self.has_died else "gateway is shutting down"
            raise Unavailable(f"The {state}.", retry_after_s=1)

    def _live(self) -> None:
        while (work := self._work.get()) is not None:
            self.beat = work.beat
            try:
                work.do()
            except BaseException:  # SystemExit, say: what ends a thread ends this one
                self.has_died = True  # before whoever waits asks for more
                log.critical("lane_died", kind=work.beat.kind, exc_info=True)
                work.fail(Unavailable("The engine has stopped.", retry_after_s=1))
                break
            self.beat = None
            del work  # hold no array while waiting
        self.beat = Beat("farewell")
        try:
            self._on_close()
        finally:
            self.beat = None
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                self._loop.call_soon_threadsafe(self._has_ended.set)

    async def __aenter__(self) -> "Lane":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._gain("close")
        self._is_open = False
        self._work.put(None)
        self._hand_on()  # those in line are refused
        await self._has_ended.wait()  # on no other thread: one that joins cannot be left behind
        self._thread.join()


class Turn:
    """The right to the lane, while one holds it. Call it to work there, and await the result.

    `gained` is the clock when it began, `waited_s` how long it was waited for.
    """

    def __init__(self, lane: Lane, kind: str, gained: float, waited_s: float) -> None:
        self._lane = lane
        self._kind = kind
        self.gained = gained
        self.waited_s = waited_s
        self._shape: Hashable = None
        self._usual_s: float | None = 0.0
        if kind == LOAD:
            self._usual_s = None
            lane._usual_s.clear()

    def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        """Call it on the lane's thread."""
        return self._lane._run(self._beat(), function, *args)

    def announce(self, shape: Hashable) -> None:
        """Say what the next calls compute on: calls of a shape are measured by those before."""
        self._shape = shape
        self._usual_s = self._lane._usual_s.get(shape)

    def beat(self) -> None:
        """Show life between the steps of one call. On the lane's thread."""
        self._lane.beat = self._beat()

    def _beat(self) -> Beat:
        return Beat(self._kind, self._usual_s, self._shape)

    @property
    def is_contended(self) -> bool:
        """Return True if another turn waits. Safe on any thread."""
        return bool(self._lane._line)

    @property
    def is_up(self) -> bool:
        """Return True if another's turn is due: work in steps asks between them. Safe on any
        thread.
        """
        lane = self._lane
        return bool(lane._line) and lane._is_up(self._kind, clock.now() - self.gained)
