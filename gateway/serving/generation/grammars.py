"""Compiled grammars, one model's: equal ones compile once, the last used are kept.

Compiling runs on worker threads with a deadline, few at a time, so that one that is slow keeps
neither the others from theirs nor the machine from its work.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway import clock, metrics
from gateway.errors import BadRequest, Overloaded
from gateway.jobs import Grammar

T = TypeVar("T")

ERRORS_LAST_S = 60.0


class Run(Protocol):
    """Calls a function on a worker thread: a `TokenPool`'s `compile`."""

    def __call__(self, function: Callable[[Grammar], T], grammar: Grammar, /) -> Awaitable[T]:
        """Call it there and await its result."""


class _Turns:
    """So many turns at once; of those who wait the one with the least to compile is next.

    First come, first served would let a few large ones keep every small one from its own.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._came = itertools.count()

    async def acquire(self, size: int) -> None:
        """Wait for a turn, which `release` ends."""
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._came), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it came at this very moment
            raise

    def release(self) -> None:
        """Give the turn to the next."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


@dataclass(slots=True)
class _Entry(Generic[T]):
    """A grammar's task, and when it ended; both outcomes are kept."""

    task: "asyncio.Task[T]"
    failed_at: float | None = None


class GrammarCache(Generic[T]):
    """A bounded cache, least recently used out first, for one model.

    `compile` is called through `run`. Whoever asks for a grammar that is being compiled waits
    for that; leaving stops nobody else's wait. Refusals are remembered for a minute.
    """

    def __init__(
        self,
        model: str,
        compile: Callable[[Grammar], T],  # noqa: A002
        run: Run,
        *,
        size: int = 64,
        timeout_s: float = 10.0,
        at_once: int = 2,
    ) -> None:
        self._model = model
        self._compile = compile
        self._run = run
        self._size = max(1, size)
        self._timeout_s = timeout_s
        self._entries: OrderedDict[Grammar, _Entry[T]] = OrderedDict()
        self._turns = _Turns(at_once)

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, grammar: Grammar) -> T:
        """Return the compiled grammar.

        Raises BadRequest when it cannot be compiled or takes too long, and Overloaded when other
        grammars took all the time there was.
        """
        entry = self._entries.get(grammar)
        if entry is not None and self._is_stale(entry):
            entry = None
        if entry is None:
            self._count("miss")
            entry = self._begin(grammar)
        else:
            self._count("hit" if entry.task.done() else "joined")
        self._entries.move_to_end(grammar)
        return await asyncio.shield(entry.task)

    def _begin(self, grammar: Grammar) -> _Entry[T]:
        entry = _Entry(asyncio.create_task(self._made(grammar), name="grammar"))
        entry.task.add_done_callback(lambda task: self._ended(grammar, entry))
        self._entries[grammar] = entry
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return entry

    async def _made(self, grammar: Grammar) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire(len(grammar.source))
        except TimeoutError:
            raise Overloaded(
                "Other grammars are being compiled; ask again.", retry_after_s=self._timeout_s
            ) from None
        started = clock.now()
        work = asyncio.ensure_future(self._run(self._compile, grammar))
        work.add_done_callback(self._release)
        try:
            done, _ = await asyncio.wait([work], timeout=self._timeout_s)
            if not done:
                raise TimeoutError
            return work.result()
        except TimeoutError:
            self._count("timeout")
            raise BadRequest(
                f"The grammar was not compiled within {self._timeout_s:g} seconds: simplify it.",
                part="answer_form",
                code="invalid_json_schema" if grammar.kind == "json_schema" else "invalid_grammar",
            ) from None
        finally:
            metrics.of(metrics.GRAMMAR_COMPILE_SECONDS, self._model).observe(clock.now() - started)

    def _release(self, work: "asyncio.Future[T]") -> None:
        self._turns.release()
        if not work.cancelled():
            work.exception()  # seen: whoever waited for it may have stopped

    def _ended(self, grammar: Grammar, entry: _Entry[T]) -> None:
        error = None if entry.task.cancelled() else entry.task.exception()
        if error is None and not entry.task.cancelled():
            return
        entry.failed_at = clock.now()
        if isinstance(error, BadRequest):
            self._count("refused")
        elif self._entries.get(grammar) is entry:
            del self._entries[grammar]  # not the grammar's fault, so not remembered

    def _is_stale(self, entry: _Entry[T]) -> bool:
        return entry.failed_at is not None and clock.now() - entry.failed_at > ERRORS_LAST_S

    def _count(self, outcome: str) -> None:
        metrics.of(metrics.GRAMMARS, self._model, outcome).inc()
