"""The one clock: monotonic seconds, for deadlines and for everything that is timed."""

from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter as now

__all__ = ["Stage", "Timings", "now"]


class Stage(StrEnum):
    """The stages of a request's time, by their names in headers, metrics, logs and traces."""

    PARSE = "parse"
    LOAD = "load"
    TOKENIZE = "tokenise"
    COMPILE = "compile"
    QUEUE = "queue"
    LANE = "lane"
    INFERENCE = "inference"
    PREFILL = "prefill"
    DECODE = "decode"
    SERIALIZE = "serialise"


@dataclass(slots=True)
class Timings:
    """When a request was in each stage, recorded by the code that does the stage's work.

    An embedding has INFERENCE, an answer PREFILL (until its first token) and DECODE. Times are of
    the monotonic clock.
    """

    started: float = field(default_factory=now)
    model: str | None = None
    # The present stage, or the one at which the request ended early; None before and after.
    stage: Stage | None = None
    # All passes are one interval, and so are all waits between them.
    intervals: list[tuple[Stage, float, float]] = field(default_factory=list)
    first_token: float | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    # The number of times that its sequences' KV was freed, and their tokens read again.
    preemptions: int = 0
    # The timings of the other jobs of the same request.
    parallel: list["Timings"] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return all the request's tokens so far, prompt and completion."""
        return self.tokens_in + self.tokens_out + sum(part.tokens for part in self.parallel)

    @property
    def seconds(self) -> dict[Stage, float]:
        """Return the seconds spent in each stage, in the order of their ends."""
        seconds: dict[Stage, float] = {}
        for stage, started, ended in self.intervals:
            seconds[stage] = seconds.get(stage, 0.0) + (ended - started)
        return seconds

    @property
    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds of each stage so far, and the `total`."""
        stages = {str(stage): round(1000 * s, 2) for stage, s in self.seconds.items()}
        stages["total"] = round(1000 * (now() - self.started), 2)
        return stages

    def add(self, stage: Stage, started: float, ended: float | None = None) -> None:
        """Add a stage's time, from one reading of the monotonic clock to another, or to now."""
        self.intervals.append((stage, started, now() if ended is None else ended))
