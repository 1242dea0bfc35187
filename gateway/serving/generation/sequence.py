"""One answer being written, and what the scheduler decides for a turn."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVarTuple

from gateway import clock, metrics
from gateway.errors import EngineFailed, GatewayError
from gateway.jobs import Delta, SequenceDelta, SequenceParams, Stage, Timings
from gateway.serving.generation.memory import MARGIN
from gateway.serving.lane import Turn

Ts = TypeVarTuple("Ts")


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a job: waiting, running or ended. Its deltas go to the job's one inbox.

    Only the first choice of a job has `timings`. `row` is its id in the engine.
    """

    params: SequenceParams
    index: int
    inbox: asyncio.Queue[Delta | GatewayError]
    rank: float = 0.0
    timings: Timings | None = None
    request: str = ""  # whose rows take turns with other requests'
    row: int | None = None
    is_over: bool = False
    is_in_line: bool = False  # to join, or to join again
    is_held: bool = False  # it has KV, or is being read, and may not run now
    tokens: int = 0
    length: int = 0  # in tokens, prompt and answer: what its memory is counted by
    preemptions: int = 0
    turn_began: int = 0  # at so many tokens, where rows take turns
    stuck_since: float | None = None  # when memory that only others hold was first missed
    # When it came, joined, or had its first token.
    since: float = field(default_factory=clock.now)

    @property
    def stage(self) -> Stage:
        """Return what is being done with it, or was done last."""
        if self.row is None:
            return Stage.QUEUE
        return Stage.DECODE if self.tokens else Stage.PREFILL

    @property
    def is_waiting(self) -> bool:
        """Return True if it has yet to join the batch."""
        return self.row is None and not self.is_over

    @property
    def used(self) -> int:
        """Return how many tokens it has read and written."""
        return len(self.params.prompt) + self.tokens

    @property
    def whole(self) -> int:
        """Return the tokens of its prompt and of its longest possible answer."""
        return len(self.params.prompt) + self.params.max_tokens

    @property
    def will_decode(self) -> bool:
        """Return True if it decodes once it is read, as its answer is longer than one token."""
        return self.whole - self.used > 1

    @property
    def needs_more(self) -> bool:
        """Return True if it will soon have more tokens than its memory was counted for."""
        return self.length < min(self.whole, self.used + MARGIN)

    def cap_tokens(self) -> int:
        """End the answer where its memory ends, and return that many tokens."""
        most = self.length - len(self.params.prompt)
        self.params = replace(self.params, max_tokens=most)
        return most

    @property
    def is_bound(self) -> bool:
        """Return True if a grammar constrains it."""
        return self.params.grammar is not None

    def preempt(self) -> None:
        """Note that its KV is freed, and that its prompt waits to be read again."""
        self.preemptions += 1
        self.is_held = False
        self.stuck_since = None
        if self.timings is not None:
            self.timings.preemptions += 1

    def join(self, turn: Turn) -> None:
        """Note that it joins in this turn."""
        now = clock.now()
        waited_s = now - self.since
        lane_s = max(0.0, min(turn.waited_s, turn.gained - self.since))
        if self.timings is not None:
            self.timings.add(Stage.QUEUE, max(0.0, waited_s - lane_s))
            self.timings.add(Stage.LANE, lane_s)
        self.since = now

    def deliver(self, delta: SequenceDelta, model: str) -> None:
        """Pass on what a step wrote; `model` is named in an error."""
        if delta.error is not None:
            self.end(EngineFailed(model, delta.error))
            return
        self.is_over = delta.finish_reason is not None
        self.tokens += delta.tokens
        if self.timings is not None:
            self._time(self.timings, model)
        self.inbox.put_nowait(
            Delta(
                self.index,
                delta.text,
                delta.tokens,
                delta.finish_reason,
                reasoning=delta.reasoning,
                call=delta.call,
                logprobs=delta.logprobs,
                reasoning_tokens=delta.reasoning_tokens,
                # Every choice reads the same prompt, which is counted once.
                cached_tokens=0 if self.index else delta.cached_tokens,
                prompt=delta.prompt,
            )
        )

    def _time(self, timings: Timings, model: str) -> None:
        if timings.first_token is None:
            now = timings.first_token = clock.now()
            timings.add(Stage.PREFILL, now - self.since)
            metrics.of(metrics.FIRST_TOKEN_SECONDS, model).observe(now - timings.started)
            self.since = now
        if self.is_over:
            seconds = clock.now() - self.since
            timings.add(Stage.DECODE, seconds)
            if self.tokens > 1:
                each_s = seconds / (self.tokens - 1)
                metrics.of(metrics.OUTPUT_TOKEN_SECONDS, model).observe(each_s)

    def end(self, error: GatewayError) -> None:
        """End it with an error, unless it has ended."""
        if not self.is_over:
            self.is_over = True
            self.inbox.put_nowait(error)


def size(*rows: Iterable[Sequence]) -> tuple[int, int]:
    """Return, as powers of two, the number of sequences and the longest one's tokens."""
    lengths = [len(row.params.prompt) + row.tokens for some in rows for row in some]
    return len(lengths).bit_length(), max(lengths, default=0).bit_length()


@dataclass(slots=True)
class SchedulerOutput:
    """What a turn does before its passes: which sequences join, leave, park, resume, are preempted,
    rejoin, and are capped at so many tokens. `forgets`: kept prefixes are freed.
    """

    loop: asyncio.AbstractEventLoop
    joining: list[Sequence] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    rejoining: list[Sequence] = field(default_factory=list)
    capped: list[tuple[int, int]] = field(default_factory=list)
    forgets: bool = False

    def post(self, function: Callable[[*Ts], None], *news: *Ts) -> None:
        """Call a function on the loop's thread, from the lane's."""
        self.loop.call_soon_threadsafe(function, *news)
