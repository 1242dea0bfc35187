"""Tasks that must not end: an error in one is logged, and it is started again."""

import asyncio
from collections.abc import Awaitable, Callable

from gateway import logs

log = logs.get("workers")

PAUSE_S = 0.1  # so that one that always fails leaves time to others


async def unending(
    name: str,
    work: Callable[[], Awaitable[None]],
    failed: Callable[[Exception], None] = lambda _: None,
) -> None:
    """Work until cancelled. `failed` has to end those who would wait for what was lost, if any."""
    while True:
        try:
            await work()
        except Exception as error:  # a bug of ours: the engines' errors have their own ways
            log.error("worker_failed", worker=name, exc_info=True)
            failed(error)
        await asyncio.sleep(PAUSE_S)
