"""A client that disconnects: the work for it is cancelled, and counted as cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from gateway import metrics
from gateway.jobs import Timings

T = TypeVar("T")

CLIENT_CLOSED = 499  # nginx's status for a client that closed the connection; it is only logged


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects.

    Raises ClientDisconnect then, which needs no answer.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = False

    def cancel_task(_: asyncio.Task[None]) -> None:
        if not is_over:
            task.cancel()

    disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
    disconnect.add_done_callback(cancel_task)
    try:
        return await work
    except asyncio.CancelledError:
        if disconnect.done() and task.uncancel() == 0:  # this is the only cancellation
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        disconnect.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. Nothing else may call `receive` meanwhile."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_unless(disconnect: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await cancel(task)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def count_cancelled(timings: Timings) -> None:
    """Count a client that left before its answer was complete, once, by the stage of the request:
    that of its first job still running, if it has several.
    """
    stages = (part.stage for part in (timings, *timings.parallel) if part.stage is not None)
    if timings.model is not None and (stage := next(stages, None)) is not None:
        metrics.of(metrics.CANCELLED, timings.model, stage).inc()
