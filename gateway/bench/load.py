"""Runs clients over HTTP, each of which sends its next request after an answer."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from gateway.bench.figures import Answer, Figures, Window, measure
from gateway.bench.requests import (
    Ask,
    EventReader,
    Transcript,
    Workload,
    WrongAnswer,
    name_error,
)

now = time.perf_counter
PAUSE_S = 0.1  # seconds to wait after an error, so that clients do not spin
# Subclasses come before their bases, since the first match names an error.
_NAMES: Sequence[tuple[type[Exception], str]] = (
    (TimeoutError, "timed out"),
    (aiohttp.ClientConnectorError, "cannot connect"),
    (aiohttp.ServerDisconnectedError, "disconnected"),
    (aiohttp.ClientPayloadError, "answer cut short"),
    (ConnectionResetError, "disconnected"),
    (aiohttp.ClientOSError, "disconnected"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """A number of clients that share one workload."""

    workload: Workload
    clients: int


class Peer:
    """The server under load. As a context manager, it reuses connections."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 600) -> None:
        url = url.rstrip("/")
        self.url = url if url.endswith("/v1") else f"{url}/v1"
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> "Peer":
        self._session = aiohttp.ClientSession(
            # Connections are not limited, so that only the server makes clients wait.
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=self._timeout,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, ask: Ask) -> Answer:
        """Send one request, and count its answer's units. Failures become the answer's `error`."""
        arrivals: list[float] = []
        started = now()
        try:
            async with self._session.post(self.url + ask.path, data=ask.body) as response:
                if response.status != 200:
                    raise WrongAnswer(_refusal(response.status, await response.read()))
                answer = await _read(response, arrivals, is_streamed=ask.is_streamed)
            ended = now()
            units = _count_units(ask, answer)
        except WrongAnswer as error:
            return Answer(started, now(), arrivals, error=str(error))
        except (aiohttp.ClientError, OSError) as error:
            return Answer(started, now(), arrivals, error=name_connection_error(error))
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        prompt, cached = usage.get("prompt_tokens") or 0, details.get("cached_tokens") or 0
        return Answer(started, ended, arrivals, units, prompt=prompt, cached=cached)


async def _read(
    response: aiohttp.ClientResponse, arrivals: list[float], *, is_streamed: bool
) -> dict[str, Any]:
    if is_streamed:
        reader, transcript = EventReader(), Transcript()
        async for received in response.content.iter_any():
            moment = now()
            arrivals += [moment for event in reader.feed(received) if transcript.add(event)]
        return transcript.answer()
    try:
        answer = orjson.loads(await response.read())
    except orjson.JSONDecodeError:
        raise WrongAnswer("answer is not JSON") from None
    if not isinstance(answer, dict):
        raise WrongAnswer("answer is not an object")
    return answer


def _count_units(ask: Ask, answer: Any) -> int:
    try:
        return ask.count(answer)
    except (AttributeError, KeyError, IndexError, TypeError):
        raise WrongAnswer("answer has missing or wrong fields") from None


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status} {name_error(orjson.loads(body)['error'])}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return str(status)


def name_connection_error(error: Exception) -> str:
    return next((name for kind, name in _NAMES if isinstance(error, kind)), type(error).__name__)


async def run_closed_loop(
    peer: Peer, loads: Sequence[Load], *, warmup_s: float, duration_s: float
) -> list[Figures]:
    """Run several loads at once, and return the figures of each, after a warm-up."""
    start = now() + warmup_s
    window = Window(start, start + duration_s)

    async def client(workload: Workload) -> list[Answer]:
        answers = []
        # Answers under way at the window's end count in part, so wait for them.
        while now() < window.end:
            answers.append(await peer.ask(workload.next()))
            if answers[-1].error is not None:
                await asyncio.sleep(PAUSE_S)
        return answers

    async with asyncio.TaskGroup() as group:
        tasks = [
            [group.create_task(client(load.workload)) for _ in range(load.clients)]
            for load in loads
        ]
    return [
        measure([answer for task in of_load for answer in task.result()], window)
        for of_load in tasks
    ]
