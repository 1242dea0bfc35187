"""SSE framing, priming, and stopping work when the client leaves."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from gateway import logs
from gateway.errors import GatewayError

T = TypeVar("T")
log = logs.get("streams")

KEEP_ALIVE_S = 10.0  # the longest silence on an open stream
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise hold tokens back
]
# A comment line, which every decoder skips; and only one line feed, as some count a blank line
# after it as an empty event.
_COMMENT = b": keep-alive\n"


def frame(data: bytes) -> bytes:
    """Write one server-sent event."""
    return b"data: " + data + b"\n\n"


DONE = frame(b"[DONE]")
ACCEPTED = b""  # no event, but the word that one will come: the queue has let it in


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it when the client leaves: nobody else would.

    Raises ClientDisconnect then, which needs no answer.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = False

    def leave(_: asyncio.Task[None]) -> None:
        if not is_over:
            task.cancel()

    gone = asyncio.ensure_future(_gone(receive))
    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone.done() and task.uncancel() == 0:  # nobody else cancelled us
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        gone.cancel()


async def _gone(receive: Receive) -> None:
    """End when the client has left. Nobody else may receive meanwhile."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancelled(task)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _frame_error(error: GatewayError) -> bytes:
    return frame(orjson.dumps(error.body()))


class EventStream:
    """An ASGI response of server-sent events, opened by the first of them.

    The 200 waits until the request is accepted, and then for the first event, for at most
    `open_after_s`: an error before it is a real status (raised by `primed`), one after it an error
    event, which `write_error` writes. The events are made as fast as they can be and wait here, so
    that a slow reader holds memory, as much as the answer is long, but neither a row nor a lease.
    Whatever ends the answer closes the generator.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        receive: Receive,
        *,
        write_error: Callable[[GatewayError], bytes] = _frame_error,
    ) -> None:
        self._headers = headers
        self._write_error = write_error
        self._made: deque[bytes] = deque()
        self._sent = 0
        self._accepted = asyncio.Event()
        self._stirred = asyncio.Event()
        self._gone = asyncio.ensure_future(_gone(receive))
        self._maker = asyncio.ensure_future(self._make(events))

    async def primed(self, open_after_s: float) -> "EventStream":
        """Wait for the first event. Raises what the generator raised instead of one."""
        try:
            await self._until(self._accepted, None)
            await self._until(self._stirred, open_after_s)
            if not self._made and self._maker.done():
                self._maker.result()
            elif not self._made and self._gone.done():
                raise ClientDisconnect
        except BaseException:
            await self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, unless the client leaves."""
        try:
            await _unless(self._gone, self._send(send))
        finally:
            await self._close()

    async def _until(self, event: asyncio.Event, timeout_s: float | None) -> None:
        """Wait for an event of ours, for the end of them or of the client, at most so long."""
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait(
                {waiting, self._maker, self._gone},
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waiting.cancel()

    async def _make(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for data in events:
                    self._accepted.set()
                    if data:
                        self._made.append(data)
                        self._stirred.set()
        finally:
            self._stirred.set()

    async def _send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        start = {"type": "http.response.start", "status": 200, "headers": _HEADERS + headers}
        await send(start)
        heart = asyncio.ensure_future(self._beat())
        try:
            while not self._maker.done() or self._made:
                if self._made:
                    await send(_body(self._made.popleft(), more=True))
                    self._sent += 1
                else:
                    self._stirred.clear()
                    await self._stirred.wait()
        finally:
            heart.cancel()
        if (failure := self._failure()) is not None:
            await send(_body(self._write_error(failure), more=True))
        await send(_body(b"", more=False))

    async def _beat(self) -> None:
        """Have a comment sent where nothing was for a while: one timer a stream, since one a token
        would cost as much as the token.
        """
        while True:
            sent = self._sent
            await asyncio.sleep(KEEP_ALIVE_S / 2)
            if self._sent == sent and not self._made:
                self._made.append(_COMMENT)
                self._stirred.set()

    def _failure(self) -> GatewayError | None:
        error = self._maker.exception()
        if error is None or isinstance(error, GatewayError):
            return error
        log.error("stream_failed", exc_info=error)
        return GatewayError("The server had an error.")

    async def _close(self) -> None:
        await _cancelled(self._gone)
        await _cancelled(self._maker)
        if not self._maker.cancelled():
            self._maker.exception()  # seen


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
