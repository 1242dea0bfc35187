"""Runs calls that may never return. Their threads do not keep the process from exiting."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from gateway.panics import as_exception

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def run_in_daemon_thread(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function in a new daemon thread, and return its result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not done.done():  # the future is done if the caller was cancelled
            set_outcome(outcome)

    def work() -> None:
        try:
            outcome: tuple[Any, object] = done.set_result, function(*args)
        except BaseException as error:  # the caller waits, so any error must reach it
            outcome = done.set_exception, _failure(error)
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name=getattr(function, "__name__", "daemon"), daemon=True).start()
    return await done


def _failure(error: BaseException) -> Exception:
    """Return an Exception to raise in the caller, even for SystemExit."""
    try:
        return as_exception(error)
    except BaseException:
        return RuntimeError(f"the call's thread ended with {error!r}")
