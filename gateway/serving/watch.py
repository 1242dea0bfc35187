"""Watches the lane and the event loop from a separate thread, which neither can block."""

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
GRACE_S = 1.0  # seconds for sending errors before the process exits
TIMES_THE_USUAL = 4.0  # a call may take this many times its usual time, even beyond its limit
CHECKS_PER_LIMIT = 20
MOST_BETWEEN_CHECKS_S = 1.0


@dataclass(frozen=True, slots=True)
class StallLimits:
    """The most seconds that a call on the lane may take."""

    call_s: float
    load_s: float  # for a load, or for a call with a new shape

    def is_over(self, beat: Beat | None, seconds: float) -> bool:
        """Return True if a beat that has not changed for `seconds` means a stall."""
        if beat is None:
            return False
        if beat.usual_s is None:
            return seconds > self.load_s
        return seconds > max(self.call_s, min(self.load_s, TIMES_THE_USUAL * beat.usual_s))


class BeatAge:
    """The time for which the lane's beat has not changed."""

    def __init__(self) -> None:
        self._beat: Beat | None = None
        self._seconds = 0.0

    def update(self, seconds: float, beat: Beat | None) -> float:
        """Note the beat that was read `seconds` after the last check, and return its age."""
        self._seconds = self._seconds + seconds if beat is self._beat else 0.0
        self._beat = beat
        return self._seconds

    def of(self, beat: Beat | None) -> float:
        """Return the age of a beat; 0 if it is newer than the last check."""
        if beat is None or beat is not self._beat:
            return 0.0
        return self._seconds


class Watch:
    """A context manager that checks the lane and the current event loop until exit.

    It writes the stacks of all threads to stderr if the lane or the loop stalls, the lane dies, the
    device is lost, or `lost` returns a text about another failed part. Then it calls `on_stall` on
    the loop, and `exit_process` on the watching thread.
    """

    def __init__(
        self,
        lane: Lane,
        limits: StallLimits,
        *,
        on_stall: Callable[[], None],
        exit_process: Callable[[int], object] | None,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._lane = lane
        self._limits = limits
        self._on_stall = on_stall
        self._exit_process = exit_process
        self._lost = lost
        shortest_s = min(limits.call_s, limits.load_s)
        self._between_s = min(MOST_BETWEEN_CHECKS_S, shortest_s / CHECKS_PER_LIMIT)
        self._beat_age = BeatAge()
        self._loop_has_turned = threading.Event()
        self._loop_has_turned.set()
        self._loop_stuck_s = 0.0
        self._stuck = "lane"
        self._status: Status = "ok"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @property
    def status(self) -> Status:
        if self._is_dead:
            return "dead"
        return self._status

    @property
    def _is_dead(self) -> bool:
        return self._lane.has_died or self._loss is not None

    @property
    def _loss(self) -> str | None:
        return self._lane.health.lost or self._lost()

    @property
    def beat_age_s(self) -> float:
        return self._beat_age.of(self._lane.beat)

    def _run(self) -> None:
        checked = clock.now()
        while not self._is_over.wait(self._between_s):
            now = clock.now()
            # A late check counts as at most two intervals, since the machine may have slept.
            self._check(min(now - checked, 2 * self._between_s))
            checked = now

    def _check(self, seconds: float) -> None:
        beat, before = self._lane.beat, self._status
        age_s = self._beat_age.update(seconds, beat)
        is_loop_stuck = self._has_loop_stalled(seconds)
        if self._is_dead:
            self._status = "dead"
        else:
            is_stalled = is_loop_stuck or self._limits.is_over(beat, age_s)
            self._status = "stalled" if is_stalled else "ok"
        if self._status == before:
            return
        if self._status == "ok":
            log.warning(f"{self._stuck}_moves_again")
            return
        is_loop = is_loop_stuck and self._status == "stalled"
        self._stuck, stuck_s = ("loop", self._loop_stuck_s) if is_loop else ("lane", age_s)
        with contextlib.suppress(Exception):  # stderr may not be writable
            kind = None if beat is None else beat.kind
            event = f"{self._stuck}_{self._status}"
            log.critical(event, kind=kind, seconds=round(stuck_s, 1), lost=self._loss)
            faulthandler.dump_traceback()
        if self._exit_process is not None:
            self._exit(self._exit_process)

    def _has_loop_stalled(self, seconds: float) -> bool:
        # `Thread.start` may hang the loop: up to CPython 3.13 it never returns if memory runs out.
        if self._loop_has_turned.is_set():
            self._loop_stuck_s = 0.0
            self._loop_has_turned.clear()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._loop_has_turned.set)
        else:
            self._loop_stuck_s += seconds
        return self._loop_stuck_s > self._limits.call_s

    def _exit(self, exit_process: Callable[[int], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_stall)
        self._is_over.wait(GRACE_S)
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        exit_process(STATUS_OF_A_STALL)

    def __enter__(self) -> "Watch":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
