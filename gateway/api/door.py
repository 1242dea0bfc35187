"""The way in: open until shutdown begins; it knows how many are inside."""

import asyncio
import contextlib
from collections.abc import Iterator


class Door:
    """Knows the requests under way, so that a drain can wait for them, and end them."""

    def __init__(self) -> None:
        self.is_closed = False
        self.sends_away = False
        self._inside: set[asyncio.Task[object] | None] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Count one request, the current task, from its arrival to its last byte."""
        task = asyncio.current_task()
        self._inside.add(task)
        self._empty.clear()
        try:
            yield
        finally:
            self._inside.discard(task)
            if not self._inside:
                self._empty.set()

    async def drained(self, timeout_s: float) -> bool:
        """Let nobody in any more; tell whether all had left in time."""
        self.is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return not self._inside

    def send_away(self) -> None:
        """End whatever those inside wait for: they are cancelled, and `Context` tells them why."""
        self.sends_away = True
        for task in self._inside:
            if task is not None:
                task.cancel()
