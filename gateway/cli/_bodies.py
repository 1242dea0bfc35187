"""What has come of a request's body and its app has not taken yet.

Hypercorn 0.18 keeps it in a queue of ten messages, and reads nothing more of the connection while
that is full: over HTTP/2 the other streams wait for one, and if its app ends without reading (a
401), they and the connection do so for ever. Here nobody waits to add to it. What bounds it is the
client's: over HTTP/2 the window of the stream, which opens as the app reads, and over HTTP/1.1 the
connection, which is read on when there is room.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from hypercorn.protocol.events import Body, EndBody, Event, StreamClosed
from hypercorn.protocol.http_stream import HTTPStream

MOST_UNREAD = 256 * 1024  # of a body over HTTP/1.1, before its connection is read on


@dataclass(frozen=True)
class Taken(Event):
    """So many bytes of a stream's body are read, or nobody will read them."""

    size: int


class Stream(HTTPStream):
    """A request whose body is kept as one piece, however many it came in."""

    def __init__(self, app: Any, *args: Any) -> None:
        super().__init__(self._serve, *args)  # type: ignore[arg-type]
        self._app = app
        self._unread = bytearray()
        self._is_whole = False
        self._is_told = False  # the app has been given the end
        self._has_come = asyncio.Event()  # something for the app
        self._may_come = asyncio.Event()  # more for us
        self._may_come.set()

    async def _serve(self, scope: Any, receive: Any, *rest: Any) -> None:
        """Run the app on what has come, in the place of Hypercorn's queue."""
        await self._app(scope, self._receive, *rest)

    async def handle(self, event: Event) -> None:
        """Keep what has come, or let the app begin or end."""
        if self.closed:
            return
        if isinstance(event, Body):
            self._unread += event.data
        elif isinstance(event, EndBody):
            self._is_whole = True
        else:
            await super().handle(event)
        if isinstance(event, StreamClosed):
            await self._taken(len(self._unread))
            if not self._is_whole:  # else an app may still read what its client sent before it left
                self._unread.clear()
        self._changed()

    async def room(self) -> None:
        """Wait until more may come: until the rest is read, all is here, or nobody reads it."""
        await self._may_come.wait()

    async def _receive(self) -> dict[str, Any]:
        while not (self._unread or self._is_end_due()):
            if self.closed:
                return {"type": "http.disconnect"}
            await self._has_come.wait()
        body = bytes(self._unread)
        self._unread.clear()
        self._is_told = self._is_whole
        self._changed()
        if not self.closed:
            await self._taken(len(body))
        return {"type": "http.request", "body": body, "more_body": not self._is_told}

    def _is_end_due(self) -> bool:
        return self._is_whole and not self._is_told

    async def _taken(self, size: int) -> None:
        """Tell the connection. It waits for nothing: an app that is cancelled has lost nothing."""
        if size:
            await self.send(Taken(stream_id=self.stream_id, size=size))

    def _changed(self) -> None:
        _turn(self._has_come, bool(self._unread) or self._is_end_due() or self.closed)
        is_low = len(self._unread) <= MOST_UNREAD
        _turn(self._may_come, is_low or self._is_whole or self.closed)


def _turn(event: asyncio.Event, is_on: bool) -> None:
    if is_on:
        event.set()
    else:
        event.clear()
