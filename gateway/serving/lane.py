"""The one road to the device: a lock for whose turn it is, a thread to work on.

MLX is not thread-safe, and an array left unevaluated on one thread cannot be evaluated on
another: so everything that touches it, loading and freeing too, runs on this thread.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast

from gateway import metrics
from gateway.errors import Unavailable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Run(Protocol):
    """Work on the lane's thread, during one's turn."""

    def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]:
        """Call it there and await its result."""


class _Work:
    """A call for the lane's thread, and the future that tells that it is over.

    The result is not in the future: one that nobody takes is dropped on the lane's thread.
    """

    __slots__ = ("args", "function", "loop", "over", "result")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        self.result: Any = None

    def do(self) -> None:
        """Run on the lane's thread; settle the future on its own loop."""
        try:
            self.result = self.function(*self.args)
        except BaseException as error:  # whoever waits decides what it means
            self._settle(self.over.set_exception, error)
        else:
            self._settle(self.over.set_result, None)

    def take(self) -> Any:
        """Give the result, and keep it no longer."""
        result, self.result = self.result, None
        return result

    def drop(self) -> None:
        """Let go of the result, here and now."""
        self.result = None

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        def unless_gone() -> None:
            if not self.over.done():
                settle(outcome)

        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
            self.loop.call_soon_threadsafe(unless_gone)


class Lane:
    """A context manager: the thread lives from enter to exit.

    `farewell` is the thread's last act (MLX on CPU aborts the process without it).
    """

    def __init__(self, farewell: Callable[[], None] = lambda: None) -> None:
        self._farewell = farewell
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="lane", daemon=True)
        self._is_open = False

    @property
    def is_wanted(self) -> bool:
        """Tell whether somebody waits for a turn. Safe on any thread."""
        return self._waiting > 0

    @property
    def is_alive(self) -> bool:
        """Tell whether the thread can still do work."""
        return self._is_open and self._thread.is_alive()

    @contextlib.asynccontextmanager
    async def turn(self, kind: str) -> AsyncIterator[Run]:
        """Wait in line, then hold the lane; `kind` names the work in metrics."""
        if not self.is_alive:
            raise Unavailable("The gateway is shutting down.", retry_after_s=1)
        self._waiting += 1
        started = metrics.now()
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        gained = metrics.now()
        try:
            yield cast(Run, self._run)
        finally:
            self._lock.release()
            metrics.LANE_WAIT.labels(kind).observe(gained - started)
            metrics.LANE_HOLD.labels(kind).observe(metrics.now() - gained)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        work = _Work(function, args)
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
                work.over.exception()  # nobody is left to hear of it
            self._work.put(_Work(work.drop, ()))
            raise
        return work.take()

    def _live(self) -> None:
        while (work := self._work.get()) is not None:
            work.do()
            del work  # hold no array while waiting
        self._farewell()

    async def __aenter__(self) -> "Lane":
        self._thread.start()
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._lock:
            self._is_open = False
            self._work.put(None)
        await asyncio.to_thread(self._thread.join)
