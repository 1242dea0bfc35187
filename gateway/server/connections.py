"""Closes abandoned connections, and idle ones if too many are open."""

import asyncio
import errno
import math
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import h11
import hypercorn.asyncio.run
import hypercorn.protocol
import hypercorn.protocol.h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config as HypercornConfig
from hypercorn.config import Sockets
from hypercorn.events import Event, Updated

from gateway import clock, logs
from gateway.server.http1 import Http1, Stream

log = logs.get("server")

# File descriptors reserved for model files, sandboxes, downloads and logs.
RESERVED: Final = 256
ACCEPT_LOG_S: Final = 60.0
BACKLOG: Final = 2048  # connections that the kernel queues until they are accepted
# Few connections are accepted in one iteration of the loop, since each is counted only later.
ACCEPTED: Final = 16


def most_connections() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max(limit // 2, limit - RESERVED)


class Listener(socket.socket):
    """A listening socket with a queue of BACKLOG places in the kernel.

    asyncio accepts as many connections at once as its backlog says, so asyncio gets a smaller
    backlog.
    """

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)


class Config(HypercornConfig):
    """Hypercorn's config; a small backlog keeps a burst from using up the reserved descriptors."""

    backlog = ACCEPTED

    def create_sockets(self) -> Sockets:
        sockets = super().create_sockets()
        opened = sockets.insecure_sockets
        opened[:] = [Listener(fileno=each.detach()) for each in opened]
        return sockets


class Crowd:
    """The open connections: idle ones, which have no request, and busy ones.

    If there are too many, the connection that has been idle longest is closed. If only the new one
    is idle, a connection whose request is still arriving is closed.
    """

    def __init__(self, most: Callable[[], int] = most_connections) -> None:
        self._most = most
        self._idle: dict[Connection, None] = {}
        self._busy: dict[Connection, None] = {}
        self._has_warned = False

    def note_idle(self, connection: "Connection") -> None:
        """Count a connection as idle, and close another one if there are too many."""
        self._busy.pop(connection, None)
        self._idle[connection] = None
        while len(self._idle) + len(self._busy) > self._most():
            unheard = next((other for other in self._busy if other.is_receiving), None)
            closed = unheard if len(self._idle) == 1 else next(iter(self._idle))
            if closed is None:
                return
            self.leave(closed)
            closed.abort()
            if not self._has_warned:
                self._has_warned = True
                log.warning("idle_connections_closed", most=self._most())

    def note_busy(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)
        self._busy[connection] = None

    def leave(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)

    def abort_all(self) -> None:
        for connection in [*self._idle, *self._busy]:
            connection.abort()


class Connection(TCPServer):
    """A connection that is closed as soon as its client has disconnected or stopped reading."""

    # Hypercorn keeps a closed connection until the keep-alive time is over. If a client stops
    # reading, Hypercorn keeps the connection forever.
    last_bytes_s = 30.0  # seconds for the client to read the last bytes at closing
    tls: ssl.SSLContext | None = None
    crowd = Crowd()
    _handshake: asyncio.Timeout | None = None
    _is_gone = False

    async def run(self) -> None:
        # A connection is counted before its TLS handshake, which a client may never finish.
        self.crowd.note_idle(self)
        try:
            if self.tls is not None:
                await self._begin_tls(self.tls)
            await super().run()
        except OSError:  # a failed handshake has closed the connection
            pass
        finally:
            self.crowd.leave(self)

    async def _begin_tls(self, tls: ssl.SSLContext) -> None:
        try:
            async with asyncio.timeout(None) as self._handshake:
                await self.writer.start_tls(tls)
        finally:
            self._handshake = None

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and not self._is_gone:
            note = self.crowd.note_idle if event.idle else self.crowd.note_busy
            note(self)
        await super().protocol_send(event)

    @property
    def is_receiving(self) -> bool:
        protocol = self.protocol.protocol
        return isinstance(protocol, Http1) and protocol.connection.their_state is h11.SEND_BODY

    def abort(self) -> None:
        if self._handshake is None:
            self.writer.transport.abort()
        else:  # asyncio treats an aborted handshake as completed, so it is timed out
            self._handshake.reschedule(0)

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            self._is_gone = True
            await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        if not self._is_gone:  # the client may disconnect before its last response ends
            await super()._idle_timeout()

    async def _close(self) -> None:
        async with asyncio.timeout(self.last_bytes_s) as limit:  # _close swallows CancelledError
            await super()._close()
        if limit.expired():
            self.writer.transport.abort()


def make_exception_handler() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return a loop's exception handler that logs a lack of descriptors once in ACCEPT_LOG_S."""
    last = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif clock.now() - last > ACCEPT_LOG_S:
            last = clock.now()
            log.error("too_many_open_files", error=str(error))

    return handle


def install(last_bytes_s: float, tls: ssl.SSLContext | None = None) -> None:
    """Replace Hypercorn's classes with those of this package, before Hypercorn serves.

    With `tls`, Hypercorn's config must have no certificate.
    """
    Connection.last_bytes_s, Connection.tls = last_bytes_s, tls
    hypercorn.asyncio.run.TCPServer = Connection  # type: ignore[attr-defined]
    hypercorn.protocol.H11Protocol = Http1  # type: ignore[assignment, attr-defined]
    hypercorn.protocol.h11.HTTPStream = Stream  # type: ignore[assignment, attr-defined]
