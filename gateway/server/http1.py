"""HTTP/1.1 with fixes for cases in which Hypercorn 0.18 lets one client harm others."""

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
MOST_AHEAD = 256 * 1024  # bytes of later requests that a client may send before the response
MOST_UNREAD = 256 * 1024  # bytes of a body that may wait for the app
LAST_CHUNK = b"0\r\n\r\n"
# A bare LF, or the beginning of a folded line.
_UNCLEAR = re.compile(rb"(?<!\r)\n|(?<=\n)[ \t]")


class Stream(HTTPStream):
    """A request whose unread body is in one buffer.

    Hypercorn 0.18 stops reading a connection once ten parts of a body are unread. If the app then
    responds without reading the body, the connection waits forever.
    """

    def __init__(self, app: Any, *args: Any) -> None:
        super().__init__(self._serve, *args)  # type: ignore[arg-type]
        self._app = app
        self._unread = bytearray()
        self._is_whole = False
        self._is_end_read = False
        self._is_read = False  # True: the app has begun to read the body
        self._can_read = asyncio.Event()  # set while the app can read without waiting
        self._has_room = asyncio.Event()  # set while more of the connection may be read
        self._has_room.set()

    async def _serve(self, scope: Any, receive: Any, *rest: Any) -> None:
        await self._app(scope, self._receive, *rest)

    async def handle(self, event: StreamEvent) -> None:
        if self.closed:
            return
        if isinstance(event, Body):
            self._unread += event.data
        elif isinstance(event, EndBody):
            self._is_whole = True
        else:
            await super().handle(event)
        if isinstance(event, StreamClosed) and not self._is_whole:
            self._unread.clear()  # a complete body is kept for the app
        self._update_events()

    async def wait_for_room(self) -> None:
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
        """Send 100 Continue if the client waits for it (RFC 9110, 10.1.1)."""
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
    """The client has sent bytes beyond the request that is being answered."""


class _NoWaiting:
    """Replaces Hypercorn's event `can_read`; `wait` raises _Paused at once."""

    # While Hypercorn waits, it does not notice that the client disconnects.

    async def clear(self) -> None:
        """Do nothing."""

    async def wait(self) -> None:
        raise _Paused

    async def set(self) -> None:
        """Do nothing."""

    def is_set(self) -> bool:
        return False


class Http1(H11Protocol):
    """HTTP/1.1 that notices disconnects.

    It refuses a request if a proxy might disagree about where it ends (RFC 9112).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.can_read = _NoWaiting()
        self._send, self.send = self.send, self._gather
        self._is_head = False  # True while the head of a response of known length is sent
        self._held = b""  # such a head, which goes with the first bytes of the body
        self._lock = asyncio.Lock()  # held while received bytes are handled
        self._tail = b""  # the last bytes of the head received so far
        self._is_chunked = False
        self._body_end = b""
        self._is_paused = False
        self._ahead = bytearray()
        self._is_over = False

    async def handle(self, event: Event) -> None:
        if not isinstance(event, RawData):
            if isinstance(event, Closed):  # nobody waits for further responses
                self._is_over = True
                self._ahead.clear()
            await super().handle(event)
            return
        async with self._lock:
            await self._take(event.data)

    async def stream_send(self, event: StreamEvent) -> None:
        names = event.headers if isinstance(event, Response) else ()
        self._is_head = any(name == b"content-length" for name, _ in names)
        await super().stream_send(event)
        self._is_head = False

    async def _gather(self, event: Event) -> None:
        """Send head and body in one call of the system, which is a sixth of a request's time."""
        data, self._held = self._held, b""
        if isinstance(event, RawData):
            data += event.data
        if self._is_head:
            self._held = data
        elif data:
            await self._send(RawData(data))
        if not isinstance(event, RawData):
            await self._send(event)

    async def _take(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._is_paused:
            self._ahead += data
            if len(self._ahead) > MOST_AHEAD:
                await self._end()
            return
        if self.connection.their_state is h11.IDLE:
            # RFC 9112 (2.2, 5.2): skip blank lines before a request; refuse folded lines and a bare
            # LF.
            if not self._tail and not (data := data.lstrip(b"\r\n")):
                return
            if not self._is_clear(data):
                await self._refuse(
                    BadRequest("Lines of a request's head must end in CRLF and not be folded.")
                )
                return
        try:
            await super().handle(RawData(data))
        except _Paused:
            self._is_paused = True
        self._check_body_end(data)
        if isinstance(self.stream, Stream):
            await self.stream.wait_for_room()
        if len(data) > LONG_READ:  # it may have many small chunks: let other tasks run
            await asyncio.sleep(0)

    def _is_clear(self, data: bytes) -> bool:
        seen, start = self._tail + data, len(self._tail)
        end = seen.find(b"\r\n\r\n")
        self._tail = seen[-3:] if end < 0 else b""
        return _UNCLEAR.search(seen, start, len(seen) if end < 0 else end) is None

    def _check_body_end(self, data: bytes) -> None:
        """Close the connection after this request if a proxy might disagree where the body ends."""
        is_whole = self.connection.their_state is h11.DONE
        if is_whole:
            rest, _ = self.connection.trailing_data
            data = data[: len(data) - len(rest)]
        self._body_end = (self._body_end + data)[-len(LAST_CHUNK) :]
        # A body that does not end in LAST_CHUNK has trailers, whose lines may end in a bare LF.
        if is_whole and self._is_chunked and self._body_end != LAST_CHUNK:
            self._is_over = True
            self.keep_alive_requests = self.config.keep_alive_max_requests  # connection: close

    async def _create_stream(self, request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        self._is_chunked = b"transfer-encoding" in names
        is_old = request.http_version < b"1.1"
        if request.http_version > b"1.1":
            # The client uses HTTP/2 with prior knowledge.
            await self._refuse(VersionNotSupported())
        elif b"transfer-encoding" in names and (b"content-length" in names or is_old):
            # The body has two lengths, or is chunked in HTTP/1.0 (RFC 9112, 6.1).
            await self._refuse(
                BadRequest(
                    "Send a body with Content-Length or, in HTTP/1.1, with Transfer-Encoding, but "
                    "not with both."
                )
            )
        else:
            # `_ask` sends 100 Continue later, since the app may refuse the request first.
            assert isinstance(self.connection, h11.Connection)
            self.connection.client_is_waiting_for_100_continue = False
            await super()._create_stream(request)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Do nothing: upgrades to other protocols are not supported."""

    async def _maybe_recycle(self) -> None:
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
