"""Tests wait by these: for a fact, never for a time."""

import asyncio
from collections.abc import Callable


async def until(is_so: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a fact; `seconds` only end a test that would hang."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.005)
