"""Computes rates and percentiles from answers, whose times are in seconds."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request."""

    started: float
    ended: float
    arrivals: Sequence[float] = ()  # times at which the pieces of a stream arrived
    units: int = 0  # vectors, pairs or tokens
    error: str | None = None
    prompt: int = 0  # tokens of the prompt, `cached` of them from the server's cache
    cached: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def first(self) -> float:
        return self.arrivals[0] - self.started


@dataclass(frozen=True, slots=True)
class Window:
    """The measured interval. Clients are also busy before and after it."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __contains__(self, moment: object) -> bool:
        return isinstance(moment, float) and self.start <= moment < self.end


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of times, in seconds, by the nearest-rank method."""

    p50: float
    p95: float
    p99: float

    def in_ms(self) -> dict[str, float]:
        return {name: seconds * 1000 for name, seconds in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one load in a window. A spread is None if nothing was measured."""

    requests: int
    requests_per_s: float
    units_per_s: float
    latency: Spread | None
    first: Spread | None
    errors: Mapping[str, int] = field(default_factory=dict)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` % of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(*(percentile(values, percent) for percent in (50, 95, 99)))


def measure(answers: Sequence[Answer], window: Window) -> Figures:
    """Compute the figures of a window. Errors outside the window count, too."""
    good = [answer for answer in answers if answer.error is None]
    ended = [answer for answer in good if answer.ended in window]
    opened = [answer for answer in good if answer.arrivals and answer.arrivals[0] in window]
    return Figures(
        requests=len(ended),
        requests_per_s=len(ended) / window.seconds,
        units_per_s=sum(_units_inside(answer, window) for answer in good) / window.seconds,
        latency=spread([answer.seconds for answer in ended]),
        first=spread([answer.first for answer in opened]),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )


def _units_inside(answer: Answer, window: Window) -> float:
    # Answers may take longer than the window. A stream's share is that of its pieces inside the
    # window. Any other answer's share is that of its time.
    if answer.arrivals:
        inside = sum(moment in window for moment in answer.arrivals)
        return answer.units * inside / len(answer.arrivals)
    if not answer.seconds:
        return 0.0
    spent = min(answer.ended, window.end) - max(answer.started, window.start)
    return answer.units * max(0.0, spent) / answer.seconds
