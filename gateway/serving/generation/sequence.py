"""One answer being written, and the scheduler's output for a turn."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVarTuple

from gateway import clock, metrics
from gateway.errors import EngineFailed, GatewayError, OutOfMemory
from gateway.jobs import Delta, SequenceDelta, SequenceParams, Stage, Timings
from gateway.serving.generation.memory import MARGIN
from gateway.serving.lane import Turn

Ts = TypeVarTuple("Ts")


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a job: waiting, running or ended.

    All choices of a job share one `inbox` of deltas. Only the first has `timings`. `row` is its id
    in the engine.
    """

    params: SequenceParams
    index: int
    inbox: asyncio.Queue[Delta | GatewayError]
    rank: float = 0.0
    timings: Timings | None = None
    request: str = ""  # requests take turns to have a row join
    row: int | None = None
    is_over: bool = False
    is_queued: bool = False  # to join, or to join again
    is_held: bool = False  # in the batch but not to decode now: parked, or parked after prefill
    tokens: int = 0
    length: int = 0  # in tokens, prompt and answer, that memory is held for
    preemptions: int = 0
    turn_began: int = 0  # `tokens` when its turn to decode began
    stuck_since: float | None = None  # when it first lacked memory that only other models hold
    # When it arrived, joined, or had its first token.
    since: float = field(default_factory=clock.now)

    @property
    def stage(self) -> Stage:
        """Return its present stage, or its last."""
        if self.row is None:
            return Stage.QUEUE
        return Stage.DECODE if self.tokens else Stage.PREFILL

    @property
    def is_waiting(self) -> bool:
        """Return True if it has not joined the batch yet."""
        return self.row is None and not self.is_over

    @property
    def counts_prompt(self) -> bool:
        """Return True if its prompt counts for the usage: all choices have the same prompt, and all
        steps into the labels of a question.
        """
        step = self.params.step
        return self.index == 0 if step is None else step.is_first

    @property
    def used(self) -> int:
        """Return the tokens of its prompt and its answer so far."""
        return len(self.params.prompt) + self.tokens

    @property
    def max_length(self) -> int:
        """Return the tokens of its prompt and of its longest possible answer."""
        return len(self.params.prompt) + self.params.max_tokens

    @property
    def will_decode(self) -> bool:
        """Return True if it decodes after prefill, which yields its answer's first token."""
        return self.max_length - self.used > 1

    @property
    def needs_more(self) -> bool:
        """Return True if it will soon have more tokens than memory is held for."""
        return self.length < min(self.max_length, self.used + MARGIN)

    def cap_tokens(self) -> int:
        """End the answer where its memory ends, and return that many tokens."""
        most = self.length - len(self.params.prompt)
        self.params = replace(self.params, max_tokens=most)
        return most

    @property
    def is_constrained(self) -> bool:
        """Return True if it has a grammar."""
        return self.params.grammar is not None

    def preempt(self) -> None:
        """Record that its KV is freed, and that it waits to be read again."""
        self.preemptions += 1
        self.is_held = False
        self.stuck_since = None
        if self.timings is not None:
            self.timings.preemptions += 1
            self.timings.stage = Stage.QUEUE

    def join(self, turn: Turn) -> None:
        """Record that it joins the batch in this turn."""
        now = clock.now()
        lane_s = max(0.0, min(turn.waited_s, turn.gained - self.since))
        if self.timings is not None:
            self.timings.add(Stage.QUEUE, self.since, max(self.since, now - lane_s))
            self.timings.add(Stage.LANE, now - lane_s, now)
            self.timings.stage = Stage.PREFILL
        self.since = now

    def deliver(self, delta: SequenceDelta, model: str) -> None:
        """Put a step's output in the inbox, as that of a `model` or of an adapter of it."""
        if self.params.adapter is not None:
            model = self.params.adapter.model
        if delta.error is not None:
            failed = OutOfMemory(model) if delta.is_out_of_memory else None
            self.end(failed or EngineFailed(model, delta.error))
            return
        self.is_over = delta.finish_reason is not None
        self.tokens += delta.tokens
        if self.timings is not None:
            self._time(self.timings, model)
        if delta.finish_reason is not None and self.params.step is None:
            metrics.of(metrics.FINISHED, model, delta.finish_reason).inc()
            metrics.of(metrics.ANSWER_LENGTH, model).observe(self.tokens)
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
                cached_tokens=delta.cached_tokens if self.counts_prompt else 0,
                kept_tokens=delta.kept_tokens if self.counts_prompt else 0,
                stop=delta.stop,
                prompt=delta.prompt,
                judgement=delta.judgement,
            )
        )

    def _time(self, timings: Timings, model: str) -> None:
        if timings.first_token is None:
            now = timings.first_token = clock.now()
            timings.add(Stage.PREFILL, self.since, now)
            timings.stage = Stage.DECODE
            metrics.of(metrics.FIRST_TOKEN_SECONDS, model).observe(now - timings.started)
            self.since = now
        if self.is_over:
            now = clock.now()
            timings.add(Stage.DECODE, self.since, now)
            if self.tokens > 1:
                each_s = (now - self.since) / (self.tokens - 1)
                metrics.of(metrics.OUTPUT_TOKEN_SECONDS, model).observe(each_s)

    def end(self, error: GatewayError) -> None:
        """End it with an error unless it has ended."""
        if not self.is_over:
            self.is_over = True
            self.inbox.put_nowait(error)


def batch_shape(*rows: Iterable[Sequence]) -> tuple[int, int]:
    """Return the bit lengths of the number of sequences and of the longest one's tokens."""
    lengths = [len(row.params.prompt) + row.tokens for some in rows for row in some]
    return len(lengths).bit_length(), max(lengths, default=0).bit_length()


@dataclass(slots=True)
class SchedulerOutput:
    """What a turn does before its passes: the sequences that join, leave, are parked, resumed,
    preempted, rejoin, and whose tokens are capped. `clears_prefixes`: the prefix cache is freed.
    `reading` has the lengths of the prompts in prefill then.
    """

    loop: asyncio.AbstractEventLoop
    joining: list[Sequence] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    rejoining: list[Sequence] = field(default_factory=list)
    capped: list[tuple[int, int]] = field(default_factory=list)
    clears_prefixes: bool = False
    reading: list[int] = field(default_factory=list)

    def post(self, function: Callable[[*Ts], None], *args: *Ts) -> None:
        """Call a function on the loop's thread, from the lane's."""
        self.loop.call_soon_threadsafe(function, *args)
