"""HTTP/1.1, with fixes where Hypercorn 0.18 lets one client's bytes harm other clients."""

import asyncio
import re
from typing import Any

import h11
import orjson
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol

from gateway.errors import BadRequest, GatewayError, HeadTooLarge, VersionNotSupported
from gateway.server.bodies import Stream

LONG_READ = 16 * 1024
MOST_AHEAD = 256 * 1024  # bytes that a client may send while it waits for an answer
LAST_CHUNK = b"0\r\n\r\n"
# A bare LF, or a line that continues the one before it.
_UNCLEAR = re.compile(rb"(?<!\r)\n|(?<=\n)[ \t]")


class _Paused(Exception):
    """The client has sent more than the request that is being answered."""


class _NoWaiting:
    """The event that Hypercorn waits for when h11 pauses; here the wait raises at once."""

    # Hypercorn would read nothing until the answer has ended: one byte after a body (a CRLF, which
    # old clients send) would hide that the client has left, to the last token.

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

    It refuses what two readers may split differently (RFC 9112), and closes the connection.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.can_read = _NoWaiting()
        self._lock = asyncio.Lock()  # of the reader, or of the bytes ahead
        self._tail = b""  # the end of the head that has arrived so far
        self._is_chunked = False
        self._body_end = b""
        self._is_paused = False
        self._ahead = bytearray()
        self._is_over = False

    async def handle(self, event: Event) -> None:
        """Handle received bytes in order; handle other events at once."""
        if not isinstance(event, RawData):
            if isinstance(event, Closed):  # nobody waits for what was sent ahead
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
            # Blank lines before a request are skipped, a bare LF in its head and folded lines are
            # refused: all as RFC 9112 has it (2.2, 5.2).
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
        if len(data) > LONG_READ:  # it may be many small chunks: let other tasks run
            await asyncio.sleep(0)

    def _is_clear(self, data: bytes) -> bool:
        """Return True if no line of the head so far ends in a bare LF or is folded."""
        seen, start = self._tail + data, len(self._tail)
        end = seen.find(b"\r\n\r\n")
        self._tail = seen[-3:] if end < 0 else b""
        return _UNCLEAR.search(seen, start, len(seen) if end < 0 else end) is None

    def _check_body_end(self, data: bytes) -> None:
        """Make this request the last one if two readers may see its chunked body end elsewhere."""
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
            # HTTP/2 by prior knowledge: a proxy in front may speak it.
            await self._refuse(VersionNotSupported())
        elif b"transfer-encoding" in names and (b"content-length" in names or is_old):
            # Two lengths, or one that readers of HTTP/1.0 do not know (RFC 9112, 6.1).
            await self._refuse(
                BadRequest(
                    "Send a body with Content-Length or, in HTTP/1.1, with Transfer-Encoding, but "
                    "not with both."
                )
            )
        else:
            # The stream asks for the body, once its app reads: it may refuse what it would be.
            assert isinstance(self.connection, h11.Connection)
            self.connection.client_is_waiting_for_100_continue = False
            await super()._create_stream(request)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Change to no other protocol."""

    async def _maybe_recycle(self) -> None:
        """Start to handle what was sent ahead, if anything, in a task of its own."""
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
