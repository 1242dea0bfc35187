"""Join, step, deliver, leave: continuous batching of one chat model's rows."""

import asyncio
import bisect
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gateway import logs, metrics
from gateway.errors import EngineFailed, GatewayError, Unavailable
from gateway.jobs import Delta, GenerateJob, Pass, RowDelta, RowJob, Stage, Usage
from gateway.serving.admission import Admission, until_deadline
from gateway.serving.generation_batches import GenerationLimits, rank, take_rows
from gateway.serving.grammars import GrammarCache
from gateway.serving.lane import Lane, Turn
from gateway.serving.ports import GenerationEngine
from gateway.serving.tickets import Moves, Ticket
from gateway.serving.tokens import TokenPool

log = logs.get("generation")

STEPS_PER_TURN = 16  # when nobody else waits: one hop to the lane's thread costs 0.1 ms


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
    ) -> None:
        self._name = name
        self._engine = engine
        self._lane = lane
        self._pool = pool
        self._limits = limits
        self._grammars = grammars
        self._admission = Admission(name, limits.queue_limit)
        self._waiting: list[Ticket] = []  # by rank
        self._running: dict[int, Ticket] = {}
        self._leaving: list[int] = []
        self._stirred = {kind: asyncio.Event() for kind in ("prefill", "decode")}
        self._news = threading.Event()  # rows that leave, for the lane's thread

    @contextlib.asynccontextmanager
    async def generate(self, job: GenerateJob) -> AsyncIterator[Generation]:
        """Enter with the prompt accepted; then iterate `deltas`. Leaving drops every row.

        Raises Overloaded when too many requests wait, BadRequest for what cannot be rendered
        and ContextLengthExceeded for what does not fit; iterating raises DeadlineExceeded and
        EngineFailed.
        """
        timings = job.caller.timings
        timings.model = self._name
        with self._admission.admitted():
            rows = await self._planned(job)
            inbox: asyncio.Queue[Delta | GatewayError] = asyncio.Queue()
            place = rank(metrics.now(), job.caller.tier, self._limits.tier_head_start_s)
            tickets = [
                Ticket(row, index, inbox, place, None if index else timings)
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
                self._drop(tickets)

    async def _planned(self, job: GenerateJob) -> Sequence[RowJob]:
        timings = job.caller.timings
        async with until_deadline(job.caller):
            started = metrics.now()
            rows = await self._pool.run(self._engine.plan, job)
            planned = metrics.now()
            timings.add(Stage.TOKENISE, planned - started)
            if (grammar := rows[0].grammar) is None:
                return rows
            compiled = await self._grammars.get(grammar, param=_param(job))
            timings.add(Stage.COMPILE, metrics.now() - planned)
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
        for ticket in tickets:
            bisect.insort(self._waiting, ticket, key=lambda each: each.rank)
        self._stirred["prefill"].set()

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        """Let every row of a job go; one that still runs leaves before the next step."""
        unfinished = [ticket for ticket in tickets if not ticket.is_over]
        if not unfinished:
            return
        for ticket in unfinished:
            ticket.is_over = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif ticket.row is not None:
                del self._running[ticket.row]
                self._leave(ticket.row)
            # else it is joining this very moment: `_joined` sends it away

    def _leave(self, row: int) -> None:
        self._leaving.append(row)
        self._news.set()
        self._stir()

    def _stir(self) -> None:
        for event in self._stirred.values():
            event.set()

    def _chosen(self) -> list[int]:
        """Choose who joins, by place."""
        running = [ticket.is_bound for ticket in self._running.values()]
        return take_rows(
            [ticket.is_bound for ticket in self._waiting],
            room=self._limits.max_batch_size - len(running),
            bound_room=self._limits.structured_rows - sum(running),
        )

    async def _prefill(self) -> None:
        """Let rows join and read their prompts, a chunk a turn."""
        while True:
            await self._stirred["prefill"].wait()
            self._stirred["prefill"].clear()
            while self._engine.is_prefilling or self._chosen():
                await self._turn("prefill", self._read_chunk)

    async def _decode(self) -> None:
        """Let rows leave, and give those that run their next tokens."""
        while True:
            await self._stirred["decode"].wait()
            self._stirred["decode"].clear()
            while self._engine.is_decoding or self._leaving:
                await self._turn("decode", self._take_steps)

    async def _turn(self, kind: str, work: Callable[[Moves, Turn], None]) -> None:
        try:
            async with self._lane.turn(kind) as turn:
                moves = self._moves(turn, may_join=kind == "prefill")
                try:
                    await turn(work, moves, turn)
                except BaseException:
                    self._wait(ticket for ticket in moves.joining if ticket.row is None)
                    raise
        except Exception as error:
            log.error("batch_failed", model=self._name, exc_info=True)
            self._end_all(EngineFailed(self._name, str(error)))
        self._stir()  # what the one did may be work for the other

    def _moves(self, turn: Turn, *, may_join: bool) -> Moves:
        """Choose only now, holding the lane, who joins."""
        self._news.clear()
        moves = Moves(asyncio.get_running_loop(), leaving=self._leaving)
        self._leaving = []
        chosen = self._chosen() if may_join else []
        moves.joining = [self._waiting[i] for i in chosen]
        for i in reversed(chosen):
            self._waiting.pop(i).join(turn)
        return moves

    def _move(self, moves: Moves) -> None:
        for row in moves.leaving:
            self._engine.leave(row)
        for ticket in moves.joining:
            moves.tell(self._joined, ticket, self._engine.join(ticket.job))

    def _read_chunk(self, moves: Moves, turn: Turn) -> None:
        """One turn, on the lane's thread. Our share may be more than one chunk, while others wait
        for the lane.
        """
        engine = self._engine
        self._move(moves)
        while engine.is_prefilling:
            started = metrics.now()
            deltas = engine.prefill(self._limits.prefill_chunk_tokens)
            moves.tell(self._deliver, engine.last_pass, "prefill", deltas, metrics.now() - started)
            if self._news.is_set() or turn.is_up or not turn.is_contended:
                break
        self._settle(turn)

    def _take_steps(self, moves: Moves, turn: Turn) -> None:
        """One turn, on the lane's thread: some steps, until another's turn is due or rows leave."""
        engine = self._engine
        self._move(moves)
        for _ in range(STEPS_PER_TURN):
            if not engine.is_decoding:
                break
            started = metrics.now()
            deltas = engine.decode()
            moves.tell(self._deliver, engine.last_pass, "decode", deltas, metrics.now() - started)
            if self._news.is_set() or turn.is_up:
                break
        self._settle(turn)

    def _settle(self, turn: Turn) -> None:
        """What was begun is ours: it must not run in another's turn."""
        if turn.is_contended:
            self._engine.settle()

    def _joined(self, ticket: Ticket, row: int) -> None:
        ticket.row = row
        if ticket.is_over:
            self._leave(row)
        else:
            self._running[row] = ticket

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
            if (ticket := self._running.get(delta.row)) is not None:
                if delta.finish_reason is not None or delta.error is not None:
                    del self._running[delta.row]
                    self._stirred["prefill"].set()  # there is room
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
        workers = [
            asyncio.create_task(self._prefill(), name=f"prefill {self._name}"),
            asyncio.create_task(self._decode(), name=f"decode {self._name}"),
        ]
        try:
            yield self
        finally:
            self._news.set()  # a turn under way ends after its step
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            self._end_all(
                Unavailable(f"The model `{self._name}` was unloaded meanwhile.", retry_after_s=1)
            )


def _param(job: GenerateJob) -> str:
    """Name the field that asked for the grammar."""
    return "tools" if job.calling is not None and job.grammar is None else job.grammar_param
