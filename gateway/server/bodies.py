"""The part of a request's body that has arrived and that its app has not read yet.

Hypercorn 0.18 keeps it in a queue of ten messages, and reads nothing more of the connection while
the queue is full: if its app ends without reading (a 401), the connection waits for ever. Here
nothing waits to add to it; it is bounded by the connection, which is read again when there is room.
"""

import asyncio
from typing import Any

from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream

MOST_UNREAD = 256 * 1024  # bytes of a body; beyond them its connection is not read


class Stream(HTTPStream):
    """A request whose unread body is kept as one piece, however many it arrived in."""

    def __init__(self, app: Any, *args: Any) -> None:
        super().__init__(self._serve, *args)  # type: ignore[arg-type]
        self._app = app
        self._unread = bytearray()
        self._is_whole = False
        self._is_end_read = False  # the app has read the end of the body
        self._is_read = False  # the app has begun to read
        self._can_read = asyncio.Event()  # there is something for the app
        self._has_room = asyncio.Event()  # the connection may be read
        self._has_room.set()

    async def _serve(self, scope: Any, receive: Any, *rest: Any) -> None:
        """Run the app with our `receive` instead of Hypercorn's queue."""
        await self._app(scope, self._receive, *rest)

    async def handle(self, event: Event) -> None:
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
        """Wait until the connection may be read: little is unread, or no more of the body comes."""
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
        """Tell a client that waits for it to send the body (RFC 9110, 10.1.1)."""
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


def _set(event: asyncio.Event, is_on: bool) -> None:
    if is_on:
        event.set()
    else:
        event.clear()
