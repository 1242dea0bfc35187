"""Join, step, deliver, leave: continuous batching of one chat model's rows."""

import asyncio
import contextlib
import threading
from collections import abc
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
)
from dataclasses import dataclass, replace
from functools import partial

from gateway import clock, logs, metrics
from gateway.errors import (
    ContextLengthExceeded,
    EngineFailed,
    GatewayError,
    NoRoom,
    Unavailable,
)
from gateway.jobs import (
    Compiled,
    Delta,
    GenerateJob,
    Pass,
    Sampling,
    SequenceDelta,
    SequenceParams,
    Stage,
    Usage,
    Verdict,
)
from gateway.serving.admission import until_deadline
from gateway.serving.budget import Budget
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.memory import RowCosts, RowMemory, longest_chunk
from gateway.serving.generation.policy import GenerationLimits, prefill_goes_first, rank
from gateway.serving.generation.queue import JobQueue
from gateway.serving.generation.scheduler import Scheduler
from gateway.serving.generation.sequence import SchedulerOutput, Sequence, size
from gateway.serving.generation.steps import Steps
from gateway.serving.generation.verdicts import Verdicts
from gateway.serving.lane import Lane, Turn
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokenize import TokenPool, prompt_kind
from gateway.serving.workers import run_forever

log = logs.get("generation")

JOBS_AT_ONCE = 16  # of one request: a long list of prompts is admitted in slices
PREFILL_FIRST_PASSES = 2  # that a prompt takes at most; it is waited for as long as they may take
RETRY_PAUSE_S = 0.1  # after a turn that failed, as the next may fail too


@dataclass(slots=True)
class Generation:
    """A job under way: what it read, how it is sampled, and its deltas as they come.

    `calls_are_text`: the model may call functions, but the form of its calls is not known;
    `verdicts` judges what no grammar holds, of a choice whose last delta has come.
    """

    usage: Usage
    deltas: AsyncGenerator[Delta, None]
    sampling: Sampling
    verdicts: Verdicts
    calls_are_text: bool = False


class GenerationBatcher:
    """One model's rows. Its turns run while `running` is entered.

    Reading prompts and decoding are two kinds of work, each with a worker and turns of its own:
    neither a long prompt nor many answers keep the other from the lane.
    """

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        lane: Lane,
        pool: TokenPool,
        limits: GenerationLimits,
        grammars: GrammarCache[Compiled],
        memory: RowMemory | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._lane = lane
        self._pool = pool
        self._limits = limits
        self._grammars = grammars
        self._queue = JobQueue(name, limits)
        self._memory = memory or RowMemory(Budget(0), RowCosts())
        self._scheduler = Scheduler(name, self._cap_batch(limits), self._memory)
        self._stirred = {kind: asyncio.Event() for kind in ("prefill", "decode")}
        self._decode_waits_since: float | None = None
        self._has_warned = False
        self._news = threading.Event()  # rows that leave, for the lane's thread
        self._steps = Steps(
            name,
            engine,
            self._news,
            chunk_tokens=limits.prefill_chunk_tokens,
            pass_limit_s=limits.pass_limit_s,
            on_join=self._on_join,
            deliver=self._deliver,
            on_settle=self._on_settle,
            on_fault=self._on_fault,
        )
        self.verdict: Verdict | None = None  # of the model's self-test, where there is one
        self._was_batched = self.is_batched

    @property
    def rows(self) -> int:
        """Return how many rows the engine has."""
        return self._engine.rows

    @property
    def tickets(self) -> int:
        """Return how many rows wait to join, or for their turn."""
        return self._scheduler.waiting + self._scheduler.parked

    @property
    def is_short(self) -> bool:
        """Return True while a row waits for memory."""
        return self._scheduler.is_wanting

    @property
    def is_batched(self) -> bool:
        """Return True while rows run together, False once they run one at a time."""
        return self._engine.is_batched

    def _cap_batch(self, limits: GenerationLimits) -> GenerationLimits:
        return limits if self.is_batched else replace(limits, max_batch_size=1)

    def note_batching(self) -> None:
        """Let rows join one at a time once the engine no longer runs them together."""
        if self._was_batched and not self.is_batched:
            self._was_batched = False
            log.warning("batching_ended", model=self._name)
            self.adopt(self._limits)

    def _on_fault(self, error: str) -> None:
        """Log the exception of a pass, whose rows are read again."""
        metrics.of(metrics.BATCH_FAULTS, self._name).inc()
        log.warning("batch_fault", model=self._name, error=error)
        self.note_batching()

    def adopt(self, limits: GenerationLimits) -> None:
        """Apply other limits, also to what runs."""
        self._limits = limits
        self._scheduler.limits = self._cap_batch(limits)
        self._queue.adopt(limits)
        self._steps.chunk_tokens = limits.prefill_chunk_tokens
        self._steps.pace.limit_s = limits.pass_limit_s
        self._memory.adopt(longest_chunk(limits.prefill_chunk_tokens))
        self._stir()

    @contextlib.asynccontextmanager
    async def generate(
        self, job: GenerateJob, refused: Callable[[], None] | None = None
    ) -> AsyncIterator[Generation]:
        """Enter with the prompt accepted; then iterate `deltas`. Leaving drops every row.

        If the queue is full, a job with `refused` calls it and waits for a place until its
        deadline.

        Raises Overloaded when too much waits, BadRequest for what cannot be rendered,
        ContextLengthExceeded for what does not fit and PromptTooLarge for what no memory holds;
        iterating raises DeadlineExceeded and EngineFailed.
        """
        timings = job.caller.timings
        timings.model, timings.stage = self._name, Stage.TOKENISE
        planned = await self._plan(job)
        async with self._queue.place(job.caller, planned, refused):
            for row in planned:
                self._memory.check(self._name, row)
            rows = await self._compile(job, planned)
            inbox: asyncio.Queue[Delta | GatewayError] = asyncio.Queue()
            mine = rank(clock.now(), job.caller.tier, self._limits.tier_head_start_s)
            sequences = [
                Sequence(
                    row,
                    index,
                    inbox,
                    mine,
                    None if index else timings,
                    str(job.caller.number),
                )
                for index, row in enumerate(rows)
            ]
            self._wait(sequences)
            usage = Usage(prompt_tokens=len(rows[0].prompt))
            timings.tokens_in = usage.prompt_tokens
            metrics.of(metrics.TOKENS_IN, self._name).inc(usage.prompt_tokens)
            verdicts = Verdicts(
                self._name, self._engine, self._pool, job, _find_unenforced(rows[0])
            )
            deltas = self._deltas(job, inbox, len(sequences), verdicts)
            warned = self._warn_of_text_calls(rows[0])
            try:
                yield Generation(usage, deltas, rows[0].sampling, verdicts, warned)
            finally:
                timings.stage = next((each.stage for each in sequences if not each.is_over), None)
                self._drop(sequences)

    async def generate_many(
        self, jobs: abc.Sequence[GenerateJob]
    ) -> AsyncGenerator[Usage | Delta, None]:
        """Yield the usage of every job and every delta as it comes, some jobs at a time.

        Choices are numbered job by job. Nothing is yielded before each of the first jobs has been
        admitted or has found the queue full. Only the first job raises Overloaded: the others ask
        once it was admitted, and wait for a place until the deadline. The first error ends all
        jobs, and so does closing the generator.
        """
        news: asyncio.Queue[Usage | Delta | asyncio.Task[None]] = asyncio.Queue()
        waiting = iter(enumerate(jobs))
        slots = min(JOBS_AT_ONCE, len(jobs))
        unasked = set(range(slots))
        all_asked, first_admitted = asyncio.Event(), asyncio.Event()

        def note_asked(place: int) -> None:
            unasked.discard(place)
            if not unasked:
                all_asked.set()

        async def work() -> None:
            for place, job in waiting:
                refused = None
                if place > 0:
                    await first_admitted.wait()
                    # A job with a place must not wait for one that has none.
                    refused = partial(note_asked, place)
                async with (
                    self.generate(job, refused) as generation,
                    contextlib.aclosing(generation.deltas) as deltas,
                ):
                    first_admitted.set()
                    note_asked(place)
                    await all_asked.wait()
                    news.put_nowait(generation.usage)
                    async for delta in deltas:
                        news.put_nowait(replace(delta, index=place * job.n + delta.index))

        workers = [asyncio.create_task(work()) for _ in range(slots)]
        for worker in workers:
            worker.add_done_callback(news.put_nowait)
        under_way = len(workers)
        try:
            while under_way:
                each = await news.get()
                if isinstance(each, asyncio.Task):
                    each.result()  # raises what ended it, if anything did
                    under_way -= 1
                else:
                    yield each
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def count_tokens(self, job: GenerateJob) -> int:
        """Return how many tokens a job's prompt has, be it longer than the model can read.

        Raises BadRequest for what cannot be rendered.
        """
        job.caller.timings.model, job.caller.timings.stage = self._name, Stage.TOKENISE
        try:
            return len((await self._plan(job))[0].prompt)
        except ContextLengthExceeded as error:
            return error.tokens

    async def _plan(self, job: GenerateJob) -> abc.Sequence[SequenceParams]:
        started = clock.now()
        async with until_deadline(job.caller):
            rows = await self._pool.run(self._engine.plan, job, kind=prompt_kind(job))
        job.caller.timings.add(Stage.TOKENISE, clock.now() - started)
        return rows

    def _warn_of_text_calls(self, row: SequenceParams) -> bool:
        """Return True if calls will be text, and log so, once."""
        if row.calls_are_text and not self._has_warned:
            self._has_warned = True
            log.warning("tool_format_unknown", model=self._name, hint="set `tool_parser:`")
        return row.calls_are_text

    async def _compile(
        self, job: GenerateJob, rows: abc.Sequence[SequenceParams]
    ) -> abc.Sequence[SequenceParams]:
        if (grammar := rows[0].grammar) is None:
            return rows
        started, job.caller.timings.stage = clock.now(), Stage.COMPILE
        async with until_deadline(job.caller):
            compiled = await self._grammars.get(grammar)
        job.caller.timings.add(Stage.COMPILE, clock.now() - started)
        return [replace(row, compiled=compiled) for row in rows]

    async def _deltas(
        self,
        job: GenerateJob,
        inbox: asyncio.Queue[Delta | GatewayError],
        choices: int,
        verdicts: Verdicts,
    ) -> AsyncGenerator[Delta, None]:
        written, timings = metrics.of(metrics.TOKENS_OUT, self._name), job.caller.timings
        while choices:
            async with until_deadline(job.caller):
                news = await inbox.get()
            if isinstance(news, GatewayError):
                raise news
            choices -= news.finish_reason is not None
            written.inc(news.tokens)
            timings.tokens_out += news.tokens
            if news.cached_tokens:
                metrics.of(metrics.CACHED_TOKENS, self._name).inc(news.cached_tokens)
            verdicts.add(news)
            yield news

    def _wait(self, sequences: Iterable[Sequence]) -> None:
        self._scheduler.wait(sequences)
        self._stirred["prefill"].set()

    def _drop(self, sequences: abc.Sequence[Sequence]) -> None:
        """Drop every row of a job. One that still runs leaves before the next step."""
        if self._scheduler.drop(sequences):
            self._news.set()
            self._stir()

    def _look_again(self) -> None:
        """Wake the loops if rows wait for memory, or kept prefixes have to be freed."""
        if self.tickets or self._memory.must_forget:
            self._stir()

    def _stir(self) -> None:
        for event in self._stirred.values():
            event.set()

    async def _prefill(self) -> None:
        """Let rows join and read their prompts, a chunk a turn."""
        engine, scheduler = self._engine, self._scheduler
        while True:
            try:
                async with asyncio.timeout_at(scheduler.look_again_at()):
                    await self._stirred["prefill"].wait()
            except TimeoutError:
                scheduler.end_stuck(NoRoom(self._name, ()))
                self._stirred["decode"].set()  # some may end where they stand
            self._stirred["prefill"].clear()
            while engine.is_prefilling or scheduler.may_join:
                if not await self._turn("prefill", self._steps.prefill):
                    break
            if scheduler.is_wanting:
                scheduler.make_room()

    async def _decode(self) -> None:
        """Let rows leave, and give those that run their next tokens."""
        while True:
            await self._stirred["decode"].wait()
            self._stirred["decode"].clear()
            while self._engine.is_decoding or self._scheduler.must_move:
                if self._lets_prefill_go_first():
                    break  # until its turn has ended
                if not await self._turn("decode", self._steps.decode):
                    break
                self._decode_waits_since = None

    def _lets_prefill_go_first(self) -> bool:
        """Return True if the running rows wait for those being read, and note since when."""
        scheduler, now = self._scheduler, clock.now()
        if scheduler.must_move or not self._engine.is_prefilling:
            return False
        self._decode_waits_since = self._decode_waits_since or now
        waited_s = now - self._decode_waits_since
        bound_s = PREFILL_FIRST_PASSES * self._limits.pass_limit_s
        soon = scheduler.count_soon_decoding(PREFILL_FIRST_PASSES * self._steps.pass_tokens)
        return prefill_goes_first(soon, scheduler.decoding, waited_s, bound_s)

    async def _turn(self, kind: str, work: Callable[[SchedulerOutput, Turn], None]) -> bool:
        """Take a turn. Return False if the lane is closed."""
        try:
            async with self._lane.turn(kind) as turn:
                self._news.clear()
                plan = self._scheduler.schedule(turn, may_join=kind == "prefill")
                turn.set_shape((self._name, kind, *size(self._scheduler, plan.joining)))
                try:
                    await turn(work, plan, turn)
                except BaseException:
                    self._wait(sequence for sequence in plan.joining if sequence.is_waiting)
                    raise
        except Unavailable as error:
            self._scheduler.end_all(error)
            return False
        except Exception as error:
            log.error("batch_failed", model=self._name, exc_info=True)
            self._scheduler.end_running(EngineFailed(self._name, str(error)))
            await asyncio.sleep(RETRY_PAUSE_S)
        self.note_batching()
        self._scheduler.hold()
        self._stir()  # what the one did may be work for the other
        return True

    def _on_settle(self, kept: int, reading: frozenset[int]) -> None:
        self._memory.keep(kept)
        self._scheduler.note_reading(reading)

    def _on_join(self, sequence: Sequence, row: int) -> None:
        if not self._scheduler.note_join(sequence, row):
            self._news.set()
            self._stir()

    def _deliver(
        self, did: Pass, kind: str, deltas: abc.Sequence[SequenceDelta], seconds: float
    ) -> None:
        if kind == "decode":
            metrics.of(metrics.BATCH_ROWS, self._name).observe(did.rows)
        elif did.padded_tokens:
            waste = 1 - did.tokens / did.padded_tokens
            metrics.of(metrics.BATCH_PADDING, self._name).observe(waste)
        log.debug(
            "batch",
            kind=kind,
            model=self._name,
            rows=did.rows,
            padded_tokens=did.padded_tokens,
            ms=round(1000 * seconds, 2),
        )
        for delta in deltas:
            if (sequence := self._scheduler.get(delta.sequence_id)) is not None:
                if delta.finish_reason is not None or delta.error is not None:
                    self._scheduler.note_end(delta.sequence_id)
                    self._stirred["prefill"].set()  # there is room
                sequence.deliver(delta, self._name)

    def end(self, error: GatewayError) -> None:
        """End every row with an error."""
        self._scheduler.end_all(error)
        self._stir()

    def _end_failed(self, error: Exception) -> None:
        self.end(EngineFailed(self._name, str(error)))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["GenerationBatcher"]:
        """Take turns while entered; rows that still run at the end fail with Unavailable."""
        workers = [
            asyncio.create_task(run_forever(f"{kind} {self._name}", work, self._end_failed))
            for kind, work in (("prefill", self._prefill), ("decode", self._decode))
        ]
        try:
            with self._memory.watch(self._look_again):
                yield self
        finally:
            self._news.set()  # a turn under way ends after its step
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            self._scheduler.end_all(
                Unavailable(f"The model `{self._name}` was unloaded meanwhile.", retry_after_s=1)
            )
            self._memory.release()


def _find_unenforced(row: SequenceParams) -> abc.Sequence[str]:
    return row.compiled.unenforced if row.compiled is not None else ()
