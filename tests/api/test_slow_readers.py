"""Clients that read slowly, in virtual time: how long their answers are kept."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway import clock
from gateway.api.bodies import Bodies
from gateway.api.in_flight import InFlight
from gateway.api.middleware import LEAST_RATE, PIECE_BYTES, Context
from tests.virtual_time import VirtualLoop

pytestmark = pytest.mark.anyio
SEND_TIMEOUT_S = 30.0


@pytest.fixture
def anyio_backend(monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """Run each test in a loop of its own, whose time the middleware reads."""
    loop = VirtualLoop()
    monkeypatch.setattr(clock, "now", loop.time)
    return "asyncio", {"loop_factory": lambda: loop}


async def read_at(rate: float, pieces: int, *, is_streamed: bool) -> int:
    """Read an answer of `pieces` pieces at a rate, and return the bytes that arrived."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = b"x" * PIECE_BYTES
        for number in range(pieces if is_streamed else 1):
            body = piece if is_streamed else piece * pieces
            more = is_streamed and number + 1 < pieces
            await send({"type": "http.response.body", "body": body, "more_body": more})

    received = 0

    async def send(message: Message) -> None:
        nonlocal received
        size = len(message.get("body", b""))
        await asyncio.sleep(size / rate)
        received += size

    async def receive() -> Message:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    bodies = Bodies(10**9)
    context = Context(app, InFlight(), bodies, send_timeout_s=SEND_TIMEOUT_S)
    await context(scope, receive, send)
    assert bodies.nbytes == 0
    return received


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_reads_at_the_least_rate_gets_all(*, is_streamed: bool) -> None:
    assert await read_at(LEAST_RATE, 400, is_streamed=is_streamed) == 400 * PIECE_BYTES


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_reads_more_slowly_has_left_after_the_send_timeout(
    *, is_streamed: bool
) -> None:
    """A client at half the least rate is cut off after twice the timeout, not after 19 minutes."""
    received = await read_at(LEAST_RATE / 2, 400, is_streamed=is_streamed)
    assert received == pytest.approx(2 * SEND_TIMEOUT_S * LEAST_RATE / 2, abs=2 * PIECE_BYTES)
