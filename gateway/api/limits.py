"""What a request may cost before anybody looks at it: its size and its slowness."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from gateway.errors import SlowBody, TooLarge


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Read the body whole.

    Raises TooLarge as soon as it is known to be, by its header or by its bytes, and SlowBody
    when it is not here after `timeout_s`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise SlowBody(
            f"The request body did not arrive within {timeout_s:g} seconds."
        ) from None
    return bytes(body)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {max_bytes} bytes.")


__all__ = ["ClientDisconnect", "read_body"]
