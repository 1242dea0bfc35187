"""Over HTTP/2, what is wrong with one request is nothing to the others of its connection."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import h2.events
import httpx2
import orjson
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import HeadersFrame, PriorityFrame

from gateway.cli._http2 import Streams, is_well_formed
from gateway.jobs import Stage
from tests.provoked.conftest import chat
from tests.provoked.engines import HeldEngines
from tests.provoked.test_connections import Http2Client, connected
from tests.provoked.test_leaving import reached

pytestmark = pytest.mark.anyio

Head = list[tuple[str, str]]
Field = tuple[bytes, bytes]


def head(method: str = "GET", path: str = "/health", *more: tuple[str, str]) -> Head:
    return [
        (":method", method),
        (":path", path),
        (":scheme", "http"),
        (":authority", "localhost"),
        *more,
    ]


def without(name: str) -> Head:
    return [field for field in head() if field[0] != name]


def ask(client: Http2Client, fields: Head, *, end: bool = True) -> None:
    """Send a head on stream 3, whatever is in it."""
    client.state.send_headers(3, fields, end_stream=end)


def again(client: Http2Client, fields: Head, *, end: bool = True) -> None:
    """Send another head on stream 3."""
    frame = HeadersFrame(3, client.state.encoder.encode(fields))
    frame.flags |= {"END_HEADERS", "END_STREAM"} if end else {"END_HEADERS"}
    client.flush()
    client.writer.write(frame.serialize())


def body(client: Http2Client, length: int, *pieces: bytes, end: bool = True) -> None:
    """Send a POST that says how long its body is, and a body."""
    ask(client, head("POST", "/v1/embeddings", ("content-length", str(length))), end=False)
    for piece in pieces:
        client.state.send_data(3, piece)
    if end:
        client.state.end_stream(3)


def trailers(client: Http2Client, fields: Head, *, end: bool = True) -> None:
    """Send a POST with another head after its body."""
    body(client, 2, b"{}", end=False)
    again(client, fields, end=end)


def after_the_end(client: Http2Client) -> None:
    """Send another head for a request that is whole."""
    body(client, 2, b"{}")
    again(client, [("x", "1")])


MALFORMED: dict[str, Head] = {
    "uppercase": head("GET", "/health", ("X-Upper", "1")),
    "space in a name": head("GET", "/health", ("x y", "1")),
    "colon in a name": head("GET", "/health", ("x:y", "1")),
    "no token": head("GET", "/health", ("x(y", "1")),
    "no name": head("GET", "/health", ("", "1")),
    "line feed": head("GET", "/health", ("x", "1\r\ny: 2")),
    "control": head("GET", "/health", ("x", "1\x012")),
    "connection": head("GET", "/health", ("connection", "keep-alive")),
    "transfer-encoding": head("POST", "/health", ("transfer-encoding", "chunked")),
    "te": head("GET", "/health", ("te", "gzip")),
    "no method": without(":method"),
    "no path": without(":path"),
    "no scheme": without(":scheme"),
    "no authority": without(":authority"),
    "two paths": [(":path", "/ready"), *head()],
    "two hosts": [*without(":authority"), ("host", "localhost"), ("host", "localhost")],
    "another host": head("GET", "/health", ("host", "other")),
    "pseudo-header after others": [("x", "1"), *head()],
    "unknown pseudo-header": [(":other", "1"), *head()],
    "status": [(":status", "200"), *without(":method")],
    "empty path": head("GET", ""),
    "path without slash": head("GET", "health"),
    "space in a path": head("GET", "/health HTTP/1.1"),
    "path beyond ASCII": head("GET", "/é"),
    "method beyond ASCII": head("GÉT"),
    "space in a method": head("GET /"),
    "empty method": head(""),
    "CONNECT": [(":method", "CONNECT"), (":authority", "localhost")],
    "connect": head("connect"),
    "websocket": [(":protocol", "websocket"), *head("CONNECT")],
    "length is no number": head("POST", "/health", ("content-length", "+5")),
    "lengths differ": head("POST", "/health", ("content-length", "5"), ("content-length", "6")),
    "length of 5,000 digits": head("POST", "/health", ("content-length", "9" * 5000)),
}
ACTS: dict[str, Callable[[Http2Client], None]] = {
    **{name: partial(ask, fields=fields) for name, fields in MALFORMED.items()},
    "body too long": lambda client: body(client, 5, b"0123456789"),
    "body too long in pieces": lambda client: body(client, 5, b"0123", b"4567", end=False),
    "body too short": lambda client: body(client, 50, b"0123456789"),
    "trailers that end nothing": lambda client: trailers(client, [("x", "1")], end=False),
    "pseudo-header in trailers": lambda client: trailers(client, [(":path", "/")]),
    "informational trailers": lambda client: trailers(client, [(":status", "100")], end=False),
    "uppercase in trailers": lambda client: trailers(client, [("X", "1")]),
    "status in trailers": lambda client: trailers(client, [(":status", "100")]),
    "head after the end": after_the_end,
}


@asynccontextmanager
async def beside_another(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> AsyncIterator[Http2Client]:
    """Hold a request on stream 1 in its answer; at the end it is answered whole, and so is one
    that comes after all.
    """
    async with connected(client) as pair:
        http2 = Http2Client(*pair)
        http2.state.config.validate_outbound_headers = False
        http2.state.config.normalize_outbound_headers = False
        engines.chat.gates[Stage.DECODE].close()
        http2.ask(1, "k")
        http2.send(1, orjson.dumps(chat("hello")))
        await reached(engines.chat.gates[Stage.DECODE])
        yield http2
        engines.open()
        await http2.listen(1)
        last = http2.state.get_next_available_stream_id()
        http2.state.send_headers(last, head(), end_stream=True)
        http2.flush()
        await http2.listen(last)
        assert http2.statuses[1] == http2.statuses[last] == b"200"
        assert b"hello" in http2.bodies[1]


@pytest.mark.parametrize("name", ACTS)
async def test_a_malformed_request_ends_no_other_stream(
    client: httpx2.AsyncClient, engines: HeldEngines, name: str
) -> None:
    """It is reset, and nothing of it is answered with success."""
    async with beside_another(client, engines) as http2:
        ACTS[name](http2)
        http2.flush()
        await http2.listen(3)
        assert http2.statuses.get(3) != b"200"


async def test_a_large_head_over_http2_is_a_431_alone(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """Larger than the settings allow, and than is said to be read."""
    async with beside_another(client, engines) as http2:
        ask(http2, head("GET", "/health", *((f"x-{i}", "y" * 1000) for i in range(100))))
        http2.flush()
        await http2.listen(3)
        assert http2.statuses[3] == b"431"
        assert orjson.loads(http2.bodies[3])["error"]["type"] == "invalid_request_error"


async def test_priorities_end_no_stream(client: httpx2.AsyncClient, engines: HeldEngines) -> None:
    """Neither many nor one on itself: RFC 9113 has done away with them."""
    async with beside_another(client, engines) as http2:
        for stream in range(3, 2400, 2):
            http2.writer.write(PriorityFrame(stream, depends_on=stream).serialize())


async def test_streams_beyond_the_bound_are_refused_alone(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """A hundred may be open; what more there is has a head that is read, and no answer."""
    async with beside_another(client, engines) as http2:
        http2.state.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1000
        http2.state.remote_settings.acknowledge()
        for stream in range(3, 263, 2):
            http2.state.send_headers(stream, head("POST", "/v1/embeddings"))
        http2.flush()
        await http2.listen(261)
        assert {stream for stream in http2.ended if stream > 1} == set(range(201, 263, 2))
        for stream in range(3, 201, 2):
            http2.state.reset_stream(stream)
        http2.flush()


async def test_requests_that_are_taken_back_at_once_end_no_other_stream(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """Thousands in one packet, and more than a thousand in one connection."""
    async with beside_another(client, engines) as http2:
        for stream in range(3, 6003, 2):
            http2.state.send_headers(stream, head("POST", "/v1/embeddings"))
            http2.state.reset_stream(stream)
        http2.flush()


async def test_a_thousand_requests_end_no_connection(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    """Nothing is answered with a GOAWAY while another is being answered."""
    async with beside_another(client, engines) as http2:
        for start in range(3, 2203, 100):
            for stream in range(start, start + 100, 2):
                http2.state.send_headers(stream, head(), end_stream=True)
            http2.flush()
            await http2.listen(start + 98)


@pytest.mark.parametrize(
    "fields",
    [*MALFORMED.values(), [(":status", "100"), *head()]],
    ids=[*MALFORMED, "informational"],
)
def test_a_malformed_head_never_becomes_a_request(fields: Head) -> None:
    """Whichever of h2 and the gateway sees it."""
    server = Streams(H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    sender = H2Connection(config)
    sender.initiate_connection()
    frame = HeadersFrame(1, sender.encoder.encode(fields), flags=["END_HEADERS"])
    (reset,) = [
        event
        for event in server.receive_data(sender.data_to_send() + frame.serialize())
        if not isinstance(event, h2.events.RemoteSettingsChanged)
    ]
    assert isinstance(reset, h2.events.StreamReset)
    assert reset.error_code == ErrorCodes.PROTOCOL_ERROR


def fields(method: bytes = b"GET", path: bytes = b"/", *more: tuple[bytes, bytes]) -> list[Field]:
    return [(b":method", method), (b":path", path), *more]


@pytest.mark.parametrize(
    "given",
    [
        fields(),
        fields(b"OPTIONS", b"*"),
        fields(b"M-SEARCH", b"/a/b?c=%20&d=[]"),
        fields(b"GET", b"/", (b"x-y_z.1", b"a\tb \xc3\xa9"), (b"empty", b"")),
    ],
)
def test_what_http_allows_is_well_formed(given: list[Field]) -> None:
    """Values may have bytes beyond ASCII (RFC 9110, 5.5)."""
    assert is_well_formed(given)


@pytest.mark.parametrize(
    "given",
    [
        [],
        fields(b""),
        fields(b"G\xc3\x89T"),
        fields(b"GET /"),
        fields(b"CONNECT"),
        fields(b"connect"),
        fields(b"GET", b""),
        fields(b"GET", b"*"),
        fields(b"GET", b"a"),
        fields(b"GET", b"/ HTTP/1.1"),
        fields(b"GET", b"/\n"),
        fields(b"GET", b"/\xc3\xa9"),
        fields(b"GET", b"/", (b"x(", b"")),
        fields(b"GET", b"/", (b"", b"")),
        fields(b"GET", b"/", (b"x", b"\x7f")),
        fields(b"GET", b"/", (b"x", b"a\r\nb: c")),
        fields(b"GET", b"/", (b"x", b"a\n")),
    ],
)
def test_what_http_forbids_is_not_well_formed(given: list[Field]) -> None:
    """What a reader further on may take for something else."""
    assert not is_well_formed(given)
