"""Server-sent events: framing, the first event, keep-alives, slow clients."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from gateway import logs
from gateway.api.in_flight import cancel, context_of, run_unless, wait_for_disconnect
from gateway.errors import GatewayError

log = logs.get("streams")

KEEP_ALIVE_S = 10.0  # longest silence on an open stream
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # stops nginx from buffering the events
]
# Decoders skip this comment line; some would take a second line feed for an empty event.
COMMENT = b": keep-alive\n"


def frame(data: bytes, name: str = "") -> bytes:
    event = b"data: " + data + b"\n\n"
    if name:
        return b"event: " + name.encode() + b"\n" + event
    return event


DONE = frame(b"[DONE]")
ACCEPTED = b""  # yielded when the request is accepted; it is not sent


class EventStream:
    """An ASGI response of server-sent events.

    The 200 is sent with the first event, or `open_after_s` after the request was accepted. `prime`
    raises an earlier error; `write_error` turns a later one into an event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        request: Request,
        *,
        write_error: Callable[[GatewayError], bytes],
        keep_alive: bytes,
    ) -> None:
        self._headers = headers
        self._write_error = write_error
        self._keep_alive_frame = keep_alive
        # Events are buffered as fast as they are made, so a slow reader holds no sequence and no
        # lease.
        self._buffer: list[bytes] = []
        self._context = context_of(request)
        self._nbytes = 0
        self._sent = 0
        self._accepted = asyncio.Event()
        self._changed = asyncio.Event()
        self._disconnect = asyncio.ensure_future(wait_for_disconnect(request.receive))
        self._producer = asyncio.ensure_future(self._produce(events))

    async def prime(self, open_after_s: float) -> "EventStream":
        """Wait for the first event, for at most `open_after_s` seconds."""
        try:
            await self._until(self._accepted, None)
            await self._until(self._changed, open_after_s)
            if not self._buffer and self._producer.done():
                self._producer.result()
            elif not self._buffer and self._disconnect.done():
                raise ClientDisconnect
        except BaseException:
            await self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_unless(self._disconnect, self._send(send))
        except asyncio.CancelledError:
            cancellation = self._context.cancellation
            if cancellation is None:
                raise
            self._context.uncancel()
            await self._close()  # frees all memory first, since the client may read slowly
            await self._send_error(cancellation, send)
        finally:
            await self._close()

    async def _until(self, event: asyncio.Event, timeout_s: float | None) -> None:
        """Wait until `event` is set, the generator ends, the client disconnects or time is up."""
        wait = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait(
                {wait, self._producer, self._disconnect},
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            wait.cancel()

    async def _produce(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for data in events:
                    self._accepted.set()
                    if data:
                        self._buffer.append(data)
                        self._changed.set()
                        self._hold(len(data))
        finally:
            self._changed.set()

    def _hold(self, nbytes: int) -> None:
        """Count bytes added to the buffer, or taken if below 0."""
        self._nbytes += nbytes
        self._context.unread.count(self._nbytes)

    async def _send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS + headers})
        keep_alive = asyncio.ensure_future(self._keep_alive())
        try:
            while not self._producer.done() or self._buffer:
                if self._buffer:
                    data = b"".join(self._buffer)  # all events since the last send
                    self._buffer.clear()
                    await send(_body(data, more=True))
                    self._sent += 1
                    self._hold(-len(data))
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            keep_alive.cancel()
        failure = self._failure()
        if failure is not None:
            await self._send_error(failure, send)
        else:
            await send(_body(b"", more=False))

    async def _send_error(self, error: GatewayError, send: Send) -> None:
        self._context.error = error.code or error.type
        await send(_body(self._write_error(error), more=True))
        await send(_body(b"", more=False))

    async def _keep_alive(self) -> None:
        # A timer for each token would cost as much as sending the token.
        while True:
            sent = self._sent
            await asyncio.sleep(KEEP_ALIVE_S / 2)
            if self._sent == sent and not self._buffer:
                self._buffer.append(self._keep_alive_frame)
                self._changed.set()

    def _failure(self) -> GatewayError | None:
        error = self._producer.exception()
        if error is None or isinstance(error, GatewayError):
            return error
        log.error("stream_failed", exc_info=error)
        return GatewayError("The server had an error.")

    async def _close(self) -> None:
        await cancel(self._disconnect)
        await cancel(self._producer)
        if not self._producer.cancelled():
            self._producer.exception()  # asyncio would log an error that nobody retrieves


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
