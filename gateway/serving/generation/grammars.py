"""An LRU cache of one model's compiled grammars, which worker threads compile."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway import clock, metrics
from gateway.errors import BadRequest, Overloaded, Unavailable
from gateway.jobs.chat import Grammar

T = TypeVar("T")

ERRORS_LAST_S = 60.0
WAITS = 15  # a request waits for its grammar up to this many times `timeout_s`
WAITS_BEHIND = 5  # a grammar waits for other grammars up to this many times `timeout_s`
AGAIN_S = 2.0


@dataclass(slots=True)
class _Entry(Generic[T]):
    task: "asyncio.Task[T]"
    failed_at: float | None = None


class GrammarCache(Generic[T]):
    """A cache of at most `size` compiled grammars, each of which is compiled once."""

    def __init__(
        self,
        model: str,
        # Raises TimeoutError for a grammar that takes over `timeout_s` of processor time.
        compile: Callable[[Grammar], T],  # noqa: A002
        run: Callable[[Callable[[Grammar], T], Grammar], Awaitable[T]],
        *,
        size: int = 64,
        timeout_s: float = 2.0,
        at_once: int = 2,
    ) -> None:
        self._model = model
        self._compile = compile
        self._run = run
        self._size = max(1, size)
        self._timeout_s = timeout_s
        self._entries: OrderedDict[Grammar, _Entry[T]] = OrderedDict()
        self._slots = asyncio.Semaphore(at_once)

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, grammar: Grammar) -> T:
        """Return the compiled grammar.

        Raises BadRequest if it cannot be compiled in time, Overloaded after a long wait for others,
        and Unavailable while it is still being compiled.
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
        if not entry.task.done():
            await asyncio.wait([entry.task], timeout=WAITS * self._timeout_s)
        if not entry.task.done():
            self._count("timeout")
            raise Unavailable(
                "The grammar is still being compiled; ask again.", retry_after_s=AGAIN_S
            )
        return entry.task.result()

    def _begin(self, grammar: Grammar) -> _Entry[T]:
        entry = _Entry(asyncio.create_task(self._compile_in_thread(grammar), name="grammar"))
        entry.task.add_done_callback(lambda _: self._note_failure(grammar, entry))
        self._entries[grammar] = entry
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return entry

    async def _compile_in_thread(self, grammar: Grammar) -> T:
        try:
            async with asyncio.timeout(WAITS_BEHIND * self._timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded(
                "Other grammars are being compiled; ask again.", retry_after_s=self._timeout_s
            ) from None
        started = clock.now()
        work = asyncio.ensure_future(self._run(self._compile, grammar))
        work.add_done_callback(self._release)
        try:
            return await work
        except TimeoutError:
            self._count("timeout")
            raise BadRequest(
                f"The grammar takes over {self._timeout_s:g} seconds of processor time to compile: "
                "simplify it.",
                part="answer_form",
                code="invalid_json_schema" if grammar.kind == "json_schema" else "invalid_grammar",
            ) from None
        finally:
            metrics.of(metrics.GRAMMAR_COMPILE_SECONDS, self._model).observe(clock.now() - started)

    def _release(self, work: "asyncio.Future[T]") -> None:
        self._slots.release()
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not log it

    def _note_failure(self, grammar: Grammar, entry: _Entry[T]) -> None:
        error = None if entry.task.cancelled() else entry.task.exception()
        if error is None and not entry.task.cancelled():
            return
        entry.failed_at = clock.now()
        if isinstance(error, BadRequest):
            self._count("refused")
        elif self._entries.get(grammar) is entry:
            del self._entries[grammar]  # the next call retries, since the grammar is not at fault

    def _is_stale(self, entry: _Entry[T]) -> bool:
        return entry.failed_at is not None and clock.now() - entry.failed_at > ERRORS_LAST_S

    def _count(self, outcome: str) -> None:
        metrics.of(metrics.GRAMMARS, self._model, outcome).inc()
