"""One choice of a job: serving's half of an answer, from its place in the queue to its end."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gateway import clock, metrics
from gateway.clock import Stage, Timings
from gateway.errors import DeadlineExceeded, EngineFailed, GatewayError, OutOfMemory
from gateway.jobs.chat import Delta, GenerateJob
from gateway.jobs.steps import SequenceParams
from gateway.serving.admission import until_deadline
from gateway.serving.generation.memory import MARGIN, Layout
from gateway.serving.lane import Turn
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokenize import ThreadPools


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a job: waiting, in the batch or ended."""

    params: SequenceParams
    inbox: asyncio.Queue[Delta | GatewayError]  # shared by all choices of the job
    rank: float = 0.0
    timings: Timings | None = None  # the job's timings; only its first choice has them
    request: str = ""  # requests take turns to have a sequence join
    id: int = 0  # the sequence's id; 0 until it joins
    is_over: bool = False
    is_queued: bool = False  # True: it waits to join, or to join again
    is_held: bool = False  # True: it is in the batch but parked, or to be parked after prefill
    tokens: int = 0
    length: int = 0  # tokens of prompt and answer that memory is held for
    preemptions: int = 0
    rotated_at: int = 0  # `tokens` at the time it began to decode, or resumed
    stuck_since: float | None = None  # time it first lacked memory that only other models hold
    # The time at which it arrived, joined, or had its first token.
    since: float = field(default_factory=clock.now)

    @property
    def index(self) -> int:
        return self.params.index

    @property
    def stage(self) -> Stage:
        """Return its present stage, or its last."""
        if not self.id:
            return Stage.QUEUE
        return Stage.DECODE if self.tokens else Stage.PREFILL

    @property
    def counts_prompt(self) -> bool:
        """Return True if its prompt counts for the usage."""
        # All choices share one prompt, and so do all steps into the labels of a question.
        step = self.params.step
        return self.index == 0 if step is None else step.is_first

    @property
    def used(self) -> int:
        """Return the tokens of its prompt and its answer so far."""
        return len(self.params.prompt) + self.tokens

    @property
    def image_tokens(self) -> int:
        """Return the tokens of its prompt that stand for images."""
        return sum(image.tokens for image in self.params.images)

    @property
    def max_length(self) -> int:
        """Return the tokens of its prompt and of its longest possible answer."""
        return len(self.params.prompt) + self.params.max_tokens

    @property
    def run(self) -> int:
        """Return the tokens that it has decoded since it began or resumed."""
        return self.tokens - self.rotated_at

    @property
    def will_decode(self) -> bool:
        """Return True if it decodes after prefill, which yields its answer's first token."""
        return self.max_length - self.used > 1

    @property
    def needs_more(self) -> bool:
        """Return True if it will soon have more tokens than memory is held for."""
        return self.length < min(self.max_length, self.used + MARGIN)

    def cap_at_memory(self) -> int:
        """Limit the answer to the tokens that memory is held for, and return that limit."""
        limit = self.length - len(self.params.prompt)
        self.params = replace(self.params, max_tokens=limit)
        return limit

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

    @property
    def age(self) -> tuple[float, int]:
        # The oldest is first.
        return self.rank, self.index

    def join(self, sequence_id: int, turn: Turn) -> None:
        """Record that it joins the batch in this turn, under this id."""
        self.id = sequence_id
        now = clock.now()
        lane_s = max(0.0, min(turn.waited_s, turn.gained - self.since))
        if self.timings is not None:
            self.timings.add(Stage.QUEUE, self.since, max(self.since, now - lane_s))
            self.timings.add(Stage.LANE, now - lane_s, now)
            self.timings.stage = Stage.PREFILL
        self.since = now

    def deliver(self, delta: Delta, model: str) -> None:
        """Put a delta in the inbox, and count it for `model`, or for the adapter that it is of."""
        if self.params.adapter is not None:
            model = self.params.adapter.model
        if delta.error is not None:
            error: GatewayError = EngineFailed(model, delta.error)
            if delta.is_out_of_memory:
                error = OutOfMemory(model)
            self.end(error)
            return
        self.is_over = delta.finish_reason is not None
        self.tokens += delta.tokens
        if self.timings is not None:
            self._time(self.timings, model)
        if delta.finish_reason is not None and self.params.step is None:
            metrics.of(metrics.FINISHED, model, delta.finish_reason).inc()
            metrics.of(metrics.ANSWER_LENGTH, model).observe(self.tokens)
        if not self.counts_prompt:
            delta = replace(delta, cached_tokens=0, kept_tokens=0, unkept_tokens=0)
        self.inbox.put_nowait(delta)

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


@dataclass(frozen=True, slots=True)
class DeltaReader:
    """Takes the deltas of one job from its inbox."""

    engine: GenerationEngine
    pool: ThreadPools
    job: GenerateJob
    sequences: Sequence[SequenceParams]  # one for each choice
    inbox: asyncio.Queue[Delta | GatewayError]
    warn_once: Callable[..., None]  # logs an event, with its details
    _held: dict[int, list[Delta]] = field(default_factory=lambda: defaultdict(list))

    def end_at_deadline(self) -> asyncio.TimerHandle:
        """Have `next` raise DeadlineExceeded at the caller's deadline; cancel the handle before."""
        # One timer for the answer: one for each token would cost as much as sending it.
        caller, loop = self.job.caller, asyncio.get_running_loop()
        error = DeadlineExceeded(caller.allowed_s)
        return loop.call_later(caller.deadline - clock.now(), self.inbox.put_nowait, error)

    async def next(self) -> Sequence[Delta]:
        """Wait for the next deltas. Raises the job's error, and DeadlineExceeded."""
        delta = await self.inbox.get()
        if isinstance(delta, GatewayError):
            raise delta
        if not self.sequences[0].reads_whole:
            return (delta,)
        async with until_deadline(self.job.caller):
            return await self._read_whole(delta)

    async def _read_whole(self, delta: Delta) -> Sequence[Delta]:
        """Hold an answer's text back until its end, and then return all of its parts.

        The checkpoint's own patterns read it, so on another thread and in another process than
        the lane's. A cut answer makes no call.
        """
        held, end = self._held[delta.index], delta.finish_reason
        held.append(delta)
        if end is None:
            return (replace(delta, text="", logprobs=()),)
        text, is_cut = "".join(each.text for each in held), end == "length" or bool(delta.stop)
        params, read = self.sequences[delta.index], self.engine.read_answer
        parts, problem = await self.pool.run(read, params, text, is_cut, kind="readings")
        if problem is not None:
            self.warn_once(problem[0], why=problem[1])
        if any(part.call is not None for part in parts):
            end = "tool_calls"
        # Logprobs of thoughts and calls do not belong to the content, and which ones they are is
        # unknown.
        is_text = all(part.call is None and not part.reasoning for part in parts)
        logprobs = [each for delta in held for each in delta.logprobs if is_text]
        return (*parts, replace(delta, text="", logprobs=logprobs, finish_reason=end))


def lay_out(
    choices: Iterable[Choice],
    lengths: Mapping[Choice, int] = MappingProxyType({}),
    *,
    parking: Collection[Choice] = (),
    resuming: Collection[Choice] = (),
) -> Layout:
    """Return the layout of sequences in memory, as it is, or as it would be with other lengths or
    after parking and resuming some.
    """
    batched: list[int] = []
    single: list[int] = []
    image_tokens = 0
    for choice in choices:
        image_tokens += choice.image_tokens
        is_held = (choice.is_held or choice in parking) and choice not in resuming
        rows_alike = single if is_held or not choice.will_decode else batched
        rows_alike.append(lengths.get(choice, choice.length))
    return Layout(batched, single, image_tokens)


def batch_shape(choices: Iterable[Choice]) -> tuple[int, int]:
    """Return the bit lengths of the number of sequences and of the longest one's tokens."""
    lengths = [choice.used for choice in choices]
    return len(lengths).bit_length(), max(lengths, default=0).bit_length()
