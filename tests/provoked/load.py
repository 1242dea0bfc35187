"""Requests of every kind, whose answers are known in advance, and clients who leave at any moment.

Greedy answers of the demo model and vectors of MiniLM are the same in whatever company, so an
undisturbed run gives the expected form of every later answer.
"""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np

from benchmarks.workloads import PERSON
from gateway.bench.requests import DONE, EventReader, Transcript

COUNTRIES = ("France", "Japan", "Italy", "Egypt", "Norway", "Canada", "Peru", "Kenya")
TEXTS = tuple(
    f"{who} {did} {where}" * times
    for times, who in enumerate(("A fox", "The old captain", "Nobody", "My neighbour"), start=1)
    for did in ("slept", "has been seen", "was looking for something blue")
    for where in ("by the river. ", "in Lisbon. ")
)
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
GREEDY = {"temperature": 0, "max_tokens": 24}
EXACT, NEAR = 1e-5, 1e-3  # vectors; logprobs, which differ by the batch in their last digits


@dataclass(frozen=True)
class Ask:
    """One request. Its answer is known by its `name`."""

    name: str
    path: str
    body: bytes | None = None
    tolerance: float = EXACT

    @property
    def method(self) -> str:
        """Tell how it is sent."""
        return "GET" if self.body is None else "POST"


@dataclass(frozen=True)
class Answer:
    """The lasting parts of an answer: equal texts, to the letter, and nearly equal numbers."""

    status: int
    texts: Sequence[str]
    numbers: Sequence[float] = ()
    events: int = 0

    def is_like(self, other: "Answer", tolerance: float) -> bool:
        """Tell whether it says the same. How a stream is cut into events may differ."""
        if (self.status, self.texts) != (other.status, other.texts):
            return False
        if len(self.numbers) != len(other.numbers):
            return False
        return np.allclose(self.numbers, other.numbers, rtol=0, atol=tolerance)


def asks() -> dict[str, list[Ask]]:
    """List the requests that can be made, by kind."""
    cut_off = b'{"model": "demo-chat", "messages": [{"role": "user"'
    return {
        "embeddings": [
            _ask(f"embeddings {n}", "embeddings", input=TEXTS[n : n + 1 + n % 8]) for n in range(16)
        ],
        "chat": [_chat(f"chat {name}", name) for name in COUNTRIES],
        "streamed": [_chat(f"streamed {name}", name, stream=True) for name in COUNTRIES],
        "structured": [
            _chat(f"structured {name}", name, response_format=FORM, max_tokens=120)
            for name in COUNTRIES[:4]
        ],
        "logprobs": [
            _chat(f"logprobs {name}", name, tolerance=NEAR, logprobs=True, top_logprobs=2)
            for name in COUNTRIES
        ],
        "completions": [
            _ask(f"completions {name}", "completions", prompt=f"The capital of {name} is", **GREEDY)
            for name in COUNTRIES
        ],
        "models": [Ask("models", "/v1/models/demo-chat"), Ask("gone", "/v1/models/gone")],
        "bad": [
            Ask("cut", "/v1/chat/completions", cut_off),
            _ask("unknown", "chat/completions", model="gone", messages=[]),
            _ask("empty", "embeddings", input=[]),
            _ask("too long", "completions", prompt="word " * 20_000, **GREEDY),
            _chat("no form", "Spain", response_format={"type": "no such type"}),
        ],
    }


def _ask(name: str, path: str, *, tolerance: float = EXACT, **body: Any) -> Ask:
    model = "all-minilm-l6-v2" if path == "embeddings" else "demo-chat"
    return Ask(name, f"/v1/{path}", json.dumps({"model": model, **body}).encode(), tolerance)


def _chat(name: str, country: str, *, tolerance: float = EXACT, **more: Any) -> Ask:
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    given = {**GREEDY, "messages": messages, **more}
    return _ask(name, "chat/completions", tolerance=tolerance, **given)


def mixed(choose: random.Random) -> Iterator[Ask]:
    """Give requests without end: each kind as often as any other."""
    every = list(asks().values())
    while True:
        yield choose.choice(choose.choice(every))


def answered(status: int, body: bytes) -> Answer:
    """Read an answer, streamed or not. Raises WrongAnswer for a stream that is cut short."""
    if not body.startswith((b"data:", b":")):
        told = json.loads(body)
        return Answer(status, [*_texts(told)], [*_numbers(told)])
    transcript, events = Transcript(), EventReader().feed(body)
    for event in events:
        transcript.add(event)
    return Answer(status, [*_texts(transcript.answer())], events=len(events))


def _texts(told: Mapping[str, Any]) -> Iterator[str]:
    if error := told.get("error"):
        yield error["message"]
    if told.get("object") == "model":
        yield told["id"]
    for choice in told.get("choices", ()):
        yield choice["finish_reason"]
        yield choice["text"] if "text" in choice else choice["message"]["content"]


def _numbers(told: Mapping[str, Any]) -> Iterator[float]:
    if isinstance(told.get("data"), list):
        for each in told["data"]:
            yield from each["embedding"]
    for choice in told.get("choices", ()):
        for token in (choice.get("logprobs") or {}).get("content") or ():
            yield token["logprob"]
            yield from (likely["logprob"] for likely in token["top_logprobs"])


@dataclass
class Clients:
    """Clients of the gateway at `url`.

    `known` has the answer to each request, `seconds` its time when it was last asked.
    """

    url: str
    known: dict[str, Answer] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    async def learn(self) -> None:
        """Ask for everything there is, one after the other."""
        async with self.connected() as client:
            for ask in (ask for kind in asks().values() for ask in kind):
                self.known[ask.name] = await self._answer(client, ask)

    def connected(self) -> httpx2.AsyncClient:
        """Give a client for those who stay."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx2.AsyncClient(base_url=self.url, timeout=60, limits=limits)

    async def stay(self, client: httpx2.AsyncClient, ask: Ask) -> str | None:
        """Ask, and describe the fault of the answer, if any."""
        answer = await self._answer(client, ask)
        expected = self.known[ask.name]
        if answer.is_like(expected, ask.tolerance):
            return None
        return f"{ask.name}: {answer.status} {answer.texts}, not {expected.texts}"

    async def _answer(self, client: httpx2.AsyncClient, ask: Ask) -> Answer:
        started = time.perf_counter()
        got = await client.request(ask.method, ask.path, content=ask.body)
        self.seconds[ask.name] = time.perf_counter() - started
        return answered(got.status_code, got.content)

    async def leave(self, ask: Ask, choose: random.Random) -> None:
        """Ask, and be gone at some moment: before all is said, while it waits, is answered, or
        nearly is.
        """
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"{ask.method} {ask.path} HTTP/1.1\r\nHost: localhost\r\n"
        body = ask.body or b""
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        moment = choose.random()
        with suppress(ConnectionError):
            if moment < 0.2:
                writer.write(request[: choose.randrange(len(request))])
                await asyncio.sleep(choose.random() * 0.05)
            elif moment < 0.4 and (events := self.known[ask.name].events):
                writer.write(request)
                await _heard(reader, events - choose.choice((1, 1, 2, events // 2)))
            else:
                writer.write(request)
                await asyncio.sleep(choose.random() * self.seconds[ask.name])
        _close(writer, abruptly=choose.random() < 0.5)


async def _heard(reader: asyncio.StreamReader, events: int) -> None:
    """Read until this number of a stream's events have come."""
    heard = b""
    while heard.count(b"data: ") < events and DONE not in heard:
        if not (more := await reader.read(4096)):
            break
        heard += more


def _close(writer: asyncio.StreamWriter, *, abruptly: bool) -> None:
    """Hang up: as a client does that has enough, or as one that dies, with a reset."""
    if abruptly:
        at_once = struct.pack("ii", 1, 0)
        with suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    writer.close()
