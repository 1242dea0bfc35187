"""Chooses how many sequences share a decode step, for the most tokens per second.

On some devices a step of two rows takes longer than two steps of one row. Steps of several widths
are timed, and if narrower steps are faster, sequences take turns.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

StepTimes: TypeAlias = tuple[float, ...]  # seconds of a decode step for each of the first WIDTHS

WIDTHS: Final = (1, 2, 4, 8, 16)  # rows of the steps that are timed
LEAST_GAIN: Final = 1.1
RUN: Final = 8  # tokens that a sequence decodes before another takes its place


class Width(NamedTuple):
    """The number of sequences that should decode together."""

    rows: int
    gain: float = 1.0  # tokens per second, relative to one step of all sequences

    @property
    def alternates(self) -> bool:
        return self.gain > 1


def next_width(step_s: StepTimes, most_rows: int, limit_s: float) -> int | None:
    """Return the next width to time; None if all are timed or a step took over `limit_s`."""
    known = len(step_s)
    if known >= len(WIDTHS) or WIDTHS[known] > most_rows:
        return None
    return WIDTHS[known] if known < 2 or max(step_s) <= limit_s else None


@lru_cache(maxsize=1024)
def choose_width(step_s: StepTimes, rows: int) -> Width:
    """Choose how many of `rows` sequences decode together; all of them if no times are known."""
    if rows < 2 or not step_s:
        return Width(rows)
    # Interpolation never makes a width between the measured ones the best.
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
    """Return the seconds of a step of `rows` rows, interpolated between the measured widths."""
    # Beyond the widest, tokens per second are assumed to stay the same.
    end = bisect_left(WIDTHS, rows)
    if end >= len(step_s):
        return step_s[-1] * rows / WIDTHS[len(step_s) - 1]
    if WIDTHS[end] == rows:
        return step_s[end]
    share = (rows - WIDTHS[end - 1]) / (WIDTHS[end] - WIDTHS[end - 1])
    return (1 - share) * step_s[end - 1] + share * step_s[end]
