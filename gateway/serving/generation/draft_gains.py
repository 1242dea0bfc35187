"""Whether drafts make answers come sooner on this device, by the times of steps with and without
them.

A draft costs a wider pass, or a pass of another model, and its rejected tokens are wasted. The cost
of a pass of several tokens differs by device and model, so it is measured: the tokens that a
drafter's passes give, at their price one by one, against the seconds of all steps that made or read
its drafts. Steps without drafts are timed while no drafter may draft.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from gateway.jobs.steps import DRAFTERS, Drafter, StepResult

WINDOW: Final = 32  # passes with drafts of one drafter, after which it is judged
BASELINES: Final = 5  # steps without drafts that are timed, for each count of rows
STALE: Final = 512  # steps after which the time without drafts is measured anew
SHORTEST_PAUSE: Final = 512  # steps; each further loss doubles it
LONGEST_PAUSE: Final = 1 << 15


@dataclass(slots=True)
class _Baseline:
    """The seconds of the newest steps without drafts, for one count of rows."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=BASELINES))
    missing: int = BASELINES  # steps until it is known
    used: int = 0  # steps since it was known


@dataclass(slots=True)
class _Source:
    """The seconds of the steps with one drafter's tokens, and of the same tokens one by one."""

    spent_s: float = 0.0
    worth_s: float = 0.0
    passes: int = 0
    paused: int = 0  # remaining steps without its drafts
    pause: int = SHORTEST_PAUSE  # steps to pause after the next loss


@dataclass(slots=True)
class DraftGains:
    """The measure of one model's drafters."""

    _baselines: dict[int, _Baseline] = field(default_factory=dict)
    _sources: dict[Drafter, _Source] = field(
        default_factory=lambda: {name: _Source() for name in DRAFTERS}
    )
    _has_drafters: bool = False  # True: a drafter may draft in the step under way

    def choose(self, rows: int) -> Sequence[Drafter]:
        """Return the drafters that may draft in the next step, which has `rows` rows."""
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
        """Note a step. Return a drafter's gain, a ratio of times, if it has just been judged."""
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
