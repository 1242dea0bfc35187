"""The way in: open until shutdown begins; it knows how many are inside."""

import asyncio
import contextlib
from collections.abc import Iterator


class Door:
    """Counts the requests under way, so that a drain can wait for them."""

    def __init__(self) -> None:
        self.is_closed = False
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Count one request, from its arrival to its last byte."""
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    async def drained(self, timeout_s: float) -> bool:
        """Let nobody in any more; tell whether all had left in time."""
        self.is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._inside == 0
