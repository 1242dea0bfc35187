"""Request bodies, and limits for one body and for the memory that all bodies take."""

import asyncio
import contextlib
from itertools import chain

from starlette.requests import Request
from starlette.types import Scope

from gateway.errors import (
    EncodingNotSupported,
    GatewayError,
    HeadTooLarge,
    SlowBody,
    TooLarge,
    Unavailable,
)

SMALL_BYTES = 1024 * 1024  # answers up to this size are never refused
# Bytes of each body that are not counted, so that small requests always fit.
UNCOUNTED_BYTES = 64 * 1024
# A body above the limit is read and discarded up to this multiple of the limit: if the connection
# closed while the client still sends, the client would not see the 413.
DISCARD_FACTOR = 4


class Bodies:
    """The total bytes of request bodies under way, and of answers not read yet."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0

    def has_room(self, more: int, nbytes: int) -> bool:
        """Return True if a body of `nbytes` may grow by `more`; the only body always may."""
        return self.nbytes == nbytes or self.nbytes + more <= self.max_bytes


class Body:
    """The share of one request body, or one answer, in the total of `Bodies`."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self._nbytes = 0

    def count(self, size: int, *, is_refusable: bool = True) -> None:
        """Set the number of bytes held, or raise Unavailable."""
        nbytes = max(0, size - UNCOUNTED_BYTES)
        more = nbytes - self._nbytes
        # A body without room is refused: two half-read bodies could wait for each other forever.
        if is_refusable and more > 0 and not self.bodies.has_room(more, self._nbytes):
            raise Unavailable(
                "The requests being read and the answers being sent are too large together. "
                "Please try again shortly.",
                retry_after_s=1,
            )
        self.bodies.nbytes += more
        self._nbytes = nbytes

    def count_answer(self, size: int) -> None:
        """Set the number of bytes held for an answer; only a large one may raise Unavailable."""
        self.count(size, is_refusable=size > SMALL_BYTES)


def check_head(scope: Scope, max_bytes: int) -> None:
    size = sum(map(len, chain.from_iterable(scope["headers"])))
    if size + len(scope["path"]) + len(scope["query_string"]) > max_bytes:
        raise HeadTooLarge(f"The path, query and headers are larger than {max_bytes} bytes.")


async def read_body(request: Request, held: Body, max_bytes: int, timeout_s: float) -> bytearray:
    """Read the whole body, and count its bytes in `held`.

    Raises TooLarge, SlowBody, Unavailable, EncodingNotSupported or ClientDisconnect.
    """
    body = bytearray()
    length = int(request.headers.get("content-length", 0))
    if "expect" in request.headers and length > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            refusal = await _receive(request, held, body, max_bytes)
    except TimeoutError:
        raise SlowBody(f"The request body did not arrive within {timeout_s:g} seconds.") from None
    if refusal is not None:
        raise refusal
    return body


async def _receive(
    request: Request, held: Body, body: bytearray, max_bytes: int
) -> GatewayError | None:
    """Read a body into `body`; if it is refused, discard the rest and return the error."""
    size = 0
    refusal = _refuse_encoding(request)
    async with contextlib.aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > DISCARD_FACTOR * max_bytes:
                break
            if refusal is None:
                refusal = _refuse_size(held, size, max_bytes)
            if refusal is None:
                body += chunk
            else:
                body.clear()
    return refusal


def _refuse_encoding(request: Request) -> GatewayError | None:
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() in ("", "identity"):
        return None
    return EncodingNotSupported(encoding)


def _refuse_size(held: Body, size: int, max_bytes: int) -> GatewayError | None:
    try:
        if size > max_bytes:
            raise _too_large(max_bytes)
        held.count(size)
    except GatewayError as error:
        held.count(0)
        return error
    return None


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {max_bytes} bytes.")
