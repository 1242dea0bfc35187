"""Measures whether speculative decoding is faster than decoding without drafts.

A drafter's gain is the time that its accepted tokens would have taken without drafts, divided by
the time of all steps that made or verified its drafts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from gateway.jobs.steps import DRAFTERS, Drafter, StepResult

WINDOW: Final = 32  # passes with a drafter's drafts after which its gain is computed
BASELINES: Final = 5  # timed steps without drafts, for each number of rows
STALE: Final = 512  # steps after which the time without drafts is measured again
SHORTEST_PAUSE: Final = 512  # steps of a slow drafter's pause, doubled each time in a row
LONGEST_PAUSE: Final = 1 << 15


@dataclass(slots=True)
class _Baseline:
    """The seconds of the latest steps without drafts."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=BASELINES))
    missing: int = BASELINES
    used: int = 0


@dataclass(slots=True)
class _Source:
    spent_s: float = 0.0  # seconds of the steps that made or verified its drafts
    worth_s: float = 0.0  # seconds that the same tokens would have taken without drafts
    passes: int = 0
    paused: int = 0  # remaining steps of the current pause
    pause: int = SHORTEST_PAUSE  # steps of the next pause


@dataclass(slots=True)
class DraftGains:
    """The measured gains of one model's drafters."""

    _baselines: dict[int, _Baseline] = field(default_factory=dict)
    _sources: dict[Drafter, _Source] = field(
        default_factory=lambda: {name: _Source() for name in DRAFTERS}
    )
    _has_drafters: bool = False

    def choose(self, rows: int) -> Sequence[Drafter]:
        baseline = self._baselines.setdefault(rows, _Baseline())
        baseline.used += 1
        if baseline.used > STALE:
            baseline.used, baseline.missing = 0, BASELINES
        for source in self._sources.values():
            source.paused = max(0, source.paused - 1)
        allowed = [name for name, source in self._sources.items() if not source.paused]
        if baseline.missing:
            allowed = []
        self._has_drafters = bool(allowed)
        return allowed

    def note(self, result: StepResult, seconds: float) -> tuple[Drafter, float] | None:
        """Record a step, and return a drafter with its gain after WINDOW passes."""
        size = result.size
        if not size.rows:
            return None
        baseline = self._baselines.setdefault(size.rows, _Baseline())
        drafter = size.drafter or result.drafter
        if not (size.drafted or drafter):
            if not (size.forced or self._has_drafters):
                baseline.seconds.append(seconds)
                baseline.missing = max(0, baseline.missing - 1)
            return None
        if drafter is None or not baseline.seconds:
            return None
        source = self._sources[drafter]
        if size.drafted:
            source.passes += 1
        source.spent_s += seconds
        source.worth_s += median(baseline.seconds) * (size.rows + size.accepted) / size.rows
        if source.passes < WINDOW:
            return None
        gain = source.worth_s / source.spent_s
        pause = min(LONGEST_PAUSE, 2 * source.pause)
        self._sources[drafter] = _Source(paused=source.pause, pause=pause)
        if gain >= 1:
            self._sources[drafter] = _Source()
        return drafter, gain
