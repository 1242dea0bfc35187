"""HTTP/1.1, with fixes for cases in which Hypercorn 0.18 lets one client's bytes harm others."""

import asyncio
import re
from typing import Any

import h11
import orjson
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream

from gateway.errors import BadRequest, GatewayError, HeadTooLarge, VersionNotSupported

LONG_READ = 16 * 1024
MOST_AHEAD = 256 * 1024  # bytes that a client may send while it waits for an answer
MOST_UNREAD = 256 * 1024  # unread bytes of a body; above them, the connection is not read
LAST_CHUNK = b"0\r\n\r\n"
# A bare LF, or a folded line, which continues the one before it.
_UNCLEAR = re.compile(rb"(?<!\r)\n|(?<=\n)[ \t]")


class Stream(HTTPStream):
    """A request whose unread body is kept in one buffer, however many pieces it came in.

    Hypercorn 0.18 keeps the part that its app has not read in a queue of ten messages, and reads
    nothing more of the connection while the queue is full: if the app ends without reading (a 401),
    the connection waits for ever. Here nothing waits to add to the buffer. Its size is bounded,
    since the connection is read only while there is room.
    """

    def __init__(self, app: Any, *args: Any) -> None:
        super().__init__(self._serve, *args)  # type: ignore[arg-type]
        self._app = app
        self._unread = bytearray()
        self._is_whole = False
        self._is_end_read = False  # True: the app has read the end of the body
        self._is_read = False  # True: the app has begun to read
        self._can_read = asyncio.Event()  # set while there is something for the app
        self._has_room = asyncio.Event()  # set while the connection may be read
        self._has_room.set()

    async def _serve(self, scope: Any, receive: Any, *rest: Any) -> None:
        """Run the app with our `receive` instead of Hypercorn's queue."""
        await self._app(scope, self._receive, *rest)

    async def handle(self, event: StreamEvent) -> None:
        """Keep a part of the body; for other events, do as Hypercorn does."""
        if self.closed:
            return
        if isinstance(event, Body):
            self._unread += event.data
        elif isinstance(event, EndBody):
            self._is_whole = True
        else:
            await super().handle(event)
        if isinstance(event, StreamClosed) and not self._is_whole:
            self._unread.clear()  # the app may still read a whole body after its client left
        self._update_events()

    async def wait_for_room(self) -> None:
        """Wait until the connection may be read: little is unread, or the body is complete."""
        await self._has_room.wait()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            await self._ask()
        while not (self._unread or self._is_end_due()):
            if self.closed:
                return {"type": "http.disconnect"}
            await self._can_read.wait()
        body = bytes(self._unread)
        self._unread.clear()
        self._is_end_read = self._is_whole
        self._update_events()
        return {"type": "http.request", "body": body, "more_body": not self._is_end_read}

    async def _ask(self) -> None:
        """Send 100 Continue to a client that waits for it with its body (RFC 9110, 10.1.1)."""
        expected = dict(self.scope["headers"]).get(b"expect", b"").lower()
        is_waiting = expected == b"100-continue" and self.scope["http_version"] != "1.0"
        has_come = self._unread or self._is_whole or self.closed
        if is_waiting and not has_come and self.state is ASGIHTTPState.REQUEST:
            await self.send(Response(stream_id=self.stream_id, headers=[], status_code=100))

    def _is_end_due(self) -> bool:
        return self._is_whole and not self._is_end_read

    def _update_events(self) -> None:
        _set(self._can_read, bool(self._unread) or self._is_end_due() or self.closed)
        is_low = len(self._unread) <= MOST_UNREAD
        _set(self._has_room, is_low or self._is_whole or self.closed)


class _Paused(Exception):
    """The client has sent more than the request that is being answered."""


class _NoWaiting:
    """The event that Hypercorn waits for when h11 pauses; here the wait raises at once."""

    # Hypercorn would read nothing until the answer has ended. A single byte after a body (old
    # clients send a CRLF) would hide until the last token that the client has left.

    async def clear(self) -> None:
        """Do nothing."""

    async def wait(self) -> None:
        """Raise _Paused."""
        raise _Paused

    async def set(self) -> None:
        """Do nothing."""

    def is_set(self) -> bool:
        """Return False."""
        return False


class Http1(H11Protocol):
    """HTTP/1.1 that notices when its client leaves, and accepts only unambiguous framing.

    It refuses bytes that two readers may split differently (RFC 9112), and closes the connection.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.can_read = _NoWaiting()
        self._lock = asyncio.Lock()  # held while received bytes, or bytes sent ahead, are handled
        self._tail = b""  # the end of the head that has arrived so far
        self._is_chunked = False
        self._body_end = b""
        self._is_paused = False
        self._ahead = bytearray()
        self._is_over = False

    async def handle(self, event: Event) -> None:
        """Handle received bytes in order; handle other events at once."""
        if not isinstance(event, RawData):
            if isinstance(event, Closed):  # nobody waits for requests sent ahead
                self._is_over = True
                self._ahead.clear()
            await super().handle(event)
            return
        async with self._lock:
            await self._take(event.data)

    async def _take(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._is_paused:
            self._ahead += data
            if len(self._ahead) > MOST_AHEAD:
                await self._end()
            return
        if self.connection.their_state is h11.IDLE:
            # RFC 9112 (2.2, 5.2): blank lines before a request are skipped; a bare LF in its head,
            # and folded lines, are refused.
            if not self._tail and not (data := data.lstrip(b"\r\n")):
                return
            if not self._is_clear(data):
                await self._refuse(
                    BadRequest("Lines of a request's head should end in CRLF, and not be folded.")
                )
                return
        try:
            await super().handle(RawData(data))
        except _Paused:
            self._is_paused = True
        self._check_body_end(data)
        if isinstance(self.stream, Stream):
            await self.stream.wait_for_room()
        if len(data) > LONG_READ:  # these may be many small chunks: let other tasks run
            await asyncio.sleep(0)

    def _is_clear(self, data: bytes) -> bool:
        """Return True if no line of the head so far ends in a bare LF or is folded."""
        seen, start = self._tail + data, len(self._tail)
        end = seen.find(b"\r\n\r\n")
        self._tail = seen[-3:] if end < 0 else b""
        return _UNCLEAR.search(seen, start, len(seen) if end < 0 else end) is None

    def _check_body_end(self, data: bytes) -> None:
        """Make this request the last one if two readers may disagree on its chunked body's end."""
        is_whole = self.connection.their_state is h11.DONE
        if is_whole:
            rest, _ = self.connection.trailing_data
            data = data[: len(data) - len(rest)]
        self._body_end = (self._body_end + data)[-len(LAST_CHUNK) :]
        # Trailers may have lines that end in a bare LF.
        if is_whole and self._is_chunked and self._body_end != LAST_CHUNK:
            self._is_over = True
            self.keep_alive_requests = self.config.keep_alive_max_requests  # connection: close

    async def _create_stream(self, request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        self._is_chunked = b"transfer-encoding" in names
        is_old = request.http_version < b"1.1"
        if request.http_version > b"1.1":
            # This is HTTP/2 by prior knowledge: a proxy in front may speak it.
            await self._refuse(VersionNotSupported())
        elif b"transfer-encoding" in names and (b"content-length" in names or is_old):
            # The body has two lengths, or one unknown to readers of HTTP/1.0 (RFC 9112, 6.1).
            await self._refuse(
                BadRequest(
                    "Send a body with Content-Length or, in HTTP/1.1, with Transfer-Encoding, but "
                    "not with both."
                )
            )
        else:
            # The stream asks for the body once its app reads: the app may refuse the request first.
            assert isinstance(self.connection, h11.Connection)
            self.connection.client_is_waiting_for_100_continue = False
            await super()._create_stream(request)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Change to no other protocol."""

    async def _maybe_recycle(self) -> None:
        """Start to handle bytes sent ahead, if there are any, in a task of its own."""
        await super()._maybe_recycle()
        if self._is_paused and self.connection.their_state is h11.IDLE:
            self.task_group.spawn(self._handle_ahead)

    async def _handle_ahead(self) -> None:
        async with self._lock:
            first, _ = self.connection.trailing_data
            ahead, self._ahead = first + self._ahead, bytearray()
            self._is_paused = False
            self.connection = h11.Connection(
                h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
            )
            await self._take(ahead)

    async def _send_error_response(self, status_code: int) -> None:
        """Answer an error of h11 in the form of every other error."""
        if status_code == HeadTooLarge.status:
            await self._answer(HeadTooLarge("The path, query and headers are too large."))
        else:
            await self._answer(BadRequest("The request is not well-formed HTTP."))

    async def _refuse(self, error: GatewayError) -> None:
        await self._answer(error)
        await self._end()

    async def _end(self) -> None:
        self._is_over = True
        await self.send(Closed())

    async def _answer(self, error: GatewayError) -> None:
        body = orjson.dumps(error.body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=int(error.status), headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _set(event: asyncio.Event, is_on: bool) -> None:
    if is_on:
        event.set()
    else:
        event.clear()
