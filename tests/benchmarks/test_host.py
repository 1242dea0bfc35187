"""A token's cost beside the arithmetic: the two sides in-process, the client, the verdict."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from benchmarks import servers
from benchmarks.raw_client import asks, stream_all
from benchmarks.targets.chatting import MLX_LM_NAME
from benchmarks.targets.host import Round, judged, write_model

EVENTS = (
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("host") / "host", layers=1)


@pytest.mark.slow
@pytest.mark.anyio
async def test_both_servers_stream_as_many_tokens_to_the_raw_client(model: Path) -> None:
    prompts = ["one two", "one two three four"]
    models = model.parent / "models.yaml"
    models.write_text(
        "version: 1\nmodels: {host: {kind: chat, source: 'path:host', preload: true}}\n"
    )
    async with servers.gateway(models) as ours, servers.mlx_lm(model) as theirs:
        own = await asyncio.to_thread(stream_all, ours, asks("host", prompts, 9))
        other = await asyncio.to_thread(stream_all, theirs, asks(MLX_LM_NAME, prompts, 9))
    assert own.tokens == other.tokens == [9, 9]
    assert own.token_s is not None
    assert own.token_s == own.seconds / 18


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_batch_generator_alone_tells_its_rate(model: Path) -> None:
    command = (sys.executable, "-m", "benchmarks.batch_generator", model, "--tuned")
    asked = {"prompts": ["one two", "one two three four"], "tokens": 9}
    async with servers.worker(*command, folder=servers.CHECKOUT) as alone:
        assert (await alone.ask(asked))["rate"] > 0
        assert (await alone.ask({**asked, "temperature": 1}))["rate"] > 0


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[str]:
    """Serve these bytes to whoever has sent a request, then close."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        await reader.readexactly(int(length[1]))
        with suppress(ConnectionError):  # a client that was refused does not wait for the rest
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        ([HEAD, *EVENTS], 2),
        ([HEAD[:5], HEAD[5:] + EVENTS[0][:9], EVENTS[0][9:] + EVENTS[1], *EVENTS[2:]], 2),
        ([HEAD, *EVENTS[:2]], None),
        ([HEAD, EVENTS[0], EVENTS[2]], None),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n", *EVENTS], None),
        ([], None),
    ],
    ids=["whole", "in pieces", "cut short", "without usage", "refused", "closed"],
)
async def test_the_raw_client_counts_whole_answers_alone(
    pieces: list[bytes], tokens: int | None
) -> None:
    async with answering(*pieces) as url:
        streamed = await asyncio.to_thread(stream_all, url, [b"{}", b"{}"])
    assert streamed.tokens == [tokens, tokens]
    assert (streamed.token_s is None) is (tokens is None)


def test_the_first_round_counts_for_its_errors_alone() -> None:
    rounds = [Round(9.0, 1.0), *[Round(1e-4, 3e-4, lost=1)] * 3]
    verdict = judged("work", rounds)
    assert verdict.value == pytest.approx(3.0)
    assert verdict.note == "100 / 300 µs a token; the other lost 3 requests"
    assert not judged("work", [Round(1.0, 1.0, errors=1), *rounds[1:]]).is_met
