"""Background tasks that are restarted after an error."""

import asyncio
from collections.abc import Awaitable, Callable

from gateway import logs

log = logs.get("workers")

PAUSE_S = 0.1  # before a restart: a task that always fails must not fill the loop


async def run_forever(
    name: str,
    work: Callable[[], Awaitable[None]],
    on_error: Callable[[Exception], None] = lambda _: None,
) -> None:
    """Call `work` until cancelled. `on_error` has to end requests whose work was lost."""
    while True:
        try:
            await work()
        except Exception as error:  # a bug of ours: engines' errors are handled below
            log.error("worker_failed", worker=name, exc_info=True)
            on_error(error)
        await asyncio.sleep(PAUSE_S)
