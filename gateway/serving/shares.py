"""Whose turn it is: each kind of work that waits gets its share of the lane's time."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType


class Shares:
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
        """Give the place of the kind that is next; of equals the first to wait."""
        starts = [self._start(kind) for kind in waiting]
        return starts.index(min(starts))

    def begin(self, kind: str) -> None:
        """Note that a turn of this kind begins."""
        self._now = self._clocks[kind] = self._start(kind)

    def end(self, kind: str, seconds: float) -> None:
        """Note that the turn begun last ends, after so many seconds."""
        self._clocks[kind] = self._after(kind, seconds)

    def is_up(self, kind: str, seconds: float, waiting: Iterable[str]) -> bool:
        """Tell whether one of those that wait is due before a turn goes on that began last.

        Another's wish for the same kind of work ends it too.
        """
        mine = self._after(kind, seconds)
        return any(other == kind or self._start(other) <= mine for other in waiting)

    def _start(self, kind: str) -> float:
        return max(self._now, self._clocks.get(kind, 0.0))

    def _after(self, kind: str, seconds: float) -> float:
        seconds = min(seconds, self._most_s.get(kind, seconds))
        return self._now + seconds / self._weights.get(kind, 1.0)
