"""N clients, each asking again as soon as it is answered. The only part that speaks HTTP."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from gateway.bench.events import EventReader, Transcript, named
from gateway.bench.figures import Answer, Figures, Window, measure
from gateway.bench.judging import WrongAnswer, judged
from gateway.bench.workloads import Ask, Workload

now = time.perf_counter
PAUSE_S = 0.1  # after an error: a client that is refused at once must not spin
Told = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients of one workload."""

    workload: Workload
    clients: int


class Peer:
    """The server under load. A context manager: connections are kept from one ask to the next."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 600) -> None:
        url = url.rstrip("/")
        self.url = url if url.endswith("/v1") else f"{url}/v1"
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> "Peer":
        self._session = self._new_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def reconnect(self) -> None:
        """Close every connection, and open new ones when they are needed."""
        await self._session.close()
        self._session = self._new_session()

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=self._timeout,
        )

    async def ask(self, ask: Ask) -> Answer:
        """Ask once and judge the answer; whatever goes wrong is the answer's `error`."""
        arrivals: list[float] = []
        started = now()
        try:
            async with self._session.post(self.url + ask.path, data=ask.body) as response:
                if response.status != 200:
                    raise WrongAnswer(_refusal(response.status, await response.read()))
                answer = await _read(response, arrivals, is_streamed=ask.is_streamed)
            ended = now()
            units = judged(ask.judge, answer)
        except WrongAnswer as wrong:
            return Answer(started, now(), arrivals, error=str(wrong))
        except (aiohttp.ClientError, OSError) as error:
            return Answer(started, now(), arrivals, error=named_connection_error(error))
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            started,
            ended,
            arrivals,
            units,
            prompt=usage.get("prompt_tokens") or 0,
            cached=details.get("cached_tokens") or 0,
        )


async def _read(
    response: aiohttp.ClientResponse, arrivals: list[float], *, is_streamed: bool
) -> dict[str, Any]:
    if is_streamed:
        reader, transcript = EventReader(), Transcript()
        async for received in response.content.iter_any():
            moment = now()
            arrivals += [moment for event in reader.feed(received) if transcript.add(event)]
        return transcript.answer()
    body = await response.read()
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise WrongAnswer("answer is not JSON") from None
    if not isinstance(answer, dict):
        raise WrongAnswer("answer has another shape")
    return answer


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status} {named(orjson.loads(body)['error'])}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return str(status)


def named_connection_error(error: Exception) -> str:
    """Name what happened to a connection. The order matters: some are kinds of others."""
    names: tuple[tuple[type[Exception], str], ...] = (
        (TimeoutError, "timed out"),
        (aiohttp.ClientConnectorError, "cannot connect"),
        (aiohttp.ServerDisconnectedError, "disconnected"),
        (aiohttp.ClientPayloadError, "answer cut short"),
        (ConnectionResetError, "disconnected"),
        (aiohttp.ClientOSError, "disconnected"),
    )
    return next((name for kind, name in names if isinstance(error, kind)), type(error).__name__)


async def closed_loop(
    peer: Peer,
    loads: Sequence[Load],
    *,
    warmup_s: float,
    duration_s: float,
    told: Told = lambda _: None,
) -> list[Figures]:
    """Run several loads at once; the figures of each, after the warm-up.

    At the end nobody asks again, and what is under way is awaited and judged; what of it comes
    after the end is not counted.
    """
    start = now() + warmup_s
    window = Window(start, start + duration_s)

    async def client(workload: Workload) -> list[Answer]:
        answers = []
        while now() < window.end:
            answer = await peer.ask(workload.next())
            answers.append(answer)
            told(answer)
            if answer.error is not None:
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


async def burst(peer: Peer, workload: Workload, count: int) -> list[Answer]:
    """Ask `count` times at once, and give the answers when all are there."""
    return await asyncio.gather(*(peer.ask(workload.next()) for _ in range(count)))


REFRESH_S = 0.5  # drawing costs time on the cores that are being measured


@asynccontextmanager
async def progress(total_s: float) -> AsyncIterator[Told]:
    """Show time going by, and how many answers came; give what is to be told of each."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    answers = errors = 0

    def told(answer: Answer) -> None:
        nonlocal answers, errors
        answers += 1
        errors += answer.error is not None

    columns = BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as shown:
        task, started = shown.add_task("", total=total_s), time.monotonic()

        async def draw() -> None:
            while True:
                done_s = min(total_s, time.monotonic() - started)
                said = f"{answers} answers, {errors} errors"
                shown.update(task, completed=done_s, description=said, refresh=True)
                await asyncio.sleep(REFRESH_S)

        drawing = asyncio.create_task(draw())
        try:
            yield told
        finally:
            drawing.cancel()
