"""Join, step, deliver, leave: continuous batching of one chat model's rows."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gateway import logs, metrics
from gateway.errors import EngineFailed, GatewayError, NoRoom, Unavailable
from gateway.jobs import Delta, GenerateJob, Pass, RowDelta, RowJob, Stage, Usage
from gateway.serving.admission import Admission, Noun, until_deadline
from gateway.serving.budget import Budget
from gateway.serving.generation.batches import GenerationLimits, rank
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.memory import RowCosts, RowMemory
from gateway.serving.generation.rows import Rows
from gateway.serving.generation.steps import Steps
from gateway.serving.generation.tickets import Moves, Ticket, size
from gateway.serving.lane import Lane, Turn
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokens import TokenPool
from gateway.serving.workers import unending

log = logs.get("generation")

BREATH_S = 0.1  # after a turn that failed: the next may fail as well, and so on


@dataclass(slots=True)
class Generation:
    """A job under way: what it read, and its deltas as they come."""

    usage: Usage
    deltas: AsyncGenerator[Delta, None]


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
        grammars: GrammarCache[object],
        memory: RowMemory | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._lane = lane
        self._pool = pool
        self._limits = limits
        self._grammars = grammars
        self._tokens = Admission(name, Noun.TOKENS, limits.queue_max_tokens)
        self._memory = memory or RowMemory(Budget(0), RowCosts())
        self._rows = Rows(limits, self._memory)
        self._stirred = {kind: asyncio.Event() for kind in ("prefill", "decode")}
        self._news = threading.Event()  # rows that leave, for the lane's thread
        self._steps = Steps(
            name,
            engine,
            self._news,
            chunk_tokens=limits.prefill_chunk_tokens,
            joined=self._joined,
            deliver=self._deliver,
            kept=self._memory.keep,
        )

    @property
    def rows(self) -> int:
        """Count the rows in the batch, as the engine does."""
        return self._engine.rows

    @property
    def tickets(self) -> int:
        """Count the rows that wait to join."""
        return self._rows.waiting

    @contextlib.asynccontextmanager
    async def generate(self, job: GenerateJob) -> AsyncIterator[Generation]:
        """Enter with the prompt accepted; then iterate `deltas`. Leaving drops every row.

        Raises Overloaded when too much waits, BadRequest for what cannot be rendered and
        ContextLengthExceeded for what does not fit; iterating raises DeadlineExceeded and
        EngineFailed.
        """
        timings = job.caller.timings
        timings.model, timings.stage = self._name, Stage.TOKENISE
        planned = await self._planned(job)
        with self._tokens.admitted(sum(len(row.prompt) for row in planned)):
            rows = [self._memory.admitted(row) for row in await self._compiled(job, planned)]
            inbox: asyncio.Queue[Delta | GatewayError] = asyncio.Queue()
            mine = rank(metrics.now(), job.caller.tier, self._limits.tier_head_start_s)
            tickets = [
                Ticket(
                    row,
                    index,
                    inbox,
                    mine,
                    None if index else timings,
                    length=self._memory.counted(row),
                )
                for index, row in enumerate(rows)
            ]
            self._wait(tickets)
            usage = Usage(prompt_tokens=len(rows[0].prompt))
            timings.tokens_in = usage.prompt_tokens
            metrics.of(metrics.TOKENS_IN, self._name).inc(usage.prompt_tokens)
            deltas = self._deltas(job, inbox, len(tickets))
            try:
                yield Generation(usage, deltas)
            finally:
                timings.stage = next((each.stage for each in tickets if not each.is_over), None)
                self._drop(tickets)

    async def _planned(self, job: GenerateJob) -> Sequence[RowJob]:
        started = metrics.now()
        async with until_deadline(job.caller):
            rows = await self._pool.run(self._engine.plan, job)
        job.caller.timings.add(Stage.TOKENISE, metrics.now() - started)
        return rows

    async def _compiled(self, job: GenerateJob, rows: Sequence[RowJob]) -> Sequence[RowJob]:
        if (grammar := rows[0].grammar) is None:
            return rows
        started, job.caller.timings.stage = metrics.now(), Stage.COMPILE
        async with until_deadline(job.caller):
            compiled = await self._grammars.get(grammar, param=_param(job))
        job.caller.timings.add(Stage.COMPILE, metrics.now() - started)
        return [replace(row, compiled=compiled) for row in rows]

    async def _deltas(
        self, job: GenerateJob, inbox: asyncio.Queue[Delta | GatewayError], choices: int
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
        if self._rows.waiting or self._memory.must_forget:
            self._stirred["prefill"].set()

    def _stir(self) -> None:
        for event in self._stirred.values():
            event.set()

    async def _prefill(self) -> None:
        """Let rows join and read their prompts, a chunk a turn."""
        engine, rows = self._engine, self._rows
        while True:
            try:
                async with asyncio.timeout_at(rows.give_up_at()):
                    await self._stirred["prefill"].wait()
            except TimeoutError:
                rows.end_stuck(NoRoom(self._name, ()))
            self._stirred["prefill"].clear()
            while engine.is_prefilling or rows.chosen() or rows.may_forget:
                if not await self._turn("prefill", self._steps.read):
                    break
            if rows.is_wanting:
                rows.make_room()

    async def _decode(self) -> None:
        """Let rows leave, and give those that run their next tokens."""
        while True:
            await self._stirred["decode"].wait()
            self._stirred["decode"].clear()
            while self._engine.is_decoding or self._rows.leaving:
                if not await self._turn("decode", self._steps.write):
                    break

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
        self._rows.hold()
        self._stir()  # what the one did may be work for the other
        return True

    def _joined(self, ticket: Ticket, row: int) -> None:
        if not self._rows.joined(ticket, row):
            self._news.set()
            self._stir()

    def _deliver(self, did: Pass, kind: str, deltas: Sequence[RowDelta], seconds: float) -> None:
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
            if (ticket := self._rows.get(delta.row)) is not None:
                if delta.finish_reason is not None or delta.error is not None:
                    self._rows.ended(delta.row)
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
