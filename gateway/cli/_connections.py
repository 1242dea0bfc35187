"""Hypercorn's connections, which here end when their client ends them, or stops reading.

Hypercorn 0.18 keeps one that was closed between two requests until the keep-alive time is over:
a descriptor and three tasks, so that clients who connect anew for each request use up the
descriptors of a process within a minute. One whose client reads no more it keeps for ever.
"""

import asyncio

import hypercorn.asyncio.run
from hypercorn.asyncio.tcp_server import TCPServer


class Connection(TCPServer):
    """One that waits for no next request once nobody can send it, and at its end for nobody."""

    last_bytes_s = 30.0  # for what was written to be read
    _is_gone = False

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
        async with asyncio.timeout(self.last_bytes_s) as limit:  # it swallows being cancelled
            await super()._close()
        if limit.expired():
            self.writer.transport.abort()


def install(last_bytes_s: float) -> None:
    """Have Hypercorn make these."""
    Connection.last_bytes_s = last_bytes_s
    hypercorn.asyncio.run.TCPServer = Connection  # type: ignore[attr-defined]
