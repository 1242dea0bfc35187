"""The monotonic clock, in seconds, used for all deadlines and measurements."""

from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter as now

__all__ = ["Stage", "Timings", "now"]


class Stage(StrEnum):
    """The stages of a request, with the names that headers, metrics, logs and traces use."""

    PARSE = "parse"
    LOAD = "load"
    TOKENIZE = "tokenise"
    IMAGES = "images"  # in the place of TOKENIZE for a prompt with images
    COMPILE = "compile"
    QUEUE = "queue"
    LANE = "lane"
    INFERENCE = "inference"
    PREFILL = "prefill"
    DECODE = "decode"
    SERIALIZE = "serialise"


@dataclass(slots=True)
class Timings:
    """The times at which a request was in each stage, recorded by the code that does the work.

    An embeddings request has an INFERENCE stage. A chat request has PREFILL (until its first token)
    and DECODE instead. Times are readings of the monotonic clock.
    """

    started: float = field(default_factory=now)
    model: str | None = None
    # The current stage, or the stage in which the request was cancelled or failed; None before the
    # first stage and after a complete answer.
    stage: Stage | None = None
    # Start and end of each stage. An embeddings request has one interval for all its passes, and
    # one for all its waits between them.
    intervals: list[tuple[Stage, float, float]] = field(default_factory=list)
    first_token: float | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    # How often a sequence of the request was preempted: the sequence's KV was freed, and its tokens
    # were prefilled again.
    preemptions: int = 0
    # The timings of the request's jobs after the first one, which uses this object.
    parallel: list["Timings"] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return the number of the request's tokens so far, prompt and completion."""
        return self.tokens_in + self.tokens_out + sum(part.tokens for part in self.parallel)

    @property
    def seconds(self) -> dict[Stage, float]:
        """Return the seconds spent in each stage, in the order in which the stages ended."""
        seconds: dict[Stage, float] = {}
        for stage, started, ended in self.intervals:
            seconds[stage] = seconds.get(stage, 0.0) + (ended - started)
        return seconds

    @property
    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds spent in each stage, and as `total` those since the start."""
        stages = {str(stage): round(1000 * s, 2) for stage, s in self.seconds.items()}
        stages["total"] = round(1000 * (now() - self.started), 2)
        return stages

    def add(self, stage: Stage, started: float, ended: float | None = None) -> None:
        """Record an interval of a stage, between two readings of the clock (default: until now)."""
        self.intervals.append((stage, started, now() if ended is None else ended))
