"""Tokenising and rendering, off the lane: on a small pool of threads, but for a short text."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar, TypeVarTuple

from gateway.jobs import TokenIds

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREADS = 2
# One text so short is tokenised on the loop: it takes 20 µs, and the way to a thread and back 300.
SHORT_CHARS = 1000

_Asked = tuple[Sequence[str], asyncio.Future[list[TokenIds]]]


class TokenPool:
    """A context manager: its threads end when it does, after the calls under way.

    Nobody waits for those: one that never ended would keep the gateway from ending.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call it on a thread of the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def __enter__(self) -> "TokenPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Tokeniser:
    """Texts of many requests → few calls of `encode`, while the lane runs a pass: those that come
    while both of the pool's threads are busy share the next call. A short one alone goes nowhere.
    """

    def __init__(
        self, encode: Callable[[Sequence[str]], Sequence[TokenIds]], pool: TokenPool
    ) -> None:
        self._encode = encode
        self._pool = pool
        self._waiting: list[_Asked] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def tokenise(self, texts: Sequence[str]) -> list[TokenIds]:
        """Give each text's token ids, special tokens included."""
        if len(texts) == 1 and len(texts[0]) <= SHORT_CHARS:
            return list(self._encode(texts))
        rows: asyncio.Future[list[TokenIds]] = asyncio.get_running_loop().create_future()
        self._waiting.append((texts, rows))
        if len(self._calls) < THREADS:
            call = asyncio.create_task(self._work(), name="tokenise")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await rows

    async def _work(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting, []
            try:
                if not await self._together(asked) and len(asked) > 1:
                    for each in asked:  # whose text it was
                        await self._together([each])
            finally:
                for _, rows in asked:
                    rows.cancel()  # unless answered

    async def _together(self, asked: Sequence[_Asked]) -> bool:
        """Answer all from one call; tell whether it went well. One alone hears why not."""
        present = [(texts, rows) for texts, rows in asked if not rows.done()]
        if not present:
            return True
        try:
            every = [text for texts, _ in present for text in texts]
            encoded = iter(await self._pool.run(self._encode, every))
        except Exception as error:
            if len(asked) == 1 and not asked[0][1].done():
                asked[0][1].set_exception(error)
            return False
        for texts, rows in present:
            mine = list(islice(encoded, len(texts)))
            if not rows.done():
                rows.set_result(mine)
        return True
