"""Join, step, deliver, leave: continuous batching of one chat model's rows."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace

from gateway import logs, metrics
from gateway.errors import (
    EngineFailed,
    GatewayError,
    Unavailable,
)
from gateway.jobs import Delta, GenerateJob, RowDelta, RowJob, Usage
from gateway.serving.admission import Admission, until_deadline
from gateway.serving.grammars import GrammarCache
from gateway.serving.lane import Lane
from gateway.serving.ports import GenerationEngine
from gateway.serving.tickets import Moves, Ticket, take_rows
from gateway.serving.tokens import TokenPool

log = logs.get("generation")

STEPS_PER_TURN = 16  # when nobody else waits: one hop to the lane's thread costs 0.1 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """How many rows run together, how many of them bound to a grammar, and how long one turn
    may read prompts.
    """

    max_batch_size: int
    structured_rows: int = 1
    prefill_chunk_tokens: int
    queue_limit: int


@dataclass(slots=True)
class Generation:
    """A job under way: what it read, and its deltas as they come."""

    usage: Usage
    deltas: AsyncGenerator[Delta, None]


class GenerationBatcher:
    """One model's rows. Its turns run while `running` is entered."""

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        lane: Lane,
        pool: TokenPool,
        limits: GenerationLimits,
        grammars: GrammarCache[object],
    ) -> None:
        self._name = name
        self._engine = engine
        self._lane = lane
        self._pool = pool
        self._limits = limits
        self._grammars = grammars
        self._admission = Admission(name, limits.queue_limit)
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._leaving: list[int] = []
        self._stirred = asyncio.Event()
        self._news = threading.Event()  # the same, for the lane's thread

    @contextlib.asynccontextmanager
    async def generate(self, job: GenerateJob) -> AsyncIterator[Generation]:
        """Enter with the prompt accepted; then iterate `deltas`. Leaving drops every row.

        Raises Overloaded when too many requests wait, BadRequest for what cannot be rendered
        and ContextLengthExceeded for what does not fit; iterating raises DeadlineExceeded and
        EngineFailed.
        """
        with self._admission.admitted():
            rows = await self._planned(job)
            inbox: asyncio.Queue[Delta | GatewayError] = asyncio.Queue()
            tickets = [Ticket(row, index, inbox) for index, row in enumerate(rows)]
            self._waiting.extend(tickets)
            self._stir()
            usage = Usage(prompt_tokens=len(rows[0].prompt))
            metrics.TOKENS_IN.labels(self._name).inc(usage.prompt_tokens)
            deltas = self._deltas(job, inbox, len(tickets))
            try:
                yield Generation(usage, deltas)
            finally:
                self._drop(tickets)

    async def _planned(self, job: GenerateJob) -> Sequence[RowJob]:
        async with until_deadline(job.caller):
            rows = await self._pool.run(self._engine.plan, job)
            if (grammar := rows[0].grammar) is None:
                return rows
            compiled = await self._grammars.get(grammar, param=_param(job))
            return [replace(row, compiled=compiled) for row in rows]

    async def _deltas(
        self, job: GenerateJob, inbox: asyncio.Queue[Delta | GatewayError], choices: int
    ) -> AsyncGenerator[Delta, None]:
        while choices:
            async with until_deadline(job.caller):
                news = await inbox.get()
            if isinstance(news, GatewayError):
                raise news
            choices -= news.finish_reason is not None
            metrics.TOKENS_OUT.labels(self._name).inc(news.tokens)
            yield news

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        """Let every row of a job go; one that still runs leaves before the next step."""
        unfinished = [ticket for ticket in tickets if not ticket.is_over]
        if not unfinished:
            return
        metrics.CANCELLED.labels(self._name).inc()
        for ticket in unfinished:
            ticket.is_over = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif ticket.row is not None:
                del self._running[ticket.row]
                self._leaving.append(ticket.row)
            # else it is joining this very moment: `_joined` sends it away
        self._stir()

    def _stir(self) -> None:
        self._stirred.set()
        self._news.set()

    @property
    def _is_idle(self) -> bool:
        engine = self._engine
        return not (self._waiting or self._leaving or engine.is_prefilling or engine.is_decoding)

    async def _work(self) -> None:
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while not self._is_idle:
                try:
                    await self._turn()
                except Exception as error:
                    log.error("batch_failed", model=self._name, exc_info=True)
                    self._end_all(EngineFailed(self._name, str(error)))

    async def _turn(self) -> None:
        kind = "decode" if self._engine.is_decoding else "prefill"
        async with self._lane.turn(kind) as run:
            self._news.clear()
            moves = self._moves()
            try:
                await run(self._steps, moves, asyncio.get_running_loop())
            except BaseException:
                self._waiting.extendleft(t for t in moves.joining if t.row is None)
                raise

    def _moves(self) -> Moves:
        """Choose only now, holding the lane, who joins."""
        moves = Moves(leaving=self._leaving)
        self._leaving = []
        running = [ticket.is_bound for ticket in self._running.values()]
        chosen = take_rows(
            [ticket.is_bound for ticket in self._waiting],
            room=self._limits.max_batch_size - len(running),
            bound_room=self._limits.structured_rows - sum(running),
        )
        moves.joining = [self._waiting[i] for i in chosen]
        for i in reversed(chosen):
            del self._waiting[i]
        return moves

    def _steps(self, moves: Moves, loop: asyncio.AbstractEventLoop) -> None:
        """One turn, on the lane's thread: moves, a prefill chunk, then decode steps.

        Another's wish for the lane, or news of our own rows, ends the turn after a step.
        """
        engine = self._engine
        for row in moves.leaving:
            engine.leave(row)
        for ticket in moves.joining:
            loop.call_soon_threadsafe(self._joined, ticket, engine.join(ticket.job))
        if engine.is_prefilling:
            loop.call_soon_threadsafe(
                self._deliver, engine.prefill(self._limits.prefill_chunk_tokens)
            )
        for _ in range(STEPS_PER_TURN):
            if not engine.is_decoding:
                return
            loop.call_soon_threadsafe(self._deliver, engine.decode())
            if self._lane.is_wanted or self._news.is_set() or engine.is_prefilling:
                return

    def _joined(self, ticket: Ticket, row: int) -> None:
        ticket.row = row
        if ticket.is_over:
            self._leaving.append(row)
            self._stir()
        else:
            self._running[row] = ticket

    def _deliver(self, deltas: Sequence[RowDelta]) -> None:
        if deltas:
            metrics.BATCH_ROWS.labels(self._name).observe(len(deltas))
        for delta in deltas:
            if (ticket := self._running.get(delta.row)) is not None:
                if delta.finish_reason is not None or delta.error is not None:
                    del self._running[delta.row]
                    self._stir()
                ticket.deliver(delta, self._name)

    def end(self, error: GatewayError) -> None:
        """End every row, with an error."""
        self._end_all(error)
        self._stir()

    def _end_all(self, error: GatewayError) -> None:
        for ticket in (*self._waiting, *self._running.values()):
            ticket.end(error)
        self._leaving += self._running
        self._waiting.clear()
        self._running.clear()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["GenerationBatcher"]:
        """Take turns while entered; rows that still run at the end are told so."""
        worker = asyncio.create_task(self._work(), name=f"generate {self._name}")
        try:
            yield self
        finally:
            worker.cancel()
            await asyncio.wait([worker])
            self._end_all(
                Unavailable(f"The model `{self._name}` was unloaded meanwhile.", retry_after_s=1)
            )


def _param(job: GenerateJob) -> str:
    """Name the field that asked for the grammar."""
    return "tools" if job.calling is not None and job.grammar is None else job.grammar_param
