"""A loop whose time passes only while everybody waits for it."""

import asyncio
from typing import Any

TICK_S = 1e-9


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nobody waits for a timer: when all wait, it is later. No two looks see the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        self._now += TICK_S
        return self._now

    def _run_once(self) -> None:
        ready: Any = self.__dict__["_ready"]
        scheduled: Any = self.__dict__["_scheduled"]
        coming = [each.when() for each in scheduled if not each.cancelled()]
        assert ready or coming, "everything waits, and nothing will happen"
        if not ready:
            self._now = max(self._now, min(coming))
        super()._run_once()  # type: ignore[misc]
