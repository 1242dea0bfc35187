"""The open connections: each ends once its client is gone, and there is room for new ones.

`install` replaces Hypercorn's classes before it serves.
"""

import asyncio
import resource
from collections.abc import Callable
from typing import Final

import hypercorn.asyncio.run
import hypercorn.protocol
import hypercorn.protocol.h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Event, Updated

from gateway import logs
from gateway.server.bodies import Stream
from gateway.server.http1 import Http1

log = logs.get("server")

# Descriptors that are left for all else: model files, sandboxes, downloads, logs.
RESERVED: Final = 256


def most_connections() -> int:
    """Return how many connections may be open: the limit of descriptors, less what others need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if limit == resource.RLIM_INFINITY else max(limit // 2, limit - RESERVED)


class Crowd:
    """The open connections, those without a request longest idle first.

    Where there are more than may be, the one that is idle for longest is closed: no number of
    clients that say nothing keeps another out.
    """

    def __init__(self, most: Callable[[], int] = most_connections) -> None:
        self._most = most
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self._has_warned = False

    def note_idle(self, connection: "Connection") -> None:
        """Count a connection that has no request under way, from now on."""
        self._busy.discard(connection)
        self._idle[connection] = None
        while len(self._idle) > 1 and len(self._idle) + len(self._busy) > self._most():
            longest = next(iter(self._idle))
            del self._idle[longest]
            longest.abort()
            if not self._has_warned:
                self._has_warned = True
                log.warning("idle_connections_closed", most=self._most())

    def note_busy(self, connection: "Connection") -> None:
        """Count a connection that has a request under way."""
        self._idle.pop(connection, None)
        self._busy.add(connection)

    def leave(self, connection: "Connection") -> None:
        """Count a connection no more."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)


class Connection(TCPServer):
    """A connection that ends as soon as its client has left or no longer reads.

    Hypercorn keeps a connection that its client closed between two requests until the keep-alive
    time is over: a descriptor and three tasks, so that clients that connect for each request use
    up the descriptors of a process within a minute. A connection whose client has stopped reading
    it keeps for ever.
    """

    last_bytes_s = 30.0  # for the client to read what was written
    crowd = Crowd()
    _is_gone = False

    async def run(self) -> None:
        """Serve the connection's requests until it is closed."""
        self.crowd.note_idle(self)
        try:
            await super().run()
        finally:
            self.crowd.leave(self)

    async def protocol_send(self, event: Event) -> None:
        """Send bytes; note whether a request is under way."""
        if isinstance(event, Updated) and not self._is_gone:
            note = self.crowd.note_idle if event.idle else self.crowd.note_busy
            note(self)
        await super().protocol_send(event)

    def abort(self) -> None:
        """Close the connection at once."""
        self.writer.transport.abort()

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            self._is_gone = True
            await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        if not self._is_gone:  # the answer to the last request may end after its client has left
            await super()._idle_timeout()

    async def _close(self) -> None:
        async with asyncio.timeout(self.last_bytes_s) as limit:  # it swallows CancelledError
            await super()._close()
        if limit.expired():
            self.writer.transport.abort()


def install(last_bytes_s: float) -> None:
    """Replace Hypercorn's classes with these; call it before Hypercorn serves."""
    Connection.last_bytes_s = last_bytes_s
    hypercorn.asyncio.run.TCPServer = Connection  # type: ignore[attr-defined]
    hypercorn.protocol.H11Protocol = Http1  # type: ignore[assignment, attr-defined]
    hypercorn.protocol.h11.HTTPStream = Stream  # type: ignore[assignment, attr-defined]
