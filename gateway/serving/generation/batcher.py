"""Join, step, deliver, leave: continuous batching of one chat model's rows."""

import asyncio
import contextlib
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial

from gateway import logs, metrics
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
from gateway.serving.generation.memory import RowCosts, RowMemory
from gateway.serving.generation.policy import GenerationLimits, prefill_goes_first, rank
from gateway.serving.generation.queue import JobQueue
from gateway.serving.generation.scheduler import Rows
from gateway.serving.generation.sequence import Moves, Ticket, size
from gateway.serving.generation.steps import Steps
from gateway.serving.generation.verdicts import Verdicts
from gateway.serving.lane import Lane, Turn
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokenize import TokenPool, prompt_kind
from gateway.serving.workers import unending

log = logs.get("generation")

JOBS_AT_ONCE = 16  # of one request: a long list of prompts is admitted in slices
PREFILL_FIRST_PASSES = 2  # while more rows are being read than run, at the longest
BREATH_S = 0.1  # after a turn that failed: the next may fail as well, and so on


@dataclass(slots=True)
class Generation:
    """A job under way: what it read, how it is sampled, and its deltas as they come.

    `calls_are_text` tells that the model may call, but that its form of calls is not known;
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
        self._rows = Rows(name, self._limited(limits), self._memory)
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
            joined=self._joined,
            deliver=self._deliver,
            settled=self._settled,
            faulted=self._faulted,
        )
        self.verdict: Verdict | None = None  # of the model's self-test, where there is one
        self._was_batched = self.is_batched

    @property
    def rows(self) -> int:
        """Count the rows in the batch, as the engine does."""
        return self._engine.rows

    @property
    def tickets(self) -> int:
        """Count the rows that wait to join, or for their turn."""
        return self._rows.waiting + self._rows.parked

    @property
    def is_short(self) -> bool:
        """Return True while a row waits for memory."""
        return self._rows.is_wanting

    @property
    def is_batched(self) -> bool:
        """Return True while rows run together, False once they run one at a time."""
        return self._engine.is_batched

    def _limited(self, limits: GenerationLimits) -> GenerationLimits:
        return limits if self.is_batched else replace(limits, max_batch_size=1)

    def note_batching(self) -> None:
        """See whether the engine runs rows together still: they join one at a time if not."""
        if self._was_batched and not self.is_batched:
            self._was_batched = False
            log.warning("batching_ended", model=self._name)
            self.adopt(self._limits)

    def _faulted(self, said: str) -> None:
        """Note what a pass has thrown, whose rows are read again."""
        metrics.of(metrics.BATCH_FAULTS, self._name).inc()
        log.warning("batch_fault", model=self._name, error=said)
        self.note_batching()

    def adopt(self, limits: GenerationLimits) -> None:
        """Take over other limits, as it runs."""
        self._limits = limits
        self._rows.limits = self._limited(limits)
        self._queue.adopt(limits)
        self._steps.chunk_tokens = limits.prefill_chunk_tokens
        self._steps.pace.limit_s = limits.pass_limit_s
        self._memory.adopt(limits.prefill_chunk_tokens)
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
        planned = await self._planned(job)
        async with self._queue.place(job.caller, planned, refused):
            for row in planned:
                self._memory.check(self._name, row)
            rows = await self._compiled(job, planned)
            inbox: asyncio.Queue[Delta | GatewayError] = asyncio.Queue()
            mine = rank(metrics.now(), job.caller.tier, self._limits.tier_head_start_s)
            tickets = [
                Ticket(
                    row,
                    index,
                    inbox,
                    mine,
                    None if index else timings,
                    str(job.caller.number),
                )
                for index, row in enumerate(rows)
            ]
            self._wait(tickets)
            usage = Usage(prompt_tokens=len(rows[0].prompt))
            timings.tokens_in = usage.prompt_tokens
            metrics.of(metrics.TOKENS_IN, self._name).inc(usage.prompt_tokens)
            verdicts = Verdicts(self._name, self._engine, self._pool, job, _unenforced(rows[0]))
            deltas = self._deltas(job, inbox, len(tickets), verdicts)
            warned = self._warned(rows[0])
            try:
                yield Generation(usage, deltas, rows[0].sampling, verdicts, warned)
            finally:
                timings.stage = next((each.stage for each in tickets if not each.is_over), None)
                self._drop(tickets)

    async def generate_many(
        self, jobs: Sequence[GenerateJob]
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
            return len((await self._planned(job))[0].prompt)
        except ContextLengthExceeded as error:
            return error.tokens

    async def _planned(self, job: GenerateJob) -> Sequence[SequenceParams]:
        started = metrics.now()
        async with until_deadline(job.caller):
            rows = await self._pool.run(self._engine.plan, job, kind=prompt_kind(job))
        job.caller.timings.add(Stage.TOKENISE, metrics.now() - started)
        return rows

    def _warned(self, row: SequenceParams) -> bool:
        """Return True if calls will be text, and log so, once."""
        if row.calls_are_text and not self._has_warned:
            self._has_warned = True
            log.warning("tool_format_unknown", model=self._name, hint="set `tool_parser:`")
        return row.calls_are_text

    async def _compiled(
        self, job: GenerateJob, rows: Sequence[SequenceParams]
    ) -> Sequence[SequenceParams]:
        if (grammar := rows[0].grammar) is None:
            return rows
        started, job.caller.timings.stage = metrics.now(), Stage.COMPILE
        async with until_deadline(job.caller):
            compiled = await self._grammars.get(grammar, param=_param(job))
        job.caller.timings.add(Stage.COMPILE, metrics.now() - started)
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

    def _wait(self, tickets: Iterable[Ticket]) -> None:
        self._rows.wait(tickets)
        self._stirred["prefill"].set()

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        """Let every row of a job go; one that still runs leaves before the next step."""
        if self._rows.drop(tickets):
            self._news.set()
            self._stir()

    def _look_again(self) -> None:
        """See whether there is memory for those who wait, or need for what is kept."""
        if self.tickets or self._memory.must_forget:
            self._stir()

    def _stir(self) -> None:
        for event in self._stirred.values():
            event.set()

    async def _prefill(self) -> None:
        """Let rows join and read their prompts, a chunk a turn."""
        engine, rows = self._engine, self._rows
        while True:
            try:
                async with asyncio.timeout_at(rows.look_again_at()):
                    await self._stirred["prefill"].wait()
            except TimeoutError:
                rows.end_stuck(NoRoom(self._name, ()))
                self._stirred["decode"].set()  # some may end where they stand
            self._stirred["prefill"].clear()
            while engine.is_prefilling or rows.may_join:
                if not await self._turn("prefill", self._steps.read):
                    break
            if rows.is_wanting:
                rows.make_room()

    async def _decode(self) -> None:
        """Let rows leave, and give those that run their next tokens."""
        while True:
            await self._stirred["decode"].wait()
            self._stirred["decode"].clear()
            while self._engine.is_decoding or self._rows.must_move:
                if self._lets_prefill_go_first():
                    break  # until its turn has ended
                if not await self._turn("decode", self._steps.write):
                    break
                self._decode_waits_since = None

    def _lets_prefill_go_first(self) -> bool:
        """Decide whether the rows that run wait for those being read, and since when they do."""
        rows, now = self._rows, metrics.now()
        if rows.must_move or not self._engine.is_prefilling:
            return False
        self._decode_waits_since = self._decode_waits_since or now
        waited_s = now - self._decode_waits_since
        bound_s = PREFILL_FIRST_PASSES * self._limits.pass_limit_s
        return prefill_goes_first(rows.reading, rows.decoding, waited_s, bound_s)

    async def _turn(self, kind: str, work: Callable[[Moves, Turn], None]) -> bool:
        """Take a turn; tell whether there is a lane to take turns of."""
        try:
            async with self._lane.turn(kind) as turn:
                self._news.clear()
                moves = self._rows.moves(turn, may_join=kind == "prefill")
                turn.announce((self._name, kind, *size(self._rows, moves.joining)))
                try:
                    await turn(work, moves, turn)
                except BaseException:
                    self._wait(ticket for ticket in moves.joining if ticket.is_waiting)
                    raise
        except Unavailable as error:
            self._rows.end_all(error)
            return False
        except Exception as error:
            log.error("batch_failed", model=self._name, exc_info=True)
            self._rows.end_running(EngineFailed(self._name, str(error)))
            await asyncio.sleep(BREATH_S)
        self.note_batching()
        self._rows.hold()
        self._stir()  # what the one did may be work for the other
        return True

    def _settled(self, kept: int, reading: frozenset[int]) -> None:
        self._memory.keep(kept)
        self._rows.settled(reading)

    def _joined(self, ticket: Ticket, row: int) -> None:
        if not self._rows.joined(ticket, row):
            self._news.set()
            self._stir()

    def _deliver(
        self, did: Pass, kind: str, deltas: Sequence[SequenceDelta], seconds: float
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
            if (ticket := self._rows.get(delta.sequence_id)) is not None:
                if delta.finish_reason is not None or delta.error is not None:
                    self._rows.ended(delta.sequence_id)
                    self._stirred["prefill"].set()  # there is room
                ticket.deliver(delta, self._name)

    def end(self, error: GatewayError) -> None:
        """End every row, with an error."""
        self._rows.end_all(error)
        self._stir()

    def _failed(self, error: Exception) -> None:
        self.end(EngineFailed(self._name, str(error)))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["GenerationBatcher"]:
        """Take turns while entered; rows that still run at the end are told so."""
        workers = [
            asyncio.create_task(unending(f"{kind} {self._name}", work, self._failed))
            for kind, work in (("prefill", self._prefill), ("decode", self._decode))
        ]
        try:
            with self._memory.watched(self._look_again):
                yield self
        finally:
            self._news.set()  # a turn under way ends after its step
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            self._rows.end_all(
                Unavailable(f"The model `{self._name}` was unloaded meanwhile.", retry_after_s=1)
            )
            self._memory.release()


def _param(job: GenerateJob) -> str:
    """Name the field that asked for the grammar."""
    return "tools" if job.calling is not None and job.grammar is None else job.grammar_param


def _unenforced(row: SequenceParams) -> Sequence[str]:
    return row.compiled.unenforced if row.compiled is not None else ()
