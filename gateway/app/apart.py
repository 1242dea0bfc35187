"""Calls that may never return, kept from holding up the process's end."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def apart(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call on a thread of its own, which an exit does not wait for.

    A hub may never answer, nor a disk that is somewhere else.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[Any], None], outcome: object) -> None:
        if not done.done():
            settled(outcome)

    def work() -> None:
        try:
            outcome: tuple[Any, object] = done.set_result, function(*args)
        except Exception as error:
            outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name=getattr(function, "__name__", "apart"), daemon=True).start()
    return await done
