"""Reading bodies, tokenising, rendering, compiling and judging: on pools of threads, but for what
is short.

Each kind of work has threads of its own, and long work has others than short work. Requests take
turns with what is long: none is done whole while another waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar, TypeVarTuple

from gateway.jobs import GenerateJob, TokenIds

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Kind: TypeAlias = Literal[
    "bodies",
    "large bodies",
    "short texts",
    "long texts",
    "short prompts",
    "long prompts",
    "grammars",
    "verdicts",
]
THREADS: Final[dict[Kind, int]] = {
    # One each: reading is Python's own work, and each thread at it takes its share of the loop's.
    "bodies": 1,
    "large bodies": 1,
    "short texts": 2,
    "long texts": 1,
    "short prompts": 2,
    "long prompts": 1,
    "grammars": 3,
    "verdicts": 2,
}
# One text so short is tokenised on the loop: it takes 20 µs, and the way to a thread and back 300.
SHORT_CHARS: Final = 1000
# Beyond this a request is long. A slice of it takes about a tenth of a second.
LONG_CHARS: Final = 1 << 16
SLICE_CHARS: Final = 1 << 17  # of one request in a call
CALL_CHARS: Final = 1 << 20  # of all requests in a call, but for one text that is longer


class TokenPool:
    """A context manager: its threads end when it does, after the calls under way.

    Nobody waits for those: one that never ended would keep the gateway from ending. What nobody
    waits for any more when its turn comes is not begun.
    """

    def __init__(self) -> None:
        self._threads = {
            kind: ThreadPoolExecutor(count, thread_name_prefix=kind.replace(" ", "-"))
            for kind, count in THREADS.items()
        }

    async def run(
        self, function: Callable[[*Ts], T], *args: *Ts, kind: Kind = "short prompts"
    ) -> T:
        """Call it on a thread for its kind."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads[kind], function, *args
        )

    async def compile(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call it on a thread for grammars."""
        return await self.run(function, *args, kind="grammars")

    def __enter__(self) -> "TokenPool":
        return self

    def __exit__(self, *_: object) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def prompt_kind(job: GenerateJob) -> Kind:
    """Return which threads a prompt is for."""
    prompt = job.prompt if isinstance(job.prompt, str) else ""
    is_long = _is_longer(LONG_CHARS, [prompt, *job.messages, *job.tools])
    return "long prompts" if is_long else "short prompts"


def _is_longer(most_chars: int, values: list[Any]) -> bool:
    """Return True if there is more text in these, however deep; what is no text counts as one."""
    chars = 0
    while values and chars <= most_chars:
        value = values.pop()
        if isinstance(value, str):
            chars += len(value)
            continue
        chars += 1
        if isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
    return chars > most_chars


@dataclass(slots=True, eq=False)
class _Asked:
    """A request's texts, and the rows of those that are encoded."""

    texts: Sequence[str]
    rows: "asyncio.Future[list[TokenIds]]"
    done: list[TokenIds] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.rows.done()

    def next(self, most_chars: int) -> Sequence[str]:
        """Return the next texts, at least one."""
        begin = end = len(self.done)
        chars = 0
        while end < len(self.texts) and (end == begin or chars + len(self.texts[end]) < most_chars):
            chars += len(self.texts[end])
            end += 1
        return self.texts[begin:end]

    def take(self, rows: Sequence[TokenIds]) -> None:
        """Keep the rows of what came next; the request is answered with its last."""
        self.done += rows
        if len(self.done) == len(self.texts) and not self.is_over:
            self.rows.set_result(self.done)


class Tokeniser:
    """Texts of many requests → calls of `encode` of bounded length.

    Requests that come while the threads are busy share the next call, each with a slice of its
    texts. A short text alone goes nowhere.
    """

    def __init__(
        self, encode: Callable[[Sequence[str]], Sequence[TokenIds]], pool: TokenPool
    ) -> None:
        self._encode = encode
        self._pool = pool
        self._waiting: dict[Kind, deque[_Asked]] = {"short texts": deque(), "long texts": deque()}
        self._calls: dict[Kind, set[asyncio.Task[None]]] = {kind: set() for kind in self._waiting}

    async def tokenise(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return each text's token ids, special tokens included."""
        if len(texts) == 1 and len(texts[0]) <= SHORT_CHARS:
            return list(self._encode(texts))
        asked = _Asked(texts, asyncio.get_running_loop().create_future())
        kind: Kind = "long texts" if sum(map(len, texts)) > LONG_CHARS else "short texts"
        self._waiting[kind].append(asked)
        calls = self._calls[kind]
        if len(calls) < THREADS[kind]:
            call = asyncio.create_task(self._work(kind), name="tokenise")
            calls.add(call)
            call.add_done_callback(calls.discard)
        return await asked.rows

    async def _work(self, kind: Kind) -> None:
        waiting = self._waiting[kind]
        while batch := _taken(waiting):
            try:
                if not await self._together(batch, kind) and len(batch) > 1:
                    for each in batch:  # whose text it was
                        await self._together([each], kind)
            except BaseException:
                for asked, _ in batch:
                    asked.rows.cancel()  # unless answered
                raise
            waiting.extend(asked for asked, _ in batch if not asked.is_over)

    async def _together(self, batch: Sequence[tuple[_Asked, Sequence[str]]], kind: Kind) -> bool:
        """Encode a batch in one call; tell whether it went well. One alone hears why not."""
        present = [(asked, texts) for asked, texts in batch if not asked.is_over]
        if not present:
            return True
        try:
            every = [text for _, texts in present for text in texts]
            encoded = await self._pool.run(self._encode, every, kind=kind)
        except Exception as error:
            if len(batch) == 1 and not batch[0][0].is_over:
                batch[0][0].rows.set_exception(error)
            return False
        begin = 0
        for asked, texts in present:
            asked.take(encoded[begin : begin + len(texts)])
            begin += len(texts)
        return True


def _taken(waiting: deque[_Asked]) -> list[tuple[_Asked, Sequence[str]]]:
    """Take a slice of each request for one call, as many as fit; the first does.

    Those that nobody waits for any more are left out.
    """
    batch: list[tuple[_Asked, Sequence[str]]] = []
    chars = 0
    while waiting:
        asked = waiting[0]
        texts = () if asked.is_over else asked.next(SLICE_CHARS)
        size = sum(map(len, texts))
        if batch and chars + size > CALL_CHARS:
            break
        waiting.popleft()
        if texts:
            batch.append((asked, texts))
            chars += size
    return batch
