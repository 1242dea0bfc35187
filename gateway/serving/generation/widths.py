"""How many sequences share a decode step: as many as give the most tokens a second.

On some devices a step of two rows takes longer than two steps of one row: nobody gains by being
batched there. So a step of the loaded model is timed at several widths, and where fewer rows give
more tokens a second, sequences take turns in short runs.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

StepTimes: TypeAlias = tuple[float, ...]  # seconds of a decode step, at the first of WIDTHS

WIDTHS: Final = (1, 2, 4, 8, 16)  # rows of the steps that are timed
LEAST_GAIN: Final = 1.1  # all run together below this gain
RUN: Final = 8  # tokens that a sequence decodes before another resumes in its place


class Width(NamedTuple):
    """The sequences that decode together, and their tokens a second over those of all together."""

    rows: int
    gain: float = 1.0

    @property
    def alternates(self) -> bool:
        """Return True if the others wait for their turn."""
        return self.gain > 1


def next_width(step_s: StepTimes, most_rows: int, limit_s: float) -> int | None:
    """Return the next width to time; None if all are timed, or if wider steps have no places or
    take too long. Two rows are timed whatever a step of one takes.
    """
    known = len(step_s)
    if known >= len(WIDTHS) or WIDTHS[known] > most_rows:
        return None
    return WIDTHS[known] if known < 2 or max(step_s) <= limit_s else None


@lru_cache(maxsize=1024)
def choose_width(step_s: StepTimes, rows: int) -> Width:
    """Choose how many of `rows` sequences decode together: all of them if no times are known."""
    if rows < 2 or not step_s:
        return Width(rows)
    # The best width between two measured widths is one of the two.
    rates = {
        width: width / seconds
        for width, seconds in zip(WIDTHS, step_s, strict=False)
        if width < rows
    }
    together = rows / _seconds(step_s, rows)
    best = max(rates, key=lambda width: (rates[width], width))
    gain = rates[best] / together
    return Width(best, gain) if gain >= LEAST_GAIN else Width(rows)


def _seconds(step_s: Sequence[float], rows: int) -> float:
    """Return the seconds of a step, interpolated linearly between two widths. Beyond the widest,
    more rows are taken to gain nothing over it.
    """
    end = bisect_left(WIDTHS, rows)
    if end >= len(step_s):
        return step_s[-1] * rows / WIDTHS[len(step_s) - 1]
    if WIDTHS[end] == rows:
        return step_s[end]
    share = (rows - WIDTHS[end - 1]) / (WIDTHS[end] - WIDTHS[end - 1])
    return (1 - share) * step_s[end - 1] + share * step_s[end]
