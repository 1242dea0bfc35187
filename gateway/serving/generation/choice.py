"""The state of one choice of a job, and the reader of a job's deltas."""

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
    timings: Timings | None = None  # only the job's first choice has them
    request: str = ""
    id: int = 0  # the engine's id of the sequence; 0 until the choice joins
    is_over: bool = False
    is_queued: bool = False
    is_held: bool = False  # in the batch, and parked or about to be parked after prefill
    tokens: int = 0
    length: int = 0  # tokens, of prompt and answer, for which memory is reserved
    preemptions: int = 0
    rotated_at: int = 0  # value of `tokens` when the choice last began or resumed decoding
    stuck_since: float | None = None  # when it began to lack memory that only other models hold
    since: float = field(default_factory=clock.now)  # when the current stage began

    @property
    def index(self) -> int:
        return self.params.index

    @property
    def stage(self) -> Stage:
        if not self.id:
            return Stage.QUEUE
        return Stage.DECODE if self.tokens else Stage.PREFILL

    @property
    def counts_prompt(self) -> bool:
        # Choices of a job, and the steps that score a question's labels, share one prompt.
        step = self.params.step
        return self.index == 0 if step is None else step.is_first

    @property
    def used(self) -> int:
        """Return the number of the choice's tokens so far, prompt and answer."""
        return len(self.params.prompt) + self.tokens

    @property
    def image_tokens(self) -> int:
        return sum(image.tokens for image in self.params.images)

    @property
    def max_length(self) -> int:
        return len(self.params.prompt) + self.params.max_tokens

    @property
    def run(self) -> int:
        """Return the number of tokens since the choice began or resumed decoding."""
        return self.tokens - self.rotated_at

    @property
    def will_decode(self) -> bool:
        """Return True if the choice may get more than the one token that prefill yields."""
        return self.max_length - self.used > 1

    @property
    def needs_more(self) -> bool:
        """Return True if the choice will soon exceed its reserved memory."""
        return self.length < min(self.max_length, self.used + MARGIN)

    def cap_at_memory(self) -> int:
        """Limit the answer to the reserved memory, and return the limit in tokens."""
        limit = self.length - len(self.params.prompt)
        self.params = replace(self.params, max_tokens=limit)
        return limit

    @property
    def is_constrained(self) -> bool:
        return self.params.grammar is not None

    def preempt(self) -> None:
        self.preemptions += 1
        self.is_held = False
        self.stuck_since = None
        if self.timings is not None:
            self.timings.preemptions += 1
            self.timings.stage = Stage.QUEUE

    @property
    def age(self) -> tuple[float, int]:
        return self.rank, self.index

    def join(self, sequence_id: int, turn: Turn) -> None:
        self.id = sequence_id
        now = clock.now()
        lane_s = max(0.0, min(turn.waited_s, turn.gained - self.since))
        if self.timings is not None:
            self.timings.add(Stage.QUEUE, self.since, max(self.since, now - lane_s))
            self.timings.add(Stage.LANE, now - lane_s, now)
            self.timings.stage = Stage.PREFILL
        self.since = now

    def deliver(self, delta: Delta, model: str) -> None:
        """Put a delta in the inbox, and count it for the choice's adapter or else for `model`."""
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
        if not self.is_over:
            self.is_over = True
            self.inbox.put_nowait(error)


@dataclass(frozen=True, slots=True)
class DeltaReader:
    """The reader of one job's deltas, which arrive in its inbox."""

    engine: GenerationEngine
    pool: ThreadPools
    job: GenerateJob
    sequences: Sequence[SequenceParams]
    inbox: asyncio.Queue[Delta | GatewayError]
    warn_once: Callable[..., None]
    _held: dict[int, list[Delta]] = field(default_factory=lambda: defaultdict(list))

    def end_at_deadline(self) -> asyncio.TimerHandle:
        """Start a timer that makes `next` raise DeadlineExceeded at the caller's deadline."""
        # A timer per token would cost as much as sending the token.
        caller, loop = self.job.caller, asyncio.get_running_loop()
        error = DeadlineExceeded(caller.allowed_s)
        return loop.call_later(caller.deadline - clock.now(), self.inbox.put_nowait, error)

    async def next(self) -> Sequence[Delta]:
        """Wait for the next deltas. Raises the job's error, or DeadlineExceeded."""
        delta = await self.inbox.get()
        if isinstance(delta, GatewayError):
            raise delta
        if not self.sequences[0].reads_whole:
            return (delta,)
        async with until_deadline(self.job.caller):
            return await self._read_whole(delta)

    async def _read_whole(self, delta: Delta) -> Sequence[Delta]:
        """Return a delta without text, or the parsed parts of an answer that has ended."""
        # Parsing runs in another process, since the checkpoint's patterns may be slow or hang.
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
        # It is unknown which logprobs belong to thoughts or calls, so then none are returned.
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
    """Return the memory layout of sequences with these lengths, parked or resumed."""
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
    lengths = [choice.used for choice in choices]
    return len(lengths).bit_length(), max(lengths, default=0).bit_length()
