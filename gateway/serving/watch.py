"""The lane, watched from a thread of its own: neither a stuck call nor a busy loop can hide it.

A call that keeps Python's own lock as well stops this thread with all others; then /health does
not answer at all, which says the same.
"""

import asyncio
import contextlib
import faulthandler
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gateway import clock, logs
from gateway.serving.lane import Beat, Lane

log = logs.get("watch")

Status = Literal["ok", "stalled", "dead"]

STATUS_OF_A_STALL = 70  # EX_SOFTWARE of sysexits.h
GRACE_S = 1.0  # for requests inside to be answered, before the process ends
TIMES_THE_USUAL = 4.0
LOOKS_PER_LIMIT = 20
MOST_BETWEEN_LOOKS_S = 1.0


@dataclass(frozen=True, slots=True)
class StallLimits:
    """How long one call of the lane may take, and one of which nobody knows how long it takes."""

    call_s: float
    load_s: float

    def is_over(self, beat: Beat | None, seconds: float) -> bool:
        """Return True if a beat that has not changed for so long is a stall; no work is none.

        A call whose like took long before, a large batch on a slow device, may do so again.
        """
        if beat is None:
            return False
        if beat.usual_s is None:
            return seconds > self.load_s
        return seconds > max(self.call_s, min(self.load_s, TIMES_THE_USUAL * beat.usual_s))


class Stillness:
    """For how long the lane has not moved, as far as it was looked at."""

    def __init__(self) -> None:
        self._beat: Beat | None = None
        self._seconds = 0.0

    def after(self, seconds: float, beat: Beat | None) -> float:
        """Look again, after so many seconds; tell for how long this beat has been seen."""
        self._seconds = self._seconds + seconds if beat is self._beat else 0.0
        self._beat = beat
        return self._seconds


class Watch:
    """A context manager: the lane is looked at from enter to exit.

    When it stalls or dies, every thread's stack is written to stderr. Then, if there is a way to
    `leave`, `tell` is called on the loop and, a moment later, `leave` on the watch's thread, with
    the status: a call that is stuck cannot be ended in any other way.
    """

    def __init__(
        self,
        lane: Lane,
        limits: StallLimits,
        *,
        tell: Callable[[], None],
        leave: Callable[[int], object] | None,
    ) -> None:
        self._lane = lane
        self._limits = limits
        self._tell = tell
        self._leave = leave
        self._between_s = min(
            MOST_BETWEEN_LOOKS_S, limits.call_s / LOOKS_PER_LIMIT, limits.load_s / LOOKS_PER_LIMIT
        )
        self._stillness = Stillness()
        self._status: Status = "ok"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="watch", daemon=True)

    @property
    def status(self) -> Status:
        """Return how the lane is: a dead one is noticed at once, a stalled one after its limit."""
        return "dead" if self._lane.has_died else self._status

    def _live(self) -> None:
        looked = clock.now()
        while not self._is_over.wait(self._between_s):
            now = clock.now()
            # Time in which nobody looked, as while the machine slept, does not count.
            self._look(min(now - looked, 2 * self._between_s))
            looked = now

    def _look(self, seconds: float) -> None:
        beat, before = self._lane.beat, self._status
        still_s = self._stillness.after(seconds, beat)
        if self._lane.has_died:
            self._status = "dead"
        else:
            self._status = "stalled" if self._limits.is_over(beat, still_s) else "ok"
        if self._status == before:
            return
        if self._status == "ok":
            log.warning("lane_moves_again")
            return
        with contextlib.suppress(Exception):  # a stderr that cannot be written to
            kind = None if beat is None else beat.kind
            log.critical(f"lane_{self._status}", kind=kind, seconds=round(still_s, 1))
            faulthandler.dump_traceback()
        if self._leave is not None:
            self._give_up(self._leave)

    def _give_up(self, leave: Callable[[int], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._tell)
        self._is_over.wait(GRACE_S)
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        leave(STATUS_OF_A_STALL)

    def __enter__(self) -> "Watch":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
