"""SSE framing, priming, and stopping work when the client leaves."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from gateway import logs
from gateway.errors import GatewayError

T = TypeVar("T")
log = logs.get("streams")

KEEP_ALIVE_S = 10.0
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


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it when the client leaves: nobody else would.

    Raises ClientDisconnect then, which needs no answer.
    """
    gone = asyncio.ensure_future(_gone(receive))
    try:
        return await _unless(gone, work)
    finally:
        await _cancelled(gone)


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


def _told(error: GatewayError) -> bytes:
    return frame(orjson.dumps(error.body()))


class EventStream:
    """An ASGI response of server-sent events, opened by the first of them.

    The 200 waits for the first event, for at most `open_after_s`: an error before it is a real
    status (raised by `primed`), one after it an error event. The generator is closed when the
    answer ends, however it ends. `told` writes an error that comes after the opening.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        receive: Receive,
        *,
        send_timeout_s: float,
        told: Callable[[GatewayError], bytes] = _told,
    ) -> None:
        self._events = events
        self._told = told
        self._gone = asyncio.ensure_future(_gone(receive))
        self._first: asyncio.Task[bytes] = asyncio.ensure_future(_next(events))
        self._headers = headers
        self._send_timeout_s = send_timeout_s

    async def primed(self, open_after_s: float) -> "EventStream":
        """Wait for the first event. Raises what the generator raised instead of one."""
        try:
            await asyncio.wait(
                {self._first, self._gone},
                timeout=open_after_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._first.done():
                self._first.result()
            elif self._gone.done():
                raise ClientDisconnect
        except BaseException:
            await self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, unless the client leaves or stops reading."""
        try:
            await _unless(self._gone, self._send(send))
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await self._put(
            send,
            {
                "type": "http.response.start",
                "status": 200,
                "headers": _HEADERS + headers,
            },
        )
        async with contextlib.aclosing(self._kept_alive()) as kept_alive:
            async for data in kept_alive:
                await self._put(send, _body(data, more=True))
        await self._put(send, _body(b"", more=False))

    async def _kept_alive(self) -> AsyncGenerator[bytes, None]:
        try:
            while not (await asyncio.wait({self._first}, timeout=KEEP_ALIVE_S))[0]:
                yield _COMMENT
            yield self._first.result()
            async for data in self._events:
                yield data
        except GatewayError as error:
            yield self._told(error)
        except StopAsyncIteration:
            return
        except Exception:
            log.exception("stream_failed")
            yield self._told(GatewayError("The server had an error."))

    async def _put(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send(message)

    async def _close(self) -> None:
        await _cancelled(self._gone)
        await _cancelled(self._first)
        with contextlib.suppress(asyncio.CancelledError, GatewayError):
            await self._events.aclose()


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
