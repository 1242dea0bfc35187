"""Requests and clients by hand, and the facts that tests wait for."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import orjson

from gateway import metrics
from tests.fakes import Gate
from tests.provoked.readings import reading

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": [{"role": "user", "content": text}], **more}


def embed(*texts: str) -> dict[str, Any]:
    return {"model": "embedder", "input": texts}


def path_of(body: dict[str, Any]) -> str:
    return "/v1/embeddings" if "input" in body else "/v1/chat/completions"


def written(body: dict[str, Any]) -> bytes:
    """Write a request as it is sent."""
    sent = orjson.dumps(body)
    head = f"POST {path_of(body)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}"
    return head.encode() + b"\r\n\r\n" + sent


async def ask(
    client: httpx2.AsyncClient, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx2.Response:
    async with client.stream("POST", path_of(body), json=body, headers=headers) as answer:
        await answer.aread()
        return answer


async def leave(asking: "asyncio.Task[Any]") -> None:
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


def said(answer: httpx2.Response) -> Any:
    """Read the text of a model's answer."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def counted(model: str, stage: str) -> float:
    """Count the clients who left while their requests stood there."""
    return float(metrics.of(metrics.CANCELLED, model, stage)._value.get())


async def reached(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, 60)


async def inside(client: httpx2.AsyncClient, count: int) -> None:
    """Wait until this number of requests wait or run."""
    async with asyncio.timeout(60):
        while (await reading(client)).work["requests"] < count:
            await asyncio.sleep(0.01)


async def not_well(client: httpx2.AsyncClient) -> dict[str, Any]:
    """Wait until /health says so, and return its words."""
    async with asyncio.timeout(60):
        while (health := await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.02)
    words: dict[str, Any] = health.json()
    return words


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
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        return int(head.split()[1]), await reader.readexactly(int(length or b"0"))


@contextlib.contextmanager
def unread(url: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request whose answer is not read while entered."""
    host, _, port = url.removeprefix("http://").strip("/").partition(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        reader.sendall(written(body))
        yield
