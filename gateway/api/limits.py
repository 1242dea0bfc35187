"""What a request may cost before anybody looks at it: its size and its slowness."""

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import chain

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from gateway.errors import GatewayError, HeadTooLarge, SlowBody, TooLarge, Unavailable

# What is refused for its size is read on, and thrown away, up to so many times the limit: a
# connection closed in the middle of a client's sending is reset, and it would never see the 413.
PATIENCE = 4


UNCOUNTED_BYTES = 64 * 1024  # of each body: most requests are let in however full it is


class Bodies:
    """The bytes of all bodies inside, each counted from its arrival to the end of its answer.

    One that finds no room is refused and not made to wait: who has read half of a body and waits
    for room to read the rest may wait for another who does the same.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.nbytes = 0

    @contextlib.contextmanager
    def body(self) -> Iterator["Body"]:
        """Count one request's body while it is inside."""
        body = Body(self)
        try:
            yield body
        finally:
            body.count(0)

    def has_room(self, more: int, held: int) -> bool:
        """Return True if a body that holds so much may hold more; one alone always may."""
        return self.nbytes == held or self.nbytes + more <= self._max_bytes


class Body:
    """One body's share."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0

    def count(self, size: int) -> None:
        """Count it as so large. Raises Unavailable when there is no room for it."""
        held = max(0, size - UNCOUNTED_BYTES)
        more = held - self._held
        if more > 0 and not self._bodies.has_room(more, self._held):
            raise Unavailable(
                "The requests being read are too large together. Please try again shortly.",
                retry_after_s=1,
            )
        self._bodies.nbytes += more
        self._held = held


def check_head(scope: Scope, max_bytes: int) -> None:
    """Raise HeadTooLarge for a path, query and headers above the limit, together."""
    size = sum(map(len, chain.from_iterable(scope["headers"])))
    if size + len(scope["path"]) + len(scope["query_string"]) > max_bytes:
        raise HeadTooLarge(f"The path, query and headers are larger than {max_bytes} bytes.")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytearray:
    """Read the body whole.

    Raises TooLarge for one above the limit, SlowBody when it is not here after `timeout_s`, and
    Unavailable when there is no room beside the others.
    """
    share: Body = request.scope["gateway.body"]
    body = bytearray()
    size = 0
    refusal: GatewayError | None = None
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more and size <= PATIENCE * max_bytes:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(chunk)
                if refusal is not None:
                    continue
                try:
                    if size > max_bytes:
                        raise TooLarge(f"The request body is larger than {max_bytes} bytes.")
                    share.count(size)
                    body += chunk
                except GatewayError as error:
                    refusal, body = error, bytearray()
                    share.count(0)
    except TimeoutError:
        raise SlowBody(f"The request body did not arrive within {timeout_s:g} seconds.") from None
    if refusal is not None:
        raise refusal
    return body
