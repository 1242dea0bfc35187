"""Tokenising and rendering, off the loop and off the lane: a small pool of threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREADS = 2


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
