"""What a connection may carry beside one well-formed request after another."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx2
import orjson
import pytest

from gateway.cli._connections import MOST_AHEAD
from gateway.jobs import Stage
from gateway.registry import Catalog
from tests.provoked.conftest import chat
from tests.provoked.engines import HeldEngines
from tests.provoked.test_leaving import counted, reached, until
from tests.serving_app import served

pytestmark = pytest.mark.anyio

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def left() -> float:
    """Count the clients who left, wherever their requests stood."""
    return sum(counted("writer", stage) for stage in Stage)


def post(text: str, **more: Any) -> bytes:
    body = orjson.dumps(chat(text, **more))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def connected(
    client: httpx2.AsyncClient,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the gateway of a client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one answer whole."""
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        return int(head.split()[1]), await reader.readexactly(int(length or b"0"))


async def everything(client: httpx2.AsyncClient, sent: bytes) -> list[bytes]:
    """Send some bytes and return the status lines of all that comes until the connection ends."""
    async with connected(client) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(10):
            told = await reader.read()
    return [line for line in told.split(b"\r\n") if line.startswith(b"HTTP/")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("after", [b"\r\n", b"x", HEALTH[:9], HEALTH, b"x" * 100_000])
async def test_a_client_that_sent_more_than_its_body_is_seen_to_leave(
    client: httpx2.AsyncClient, engines: HeldEngines, after: bytes, stream: bool
) -> None:
    """Old clients send a line's end after a body; others the next request."""
    before = left()
    assert (await client.post("/v1/chat/completions", json=chat("loads it"))).status_code == 200
    engines.chat.gates[Stage.DECODE].close()
    async with connected(client) as (_, writer):
        writer.write(post("a" * 90, stream=stream) + after)
        await reached(engines.chat.gates[Stage.DECODE])
    await until(lambda: left() == before + 1)
    engines.open()
    await until(lambda: engines.chat.rows == 0)


@pytest.mark.parametrize("between", [b"", b"\r\n", b"\r\n\r\n"])
async def test_requests_that_are_sent_at_once_are_answered_in_order(
    client: httpx2.AsyncClient, engines: HeldEngines, between: bytes
) -> None:
    """Each when the one before it is; the blank lines between them are nothing."""
    async with connected(client) as (reader, writer):
        writer.write(between.join([post("first"), HEALTH, post("third")]) + between)
        first, second, third = [await answer(reader) for _ in range(3)]
        writer.write(HEALTH)
        fourth = await answer(reader)
    assert orjson.loads(first[1])["choices"][0]["message"]["content"] == "first"
    assert orjson.loads(third[1])["choices"][0]["message"]["content"] == "third"
    assert orjson.loads(second[1]) == orjson.loads(fourth[1]) == {"status": "ok"}


async def test_what_is_sent_ahead_in_pieces_is_put_together(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """While the first is being answered."""
    assert (await client.post("/v1/chat/completions", json=chat("loads it"))).status_code == 200
    engines.chat.gates[Stage.DECODE].close()
    async with connected(client) as (reader, writer):
        writer.write(post("first") + b"\r")
        await reached(engines.chat.gates[Stage.DECODE])
        for piece in (b"\n", post("second")[:50], post("second")[50:]):
            writer.write(piece)
            await asyncio.sleep(0.02)
        engines.open()
        texts = [orjson.loads((await answer(reader))[1])["choices"] for _ in range(2)]
    assert [choices[0]["message"]["content"] for choices in texts] == ["first", "second"]


async def test_a_client_that_sends_far_more_than_it_waits_for_has_left(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """What it sends would be kept, and nobody would know when it goes."""
    before = left()
    assert (await client.post("/v1/chat/completions", json=chat("loads it"))).status_code == 200
    engines.chat.gates[Stage.DECODE].close()
    async with connected(client) as (reader, writer):
        writer.write(post("a" * 90))
        await reached(engines.chat.gates[Stage.DECODE])
        writer.write(b"x" * 2 * MOST_AHEAD)
        await until(lambda: left() == before + 1)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    engines.open()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
        b"HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n",
        b"HTTP/1.1\r\nHost: localhost\r\nX: y\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\n",
        b"HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n",
        b"HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: identity, chunked\r\n\r\n",
    ],
)
@pytest.mark.parametrize("pieces", [1, 1000])
async def test_a_request_that_two_readers_may_part_differently_is_refused(
    client: httpx2.AsyncClient, head: bytes, pieces: int
) -> None:
    """And nothing after it is read: it may be another's request."""
    sent = b"POST /v1/nothing " + head + b"0\r\n\r\n" + HEALTH
    async with connected(client) as (reader, writer):
        answered = asyncio.create_task(answer(reader))
        for start in range(0, len(sent), size := -(-len(sent) // pieces)):
            if not answered.done():
                writer.write(sent[start : start + size])
                await asyncio.sleep(0.002)
        async with asyncio.timeout(10):
            status, body = await answered
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    assert status in (400, 501)
    assert set(orjson.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_a_body_has_line_feeds(client: httpx2.AsyncClient) -> None:
    """Only a head is held to CRLF, wherever the packets end."""
    body = orjson.dumps(chat("hi"), option=orjson.OPT_INDENT_2)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    sent = head.encode() + b"\r\n\r\n" + body
    async with connected(client) as (reader, writer):
        for cut in range(len(head), len(head) + 8):
            writer.write(sent[:cut])
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(sent[cut:])
            assert (await answer(reader))[0] == 200


async def test_an_upgrade_to_http2_is_not_followed(client: httpx2.AsyncClient) -> None:
    """It is answered as if it weren't asked for."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    settings = b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nConnection: close\r\n\r\n"
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert await everything(client, head + upgrade + settings) == [b"HTTP/1.1 200 "]


@dataclass
class Http2Client:
    """A client that says what it likes, frame by frame."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __post_init__(self) -> None:
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.state.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.pongs = 0
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.state.data_to_send())

    def ask(
        self, stream: int, key: str, path: str = "/v1/chat/completions", *, flush: bool = True
    ) -> None:
        names = {":method": "POST", ":path": path, ":authority": "localhost", ":scheme": "http"}
        self.state.send_headers(stream, [*names.items(), ("authorization", f"Bearer {key}")])
        if flush:
            self.flush()

    def send(self, stream: int, body: bytes, *, end: bool = True) -> None:
        for start in range(0, len(body), 16_000):
            self.state.send_data(stream, body[start : start + 16_000])
        if end:
            self.state.end_stream(stream)
        self.flush()

    async def listen(self, stream: int, *, until_end: bool = True) -> None:
        """Read on until a stream has ended, or has its status."""
        async with asyncio.timeout(10):
            while stream not in (self.ended if until_end else self.statuses):
                await self.hear()

    async def ping(self) -> None:
        """Wait until all that was sent has been read."""
        self.pongs = 0
        self.state.ping(b"all read")
        self.flush()
        async with asyncio.timeout(10):
            while not self.pongs:
                await self.hear()

    async def hear(self) -> None:
        """Take what comes next."""
        data = await self.reader.read(65536)
        assert data, "the connection was closed"
        for event in self.state.receive_data(data):
            self._take(event)
        self.flush()

    def _take(self, event: Any) -> None:
        assert not isinstance(event, h2.events.ConnectionTerminated), event
        if isinstance(event, h2.events.ResponseReceived):
            self.statuses[event.stream_id] = dict(event.headers)[b":status"]
        elif isinstance(event, h2.events.DataReceived):
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
            self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.PingAckReceived):
            self.pongs += 1
        elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
            self.ended.add(event.stream_id)


async def test_a_body_after_its_answer_ends_no_other_stream(
    models: Catalog, engines: HeldEngines
) -> None:
    """Over HTTP/2 a 401 comes before the body does; the stream beside it is finished, and so are
    those that come later.
    """
    body = orjson.dumps(chat("a" * 90, stream=True))
    async with served(models, engines, api_keys=["k"]) as client:
        async with connected(client) as pair:
            http2 = Http2Client(*pair)
            engines.chat.gates[Stage.DECODE].close()
            http2.ask(1, "k")
            http2.send(1, body)
            await reached(engines.chat.gates[Stage.DECODE])
            for stream in (3, 5, 7):
                http2.ask(stream, "wrong")
                await http2.listen(stream, until_end=False)
                http2.send(stream, b"x" * 30_000, end=stream != 5)
            engines.open()
            await http2.listen(1)
            http2.ask(9, "k")
            http2.send(9, body)
            await http2.listen(9)
    assert http2.statuses == {1: b"200", 3: b"401", 5: b"401", 7: b"401", 9: b"200"}
    assert all(http2.bodies[stream].endswith(b"data: [DONE]\n\n") for stream in (1, 9))


async def test_a_connect_over_http2_ends_no_other_stream(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """It has no path, and is refused alone."""
    async with connected(client) as pair:
        http2 = Http2Client(*pair)
        engines.chat.gates[Stage.DECODE].close()
        http2.ask(1, "k")
        http2.send(1, orjson.dumps(chat("hello")))
        await reached(engines.chat.gates[Stage.DECODE])
        http2.state.send_headers(3, [(":method", "CONNECT"), (":authority", "localhost")])
        http2.flush()
        await http2.listen(3)
        engines.open()
        await http2.listen(1)
    assert http2.statuses == {1: b"200"}
