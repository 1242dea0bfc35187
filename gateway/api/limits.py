"""What a request may cost before anybody looks at it: its size and its slowness."""

import asyncio
from itertools import chain

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from gateway.errors import HeadTooLarge, SlowBody, TooLarge

# What is too large is read on, and thrown away, up to so many times the limit: a connection
# closed in the middle of a client's sending is reset, and it would never see the 413.
PATIENCE = 4


def check_head(scope: Scope, max_bytes: int) -> None:
    """Raise HeadTooLarge for a path, query and headers above the limit, together."""
    size = sum(map(len, chain.from_iterable(scope["headers"])))
    if size + len(scope["path"]) + len(scope["query_string"]) > max_bytes:
        raise HeadTooLarge(f"The path, query and headers are larger than {max_bytes} bytes.")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Read the body whole.

    Raises TooLarge for one above the limit, and SlowBody when it is not here after `timeout_s`.
    """
    body = bytearray()
    size = 0
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
                if size <= max_bytes:
                    body += chunk
    except TimeoutError:
        raise SlowBody(f"The request body did not arrive within {timeout_s:g} seconds.") from None
    if size > max_bytes:
        raise TooLarge(f"The request body is larger than {max_bytes} bytes.")
    return bytes(body)
