"""A body that is not read holds up nothing but its own sender."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from gateway.registry import Catalog
from gateway.server import connections
from tests.provoked.engines import HeldEngines
from tests.provoked.harness import HEALTH, answer, connected
from tests.serving_app import served, served_app, settings
from tests.waiting import until

pytestmark = pytest.mark.anyio

MANY = 40  # pieces in one packet; Hypercorn's queue holds ten
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * MANY
)


class Reader:
    """An app that reads no body at /held until it is let go, and answers how long each was."""

    def __init__(self) -> None:
        self.is_let_go = asyncio.Event()
        self.held = 0
        self.most_at_once = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["path"] == "/held":
            self.held += 1
            await self.is_let_go.wait()
        if scope["path"] == "/late":  # it has its answer only once the client has left
            self.held += 1
            while (await receive())["type"] != "http.disconnect":
                pass
        size, more = 0, True
        while more and scope["path"] != "/late":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            self.most_at_once = max(self.most_at_once, len(message["body"]))
            more = message["more_body"]
        body = b"%d" % size
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def reader() -> Reader:
    return Reader()


@pytest.fixture
async def of_reader(reader: Reader) -> AsyncIterator[httpx2.AsyncClient]:
    """Give a client of an app that reads no body until it is let go."""
    async with served_app(reader, settings()) as client:
        yield client
        reader.is_let_go.set()


@pytest.mark.parametrize("after", [b"", HEALTH], ids=["later", "in the same packet"])
async def test_the_request_after_a_refused_body_in_many_chunks_is_answered(
    models: Catalog, engines: HeldEngines, after: bytes
) -> None:
    async with served(models, engines, api_keys=["k"]) as client:
        async with connected(client) as (reader, writer):
            writer.write(CHUNKED + b"0\r\n\r\n" + after)
            assert (await answer(reader))[0] == 401
            if not after:
                writer.write(HEALTH)
            assert (await answer(reader))[0] == 200


async def test_a_connection_whose_refused_body_goes_on_is_closed(
    models: Catalog, engines: HeldEngines
) -> None:
    async with served(models, engines, api_keys=["k"]) as client:
        async with connected(client) as (reader, writer):
            writer.write(CHUNKED)
            assert (await answer(reader))[0] == 401
            async with asyncio.timeout(60):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""


async def test_a_client_beyond_its_rate_is_told_so_however_large_its_body(
    models: Catalog, engines: HeldEngines
) -> None:
    """A connection closed while it still sends would be reset, and the answer lost."""
    size = 8_000_000
    async with served(models, engines, api_keys=["k"], requests_per_minute=1) as client:
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n"
        async with connected(client) as (reader, writer):
            writer.write(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            assert (await answer(reader))[0] == 400
            writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode())
            await drained(writer, b"x" * size)
            assert (await answer(reader))[0] == 429


async def test_over_http1_a_client_waits_until_its_body_is_read(
    of_reader: httpx2.AsyncClient, reader: Reader
) -> None:
    """A bounded number of bytes is read ahead, and nothing of them is lost."""
    size = 64_000_000
    async with connected(of_reader) as (answers, writer):
        head = f"POST /held HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode())
        sending = asyncio.create_task(drained(writer, b"x" * size))
        await until(lambda: reader.held == 1)
        done, _ = await asyncio.wait([sending], timeout=0.5)
        assert not done
        reader.is_let_go.set()
        assert await answer(answers) == (200, b"%d" % size)
        await sending
    assert reader.most_at_once < 1_000_000


async def drained(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send it all."""
    writer.write(data)
    await writer.drain()


async def test_a_client_that_ends_its_side_with_its_body_is_answered(
    of_reader: httpx2.AsyncClient, reader: Reader
) -> None:
    async with connected(of_reader) as (answers, writer):
        body = b"1\r\nx\r\n" * MANY + b"0\r\n\r\n"
        head = b"POST /held HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + body)
        writer.write_eof()
        await until(lambda: reader.held == 1)
        await asyncio.sleep(0.05)  # lets the end be seen
        reader.is_let_go.set()
        assert await answer(answers) == (200, b"%d" % MANY)


async def test_what_a_client_sent_ahead_is_not_served_once_it_has_left(
    of_reader: httpx2.AsyncClient, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of requests of nobody would be answered, and each answer is a line of asyncio's."""
    crowd = connections.Crowd()
    monkeypatch.setattr(connections.Connection, "crowd", crowd)
    async with connected(of_reader) as (_, writer):
        writer.write(HEALTH.replace(b"/health", b"/late") * 20)
        await until(lambda: reader.held == 1)
    await until(lambda: not (crowd._idle or crowd._busy))
    assert reader.held == 1


POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nExpect: 100-Continue\r\n"
BODY = b'{"model": "embedder", "input": "hi"}'


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (POST + b"Content-Length: 100000000000\r\n\r\n", 413),
        (POST.replace(b"embeddings", b"nothing") + b"Content-Length: 5\r\n\r\n", 404),
        (POST.replace(b"localhost", b"evil.example") + b"Content-Length: 5\r\n\r\n", 403),
    ],
)
async def test_a_body_that_would_be_refused_is_not_asked_for(
    client: httpx2.AsyncClient, head: bytes, status: int
) -> None:
    async with connected(client) as (reader, writer):
        writer.write(head)
        assert (await answer(reader))[0] == status
        async with asyncio.timeout(60):
            assert await reader.read() == b""


@pytest.mark.parametrize("length", [b"Content-Length: %d", b"Transfer-Encoding: chunked"])
async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_once(
    client: httpx2.AsyncClient, length: bytes
) -> None:
    body = BODY if b"%" in length else b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    head = POST + length.replace(b"%d", b"%d" % len(BODY)) + b"\r\n\r\n"
    async with connected(client) as (reader, writer):
        for _ in range(2):
            writer.write(head)
            assert (await answer(reader))[0] == 100
            writer.write(body[:9])
            await asyncio.sleep(0.01)
            writer.write(body[9:])
            assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    "head", [POST, POST.replace(b"1.1", b"1.0")], ids=["it does not wait", "it cannot wait"]
)
async def test_a_client_that_does_not_wait_is_not_asked(
    client: httpx2.AsyncClient, head: bytes
) -> None:
    async with connected(client) as (reader, writer):
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert (await answer(reader))[0] == 200
