"""The load tool against a gateway of scripted engines, and against servers that answer wrongly."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.workloads import Wording, burst, chat
from gateway.bench.load import Load, Peer, run_closed_loop
from gateway.bench.requests import Kind, Texts, Workload, embeddings
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

MODELS = {
    "embedder": {"kind": "embedding", "source": "path:."},
    "writer": {"kind": "chat", "source": "path:."},
}


def wording(model: str, **given: Any) -> Wording:
    usual = {"texts_per_request": 1, "max_tokens": 5} | given
    return Wording(model=model, texts=Texts(1, [3]), prompts=Texts(1, [3]), **usual)


@asynccontextmanager
async def gateway(folder: Path, engines: ScriptedEngines) -> AsyncIterator[Peer]:
    async with served(catalog(folder, MODELS), engines) as client:
        async with Peer(str(client.base_url)) as peer:
            yield peer


@asynccontextmanager
async def answering(*answers: bytes, timeout_s: float = 10) -> AsyncIterator[Peer]:
    """Serve raw bytes, one answer a request, the last for ever; nothing at all hangs up."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        await reader.readexactly(length)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer == b"wait":
            await reader.read()
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Peer(f"http://127.0.0.1:{port}/v1/", timeout_s=timeout_s) as peer:
        yield peer


def http(body: object, status: str = "200 OK", kind: str = "application/json") -> bytes:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def events(*data: bytes) -> bytes:
    return http(b"".join(b"data: %s\n\n" % each for each in data), kind="text/event-stream")


async def test_vectors_are_counted(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    workload = wording("embedder", texts_per_request=2).workload(Kind.EMBEDDINGS)
    async with gateway(tmp_path, engines) as peer:
        [figures] = await run_closed_loop(peer, [Load(workload, 3)], warmup_s=0.1, duration_s=0.4)
    assert figures.errors == {}
    assert figures.requests > 0
    # those under way at either end of the window count by their share
    assert figures.units_per_s == pytest.approx(2 * figures.requests_per_s, abs=2 * 3 * 2 / 0.4)
    assert figures.latency is not None
    assert figures.first is None
    assert sum(map(len, engines.embedder.batches)) >= 2 * figures.requests


async def test_tokens_and_the_first_of_them_are_timed(tmp_path: Path) -> None:
    """A scripted answer is its prompt, a character a token, here five of them."""
    workload = wording("writer").workload(Kind.CHAT)
    async with gateway(tmp_path, ScriptedEngines()) as peer:
        answers = await burst(peer, workload, 4)
    assert [answer.error for answer in answers] == [None] * 4
    assert [answer.units for answer in answers] == [5] * 4
    assert all(answer.prompt > 5 for answer in answers)
    assert all(answer.started < answer.arrivals[0] <= answer.ended for answer in answers)
    assert all(len(answer.arrivals) == 5 for answer in answers)


SAID = b'{"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}'
UNENDED = b'{"choices": [{"delta": {"content": "a"}}]}'


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (events(SAID, b"[DONE]"), None),
        (events(UNENDED, b"[DONE]"), "no finish_reason"),
        (events(SAID), "stream without [DONE]"),
        (events(b"{oops"), "event is not JSON"),
        (events(b'{"error": {"code": "overloaded"}}'), "error event overloaded"),
        (events(SAID)[:-4], "answer cut short"),
        (http({"error": {"code": "rate_limit_exceeded"}}, "429 Slow"), "429 rate_limit_exceeded"),
        (http({"error": {"code": None, "type": "server_error"}}, "500 Oh"), "500 server_error"),
        (http(b"<html>", "502 Bad Gateway"), "502"),
        (b"", "disconnected"),
        (b"wait", "timed out"),
    ],
)
async def test_wrong_streams_are_errors_by_name(answer: bytes, error: str | None) -> None:
    async with answering(answer, timeout_s=0.3) as peer:
        got = await peer.ask(chat("any", "hello", max_tokens=1, is_streamed=True))
    assert got.error == error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (http(b"{"), "answer is not JSON"),
        (http([1]), "answer is not an object"),
        (http({"data": []}), "wrong number of vectors"),
        (http({"data": [{}]}), "answer has missing or wrong fields"),
    ],
)
async def test_wrong_bodies_are_errors_by_name(answer: bytes, error: str) -> None:
    async with answering(answer) as peer:
        assert (await peer.ask(embeddings("any", ["a"]))).error == error


async def test_errors_are_counted_and_slow_their_client_down() -> None:
    """A client that is refused at once does not spin."""
    refused = http({"error": {"code": "rate_limit_exceeded"}}, "429 Slow")
    workload = Workload(lambda number: embeddings("any", [str(number)]))
    async with answering(refused) as peer:
        [figures] = await run_closed_loop(peer, [Load(workload, 2)], warmup_s=0, duration_s=0.5)
    assert Counter(figures.errors).keys() == {"429 rate_limit_exceeded"}
    assert 2 <= figures.errors["429 rate_limit_exceeded"] <= 12
    assert figures.units_per_s == 0


def test_texts_are_the_same_again_and_no_two_alike() -> None:
    texts, again, others = Texts(1, [2, 5]), Texts(1, [2, 5]), Texts(2, [2, 5])
    some = [texts[number] for number in range(200)]
    assert some == [again[number] for number in range(200)]
    assert len(set(some)) == 200
    assert [len(text.split()) for text in some[:4]] == [2, 5, 2, 5]
    assert sum(texts[n] == others[n] for n in range(200)) < 20
