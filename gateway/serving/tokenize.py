"""Thread pools for work off the loop (reading bodies, tokenising, templates, grammars), and a
tokeniser that uses them.

Each kind of work has its own threads, and long work has others than short work. The texts of
several requests are encoded in slices, in turn.
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
    "checks",
]
THREADS: Final[dict[Kind, int]] = {
    # One each: reading holds the GIL, and each further thread takes from the loop's share of it.
    "bodies": 1,
    "large bodies": 1,
    "short texts": 2,
    "long texts": 1,
    "short prompts": 2,
    "long prompts": 1,
    "grammars": 3,
    "checks": 2,
}
# A single text so short is tokenised on the loop: it takes 20 µs, a hop to a thread 300.
SHORT_CHARS: Final = 1000
# Longer requests are long work. A slice takes about a tenth of a second.
LONG_CHARS: Final = 1 << 16
SLICE_CHARS: Final = 1 << 17  # of one request in a call
CALL_CHARS: Final = 1 << 20  # of all requests in a call, unless a single text is longer


class ThreadPools:
    """A context manager. At exit it drops queued calls, and does not wait for running ones, as one
    that hangs would keep the gateway from exiting. A cancelled call that is still queued is
    dropped too.
    """

    def __init__(self) -> None:
        self._threads = {
            kind: ThreadPoolExecutor(count, thread_name_prefix=kind.replace(" ", "-"))
            for kind, count in THREADS.items()
        }

    async def run(
        self, function: Callable[[*Ts], T], *args: *Ts, kind: Kind = "short prompts"
    ) -> T:
        """Call a function on a thread for this kind of work."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads[kind], function, *args
        )

    async def compile(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function on a thread for grammars."""
        return await self.run(function, *args, kind="grammars")

    def __enter__(self) -> "ThreadPools":
        return self

    def __exit__(self, *_: object) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def prompt_kind(job: GenerateJob) -> Kind:
    """Return the kind of work that rendering a job's prompt is."""
    prompt = job.prompt if isinstance(job.prompt, str) else ""
    questions = [text for question in job.questions for text in (question.text, *question.labels)]
    is_long = _is_longer(LONG_CHARS, [prompt, *job.messages, *job.tools, *questions])
    if is_long:
        return "long prompts"
    return "short prompts"


def _is_longer(most_chars: int, values: list[Any]) -> bool:
    """Return True if nested values have more characters; what is not text counts as one."""
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
class _Request:
    """The texts of one request, the rows of those encoded so far, and the result."""

    texts: Sequence[str]
    result: "asyncio.Future[list[TokenIds]]"
    rows: list[TokenIds] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.result.done()

    def next_texts(self, most_chars: int) -> Sequence[str]:
        """Return the next texts, at least one."""
        begin = end = len(self.rows)
        chars = 0
        while end < len(self.texts) and (end == begin or chars + len(self.texts[end]) < most_chars):
            chars += len(self.texts[end])
            end += 1
        return self.texts[begin:end]

    def add(self, rows: Sequence[TokenIds]) -> None:
        """Add the rows of the next texts; the last ones complete the result."""
        self.rows += rows
        if len(self.rows) == len(self.texts) and not self.is_over:
            self.result.set_result(self.rows)


class Tokeniser:
    """Calls `encode` with the texts of many requests, a bounded number of characters a call.

    Requests that arrive while the threads are busy share the next call, each with a slice of its
    texts. A single short text is encoded on the loop.
    """

    def __init__(
        self, encode: Callable[[Sequence[str]], Sequence[TokenIds]], pool: ThreadPools
    ) -> None:
        self._encode = encode
        self._pool = pool
        self._waiting: dict[Kind, deque[_Request]] = {"short texts": deque(), "long texts": deque()}
        self._calls: dict[Kind, set[asyncio.Task[None]]] = {kind: set() for kind in self._waiting}

    async def tokenise(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return each text's token ids, special tokens included."""
        if len(texts) == 1 and len(texts[0]) <= SHORT_CHARS:
            return list(self._encode(texts))
        request = _Request(texts, asyncio.get_running_loop().create_future())
        kind: Kind = "long texts" if sum(map(len, texts)) > LONG_CHARS else "short texts"
        self._waiting[kind].append(request)
        calls = self._calls[kind]
        if len(calls) < THREADS[kind]:
            call = asyncio.create_task(self._work(kind), name="tokenise")
            calls.add(call)
            call.add_done_callback(calls.discard)
        return await request.result

    async def _work(self, kind: Kind) -> None:
        waiting = self._waiting[kind]
        while batch := _take_batch(waiting):
            try:
                if not await self._encode_batch(batch, kind) and len(batch) > 1:
                    for item in batch:  # one at a time, to find the text that failed
                        await self._encode_batch([item], kind)
            except BaseException:
                for request, _ in batch:
                    request.result.cancel()  # unless it is complete
                raise
            waiting.extend(request for request, _ in batch if not request.is_over)

    async def _encode_batch(
        self, batch: Sequence[tuple[_Request, Sequence[str]]], kind: Kind
    ) -> bool:
        """Encode a batch in one call. Return False if it failed; a batch of one gets the error."""
        is_single = len(batch) == 1
        batch = [(request, texts) for request, texts in batch if not request.is_over]
        if not batch:
            return True
        try:
            texts_together = [text for _, texts in batch for text in texts]
            encoded = await self._pool.run(self._encode, texts_together, kind=kind)
        except Exception as error:
            if is_single and not batch[0][0].is_over:
                batch[0][0].result.set_exception(error)
            return False
        begin = 0
        for request, texts in batch:
            request.add(encoded[begin : begin + len(texts)])
            begin += len(texts)
        return True


def _take_batch(waiting: deque[_Request]) -> list[tuple[_Request, Sequence[str]]]:
    """Take a slice of each waiting request, up to CALL_CHARS but at least one.

    Requests whose caller has left are dropped.
    """
    batch: list[tuple[_Request, Sequence[str]]] = []
    chars = 0
    while waiting:
        request = waiting[0]
        texts = () if request.is_over else request.next_texts(SLICE_CHARS)
        size = sum(map(len, texts))
        if batch and chars + size > CALL_CHARS:
            break
        waiting.popleft()
        if texts:
            batch.append((request, texts))
            chars += size
    return batch
