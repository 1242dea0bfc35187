"""The bytes that a connection may carry beside one well-formed request after another."""

import asyncio
import contextlib
import errno
import os
import socket
import sys

import httpx2
import orjson
import pytest
import structlog
from hypercorn.events import Event, RawData

from gateway.clock import Stage
from gateway.server import connections
from gateway.server.http1 import MOST_AHEAD
from tests.provoked.engines import HeldEngines
from tests.provoked.harness import (
    HEALTH,
    answer,
    ask,
    chat,
    connected,
    counted,
    reached,
    written,
)
from tests.waiting import until

pytestmark = pytest.mark.anyio


POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
MANY = 400  # connections at once
CHUNKED = POST.encode() + b"Transfer-Encoding: chunked\r\n"


def left() -> float:
    """Count the clients who left, wherever their requests stood."""
    return sum(counted("writer", stage) for stage in Stage)


async def everything(client: httpx2.AsyncClient, sent: bytes) -> list[bytes]:
    """Send some bytes and return the status lines of all that comes until the connection ends."""
    async with connected(client) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(60):
            told = await reader.read()
    return [line for line in told.split(b"\r\n") if line.startswith(b"HTTP/")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("after", [b"\r\n", b"x", HEALTH[:9], HEALTH, b"x" * 100_000])
async def test_a_client_that_sent_more_than_its_body_is_seen_to_leave(
    client: httpx2.AsyncClient, engines: HeldEngines, after: bytes, stream: bool
) -> None:
    """Old clients send a line's end after a body; others the next request."""
    before = left()
    await ask(client, chat("loads it"))
    engines.chat.gates[Stage.DECODE].close()
    async with connected(client) as (_, writer):
        writer.write(written(chat("a" * 90, stream=stream)) + after)
        await reached(engines.chat.gates[Stage.DECODE])
    await until(lambda: left() == before + 1)
    engines.open()
    await until(lambda: engines.chat.rows == 0)


@pytest.mark.parametrize("between", [b"", b"\r\n", b"\r\n\r\n"])
async def test_requests_that_are_sent_at_once_are_answered_in_order(
    client: httpx2.AsyncClient, engines: HeldEngines, between: bytes
) -> None:
    async with connected(client) as (reader, writer):
        writer.write(
            between.join([written(chat("first")), HEALTH, written(chat("third"))]) + between
        )
        first, second, third = [await answer(reader) for _ in range(3)]
        writer.write(HEALTH)
        fourth = await answer(reader)
    assert orjson.loads(first[1])["choices"][0]["message"]["content"] == "first"
    assert orjson.loads(third[1])["choices"][0]["message"]["content"] == "third"
    assert orjson.loads(second[1]) == orjson.loads(fourth[1]) == {"status": "ok"}


async def test_a_client_that_sends_far_more_than_it_waits_for_has_left(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """Its bytes would be kept, and nobody would know when it goes."""
    before = left()
    await ask(client, chat("loads it"))
    engines.chat.gates[Stage.DECODE].close()
    async with connected(client) as (reader, writer):
        writer.write(written(chat("a" * 90)))
        await reached(engines.chat.gates[Stage.DECODE])
        writer.write(b"x" * 2 * MOST_AHEAD)
        await until(lambda: left() == before + 1)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    engines.open()


async def answered_once(client: httpx2.AsyncClient, sent: bytes, pieces: int) -> tuple[int, bytes]:
    """Send bytes in this number of packets and return their one answer.

    The connection ends after it: the bytes behind may be another's request.
    """
    async with connected(client) as (reader, writer):
        first = asyncio.create_task(answer(reader))
        for start in range(0, len(sent), size := -(-len(sent) // pieces)):
            if not first.done():
                writer.write(sent[start : start + size])
                await asyncio.sleep(0.002)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                await first
                assert await reader.read() == b""
        return await first


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
        b"HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding:\r\n chunked\r\n\r\n",
        b"HTTP/1.1\r\nHost: localhost\r\nX: y\r\n\tz\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\n Host: localhost\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("pieces", [1, 1000])
async def test_a_request_that_two_readers_may_part_differently_is_refused(
    client: httpx2.AsyncClient, head: bytes, pieces: int
) -> None:
    sent = b"POST /v1/nothing " + head + b"0\r\n\r\n" + HEALTH
    status, body = await answered_once(client, sent, pieces)
    assert status in (400, 501)
    assert set(orjson.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("pieces", [1, 1000])
@pytest.mark.parametrize(
    "end", [b"0\r\nX: y\n\n", b"0\r\n\n", b"0\r\nX: y\n\r\n", b"0\r\nX: y\r\n\r\n", b"0;a=\n\n"]
)
async def test_nothing_is_read_after_a_body_that_two_readers_may_end_elsewhere(
    client: httpx2.AsyncClient, end: bytes, pieces: int
) -> None:
    """The bytes behind may be another's request; the body itself is answered, or refused."""
    body = orjson.dumps(chat("hi"))
    sent = CHUNKED + b"\r\n%x\r\n%s\r\n" % (len(body), body) + end + HEALTH
    status, _ = await answered_once(client, sent, pieces)
    assert status in (200, 400)


@pytest.mark.parametrize("pieces", [1, 1000])
async def test_a_chunked_body_without_trailers_is_followed_by_the_next_request(
    client: httpx2.AsyncClient, pieces: int
) -> None:
    body = orjson.dumps(chat("hi"))
    sent = CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) + HEALTH
    async with connected(client) as (reader, writer):
        for start in range(0, len(sent), size := -(-len(sent) // pieces)):
            writer.write(sent[start : start + size])
            await asyncio.sleep(0)
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]


async def test_a_body_has_line_feeds(client: httpx2.AsyncClient) -> None:
    """CRLF is required in a head only, wherever the packets end."""
    body = orjson.dumps(chat("hi"), option=orjson.OPT_INDENT_2)
    head = f"{POST}Content-Length: {len(body)}".encode()
    sent = head + b"\r\n\r\n" + body
    async with connected(client) as (reader, writer):
        for cut in range(len(head), len(head) + 8):
            writer.write(sent[:cut])
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(sent[cut:])
            assert (await answer(reader))[0] == 200


async def test_an_upgrade_to_http2_is_not_followed(client: httpx2.AsyncClient) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    settings = b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nConnection: close\r\n\r\n"
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert await everything(client, head + upgrade + settings) == [b"HTTP/1.1 200 "]


@pytest.mark.parametrize("settings_frame", [b"", b"\0\0\0\4\0\0\0\0\0"])
async def test_http2_by_prior_knowledge_is_refused_and_the_connection_closed(
    client: httpx2.AsyncClient, settings_frame: bytes
) -> None:
    """The refusal is in HTTP/1.1, which the client may understand; a proxy may speak HTTP/2."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert await everything(client, preface + settings_frame) == [b"HTTP/1.1 505 "]


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", b"GET /health HTTP/1.1\r\nHost: local", written(chat("never whole"))[:-2]],
    ids=["nothing", "a byte", "half a head", "half a body"],
)
async def test_clients_that_say_nothing_keep_nobody_out(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """The connections that were idle for longest are closed beyond the limit.

    Clients that dribble keep nobody out, either. A connection whose request is under way stays.
    """
    monkeypatch.setattr(connections.Connection, "crowd", connections.Crowd(lambda: 20))
    async with contextlib.AsyncExitStack() as stack:
        silent = []
        for _ in range(60):
            reader, writer = await stack.enter_async_context(connected(client))
            writer.write(sent)
            silent.append(reader)
        async with connected(client) as (reader, writer):
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200
            for other in silent[:41]:
                with contextlib.suppress(ConnectionError):
                    async with asyncio.timeout(60):
                        assert await other.read() == b""


async def test_a_connection_with_a_request_under_way_is_not_closed_for_others(
    client: httpx2.AsyncClient, engines: HeldEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(client, chat("loads it"))
    monkeypatch.setattr(connections.Connection, "crowd", connections.Crowd(lambda: 20))
    engines.chat.gates[Stage.DECODE].close()
    async with connected(client) as (reader, writer), contextlib.AsyncExitStack() as stack:
        writer.write(written(chat("first")))
        await reached(engines.chat.gates[Stage.DECODE])
        for _ in range(60):
            await stack.enter_async_context(connected(client))
        async with connected(client) as (new, newest):
            newest.write(HEALTH)
            assert (await answer(new))[0] == 200
        engines.open()
        assert (await answer(reader))[0] == 200


@pytest.mark.skipif(sys.platform == "darwin", reason="its queues hold 128 connections")
async def test_a_burst_of_connections_leaves_descriptors_for_all_else(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections are accepted at once than may stay open, until they are seen."""
    seen = 0

    class Counter(connections.Crowd):
        def note_idle(self, connection: connections.Connection) -> None:
            nonlocal seen
            seen += 1
            super().note_idle(connection)

    monkeypatch.setattr(connections.Connection, "crowd", Counter(lambda: 20))
    with contextlib.ExitStack() as stack:
        for _ in range(MANY):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(("127.0.0.1", client.base_url.port))
        before = most = len(os.listdir("/dev/fd"))
        async with asyncio.timeout(60):
            while seen < MANY:
                await asyncio.sleep(0)
                most = max(most, len(os.listdir("/dev/fd")))
    assert most - before < connections.RESERVED


@pytest.mark.parametrize(("method", "has_body"), [(b"GET", True), (b"HEAD", False)])
async def test_a_whole_answer_is_one_write(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, method: bytes, has_body: bool
) -> None:
    """Each costs a call of the system. An answer without a body is sent, too."""
    sent: list[bytes] = []
    send = connections.Connection.protocol_send

    async def protocol_send(connection: connections.Connection, event: Event) -> None:
        if isinstance(event, RawData):
            sent.append(event.data)
        await send(connection, event)

    monkeypatch.setattr(connections.Connection, "protocol_send", protocol_send)
    async with connected(client) as (reader, writer):
        writer.write(HEALTH.replace(b"GET", method))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 405 "))
        await until(lambda: sent)
        assert len(sent) == 1
        assert sent[0].startswith(head)
        assert (len(sent[0]) > len(head)) == has_body


def test_too_many_open_files_are_told_once_a_minute() -> None:
    """asyncio tells of every place of the backlog: 223 MB in 40 seconds."""
    handle, loop = connections.make_exception_handler(), asyncio.new_event_loop()
    full = OSError(errno.EMFILE, "Too many open files")
    with structlog.testing.capture_logs() as lines:
        for _ in range(2000):
            handle(loop, {"message": "socket.accept() out of system resource", "exception": full})
    loop.close()
    assert [line["event"] for line in lines] == ["too_many_open_files"]
