"""Whether drafts make answers come sooner on this device: by the times of steps with them and
without.

A draft costs a wider pass, or one of another model, and what is not chosen of it was for nothing.
What a pass of several tokens costs differs by device and model, so it is measured: tokens that a
draft's pass gives, at the price that they have one by one, against the seconds that it took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.jobs import DRAFTERS, Drafter, Pass

WINDOW: Final = 32  # passes with drafts of one source, after which it is judged
BASELINES: Final = 4  # steps without drafts that are timed, for each count of rows
STALE: Final = 512  # steps after which the time without drafts is measured anew
SHORTEST_PAUSE: Final = 512  # steps; each loss after another doubles it
LONGEST_PAUSE: Final = 1 << 15
_WEIGHT: Final = 0.2  # of a new step in the average


@dataclass(slots=True)
class _Baseline:
    """The seconds of a step without drafts, for one count of rows."""

    seconds: float = 0.0
    missing: int = BASELINES  # steps until it is known
    used: int = 0  # steps since it was


@dataclass(slots=True)
class _Source:
    """What the passes with one drafter's tokens have cost, and would have one by one."""

    spent_s: float = 0.0
    worth_s: float = 0.0
    passes: int = 0
    paused: int = 0  # steps without its drafts that are left
    pause: int = SHORTEST_PAUSE  # after the next loss


@dataclass(slots=True)
class DraftGains:
    """The measure of one model's drafters."""

    _baselines: dict[int, _Baseline] = field(default_factory=dict)
    _sources: dict[Drafter, _Source] = field(
        default_factory=lambda: {name: _Source() for name in DRAFTERS}
    )

    def choose(self, rows: int) -> Sequence[Drafter]:
        """Return whose drafts the next step of so many rows may read."""
        baseline = self._baselines.setdefault(rows, _Baseline())
        baseline.used += 1
        if baseline.used > STALE:
            baseline.used, baseline.missing = 0, 1
        for source in self._sources.values():
            source.paused = max(0, source.paused - 1)
        if baseline.missing:
            return ()
        return [name for name, source in self._sources.items() if not source.paused]

    def note(self, size: Pass, seconds: float) -> tuple[Drafter, float] | None:
        """Note a step. Return a drafter's gain, a ratio of times, if it has just been judged."""
        baseline = self._baselines.setdefault(size.rows, _Baseline())
        if not size.drafted:
            if not size.forced:
                _average(baseline, seconds)
            return None
        if size.drafter is None or not baseline.seconds:
            return None
        source = self._sources[size.drafter]
        source.passes += 1
        source.spent_s += seconds
        source.worth_s += baseline.seconds * (size.rows + size.accepted) / size.rows
        if source.passes < WINDOW:
            return None
        gain = source.worth_s / source.spent_s
        if gain < 1:
            paused = _Source(paused=source.pause, pause=min(LONGEST_PAUSE, 2 * source.pause))
            self._sources[size.drafter] = paused
        else:
            self._sources[size.drafter] = _Source()
        return size.drafter, gain


def _average(baseline: _Baseline, seconds: float) -> None:
    if baseline.seconds:
        seconds = baseline.seconds + _WEIGHT * (seconds - baseline.seconds)
    baseline.seconds = seconds
    baseline.missing = max(0, baseline.missing - 1)
