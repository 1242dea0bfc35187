"""A body that is not read holds up nothing but its own sender."""

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator

import httpx2
import orjson
import pytest
from hyperframe.frame import DataFrame
from starlette.types import Receive, Scope, Send

from gateway.jobs import Stage
from gateway.registry import Catalog
from tests.provoked.conftest import chat
from tests.provoked.engines import HeldEngines
from tests.provoked.test_connections import HEALTH, Http2Client, answer, connected
from tests.provoked.test_leaving import reached, until
from tests.serving_app import served, served_app, settings

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
        size, more = 0, True
        while more:
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


def frames(stream: int, count: int, data: bytes = b"x") -> bytes:
    """Make pieces of a body."""
    return bytes(DataFrame(stream, data).serialize() * count)


async def upload(http2: Http2Client, stream: int, body: bytes) -> None:
    """Send a body as its windows let it, whatever comes meanwhile, and wait for the answer."""
    view = memoryview(body)
    while view:
        allowed = http2.state.local_flow_control_window(stream)
        size = min(len(view), allowed, http2.state.max_outbound_frame_size)
        if size == 0:
            async with asyncio.timeout(10):
                await http2.hear()
            continue
        http2.state.send_data(stream, bytes(view[:size]))
        http2.flush()
        view = view[size:]
    http2.state.end_stream(stream)
    http2.flush()
    await http2.listen(stream)


@pytest.mark.parametrize("end", [True, False], ids=["whole", "going on"])
async def test_a_refused_body_in_many_frames_holds_up_no_other_stream(
    models: Catalog, engines: HeldEngines, end: bool
) -> None:
    """Neither one under way nor a new one, whatever comes in the packet of the refused head."""
    async with served(models, engines, api_keys=["k"]) as client:
        async with connected(client) as pair:
            http2 = Http2Client(*pair)
            engines.chat.gates[Stage.DECODE].close()
            http2.ask(1, "k")
            http2.send(1, orjson.dumps(chat("a" * 90, stream=True)))
            await reached(engines.chat.gates[Stage.DECODE])
            for stream in range(3, 43, 2):
                http2.ask(stream, "wrong", flush=False)
                for _ in range(MANY):
                    http2.state.send_data(stream, b"x" * 50)
                if end:
                    http2.state.end_stream(stream)
                http2.flush()
                await http2.listen(stream)
            http2.ask(43, "k")
            http2.send(43, orjson.dumps(chat("new", stream=True)), end=True)
            engines.open()
            await http2.listen(1)
            await http2.listen(43)
    assert {http2.statuses[stream] for stream in range(3, 43, 2)} == {b"401"}
    assert all(http2.bodies[stream].endswith(b"data: [DONE]\n\n") for stream in (1, 43))


async def test_a_body_after_its_answer_takes_nothing_from_other_streams(
    models: Catalog, engines: HeldEngines
) -> None:
    """Though more comes than all streams together may send before it is read."""
    async with served(models, engines, api_keys=["k"]) as client:
        async with connected(client) as pair:
            http2 = Http2Client(*pair)
            http2.ask(1, "wrong")
            await http2.listen(1, until_end=False)
            await upload(http2, 1, b"x" * 20_000_000)
            http2.ask(3, "k")
            http2.send(3, orjson.dumps(chat("new")))
            await http2.listen(3)
    assert http2.statuses == {1: b"401", 3: b"200"}


async def test_a_stream_that_is_reset_with_its_body_unread_holds_up_no_other(
    of_reader: httpx2.AsyncClient, reader: Reader
) -> None:
    """Nor does what it had sent count against what others may send."""
    async with connected(of_reader) as pair:
        http2 = Http2Client(*pair)
        for stream in range(1, 2001, 2):
            http2.ask(stream, "k", "/held", flush=False)
            for _ in range(4):
                http2.state.send_data(stream, b"x" * 16_000)
            http2.state.reset_stream(stream)
            http2.flush()
            await http2.ping()
        http2.ask(2001, "k", "/read")
        await upload(http2, 2001, b"x" * 1_000_000)
    assert http2.bodies[2001] == b"1000000"


async def test_bodies_that_wait_to_be_read_take_nothing_from_other_streams(
    of_reader: httpx2.AsyncClient, reader: Reader
) -> None:
    """Each may send what its own window holds and no more; others send theirs whole meanwhile."""
    async with connected(of_reader) as pair:
        http2 = Http2Client(*pair)
        held = range(1, 199, 2)
        for stream in held:
            http2.ask(stream, "k", "/held")
        await http2.ping()
        for stream in held:
            while size := min(16_000, http2.state.local_flow_control_window(stream)):
                http2.state.send_data(stream, b"x" * size)
            http2.flush()
        http2.ask(199, "k", "/read")
        await upload(http2, 199, b"x" * 1_000_000)
        assert http2.bodies[199] == b"1000000"
        assert reader.held == len(held)
        assert all(http2.state.local_flow_control_window(stream) == 0 for stream in held)
        reader.is_let_go.set()
        for stream in held:
            await upload(http2, stream, b"x" * 100_000)
    assert {http2.bodies[stream] for stream in held} == {b"%d" % (65_535 + 100_000)}


async def test_small_and_empty_pieces_cost_no_more_than_their_bytes(
    of_reader: httpx2.AsyncClient, reader: Reader
) -> None:
    """A body that is not read takes the memory of its window, in however many frames it comes."""
    async with connected(of_reader) as pair:
        http2 = Http2Client(*pair)
        http2.ask(1, "k", "/held")
        await until(lambda: reader.held == 1)
        await http2.ping()
        small, empty = frames(1, 1000), frames(1, 1000, b"")
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(30):
                http2.writer.write(small + empty)
                await http2.writer.drain()
                await http2.ping()
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown < 1_000_000
        reader.is_let_go.set()
        http2.state.end_stream(1)
        http2.flush()
        await http2.listen(1)
    assert http2.bodies[1] == b"30000"


async def test_a_flood_of_empty_pieces_keeps_nobody_waiting(
    of_reader: httpx2.AsyncClient, reader: Reader
) -> None:
    """Others are answered before the last piece is read: all of them cost no window."""
    async with connected(of_reader) as pair, connected(of_reader) as other:
        http2, http1 = Http2Client(*pair), other
        http2.ask(1, "k", "/held")
        await until(lambda: reader.held == 1)
        await http2.ping()
        http2.writer.write(frames(1, 200_000, b""))
        flood = asyncio.create_task(http2.ping())
        for _ in range(3):
            http1[1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await http1[0].readuntil(b"\r\n\r\n0")
        assert not flood.done()
        async with asyncio.timeout(60):
            await flood


async def test_a_body_with_padding_is_taken_whole(of_reader: httpx2.AsyncClient) -> None:
    """What is padding counts in the windows, and is given back though nobody reads it."""
    async with connected(of_reader) as pair:
        http2 = Http2Client(*pair)
        http2.ask(1, "k", "/read")
        for _ in range(2000):
            while http2.state.local_flow_control_window(1) < 300:
                async with asyncio.timeout(10):
                    await http2.hear()
            http2.state.send_data(1, b"x", pad_length=255)
            http2.flush()
        http2.state.end_stream(1)
        http2.flush()
        await http2.listen(1)
    assert http2.bodies[1] == b"2000"


async def test_a_large_upload_over_http2_is_read_whole(
    models: Catalog, engines: HeldEngines
) -> None:
    """16 MB, on a connection whose stream may send 64 KiB before the app reads."""
    inputs = (b"," + b" " * 100_000).join(b'"text %d"' % number for number in range(160))
    body = b'{"model": "embedder", "input": [' + inputs + b"]}"
    async with served(models, engines) as client:
        async with connected(client) as pair:
            http2 = Http2Client(*pair)
            http2.ask(1, "k", "/v1/embeddings")
            await upload(http2, 1, body)
    assert len(body) > 15_900_000
    assert http2.statuses[1] == b"200"
    assert len(orjson.loads(http2.bodies[1])["data"]) == 160


@pytest.mark.parametrize("after", [b"", HEALTH], ids=["later", "in the same packet"])
async def test_the_request_after_a_refused_body_in_many_chunks_is_answered(
    models: Catalog, engines: HeldEngines, after: bytes
) -> None:
    """On the same connection, whether it comes with the body or after the answer."""
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
    """After its answer; nothing waits for the rest."""
    async with served(models, engines, api_keys=["k"]) as client:
        async with connected(client) as (reader, writer):
            writer.write(CHUNKED)
            assert (await answer(reader))[0] == 401
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""


async def test_over_http1_a_client_waits_until_its_body_is_read(
    of_reader: httpx2.AsyncClient, reader: Reader
) -> None:
    """What is read ahead is bounded, and nothing of it is lost."""
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
    """Over HTTP/1.1 the whole body is given to the app before the end of the connection."""
    async with connected(of_reader) as (answers, writer):
        body = b"1\r\nx\r\n" * MANY + b"0\r\n\r\n"
        head = b"POST /held HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + body)
        writer.write_eof()
        await until(lambda: reader.held == 1)
        await asyncio.sleep(0.05)  # for the end to be seen
        reader.is_let_go.set()
        assert await answer(answers) == (200, b"%d" % MANY)
