"""N clients, each asking again as soon as it is answered, and rounds of them.

The only module here that speaks HTTP.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from gateway.bench.events import EventReader, Transcript, name_error
from gateway.bench.figures import Answer, Figures, Window, measure
from gateway.bench.judging import WrongAnswer, judge_answer
from gateway.bench.kinds import Kind
from gateway.bench.workloads import Ask, Workload

if TYPE_CHECKING:  # it imports mlx
    from gateway.bench.engine import Best, Reference

now = time.perf_counter
PAUSE_S = 0.1  # after an error, so that a client refused at once does not spin
OnAnswer = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Load:
    """A number of clients that share one workload."""

    workload: Workload
    clients: int


class Peer:
    """The server under load. A context manager, which keeps connections between requests."""

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
        """Close every connection; new ones are opened when needed."""
        await self._session.close()
        self._session = self._new_session()

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=self._timeout,
        )

    async def ask(self, ask: Ask) -> Answer:
        """Send one request and judge its answer; anything wrong becomes the answer's `error`."""
        arrivals: list[float] = []
        started = now()
        try:
            async with self._session.post(self.url + ask.path, data=ask.body) as response:
                if response.status != 200:
                    raise WrongAnswer(_refusal(response.status, await response.read()))
                answer = await _read(response, arrivals, is_streamed=ask.is_streamed)
            ended = now()
            units = judge_answer(ask.judge, answer)
        except WrongAnswer as wrong:
            return Answer(started, now(), arrivals, error=str(wrong))
        except (aiohttp.ClientError, OSError) as error:
            return Answer(started, now(), arrivals, error=name_connection_error(error))
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
        return f"{status} {name_error(orjson.loads(body)['error'])}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return str(status)


def name_connection_error(error: Exception) -> str:
    """Return the name of a connection error. Subclasses come before their bases."""
    names: tuple[tuple[type[Exception], str], ...] = (
        (TimeoutError, "timed out"),
        (aiohttp.ClientConnectorError, "cannot connect"),
        (aiohttp.ServerDisconnectedError, "disconnected"),
        (aiohttp.ClientPayloadError, "answer cut short"),
        (ConnectionResetError, "disconnected"),
        (aiohttp.ClientOSError, "disconnected"),
    )
    return next((name for kind, name in names if isinstance(error, kind)), type(error).__name__)


async def run_closed_loop(
    peer: Peer,
    loads: Sequence[Load],
    *,
    warmup_s: float,
    duration_s: float,
    on_answer: OnAnswer = lambda _: None,
) -> list[Figures]:
    """Run several loads at once and return the figures of each, after the warm-up.

    At the end no client asks again. Answers under way are awaited and judged, but their share
    after the end is not counted.
    """
    start = now() + warmup_s
    window = Window(start, start + duration_s)

    async def client(workload: Workload) -> list[Answer]:
        answers = []
        while now() < window.end:
            answer = await peer.ask(workload.next())
            answers.append(answer)
            on_answer(answer)
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
    """Send `count` requests at once and return their answers."""
    return await asyncio.gather(*(peer.ask(workload.next()) for _ in range(count)))


@dataclass(frozen=True, slots=True)
class Line:
    """The figures of one kind at one number of clients; `engine` is its units/s by itself."""

    kind: Kind
    unit: str
    clients: int
    figures: Figures
    engine: float | None = None
    best: "Best | None" = None


class FirstAskFailed(Exception):
    """The server cannot do this work at all; the text has what it answered."""


async def measure_rounds(
    peer: Peer,
    workloads: Mapping[Kind, Workload],
    concurrency: Sequence[int],
    *,
    warmup_s: float,
    duration_s: float,
    reference: "Reference | None" = None,
    on_answer: OnAnswer = lambda _: None,
) -> AsyncIterator[Line]:
    """Measure each number of clients, one after another; mixed work has that many of each kind.

    One request of each kind comes first, so that loading a model is not measured. Connections are
    new after the engine was measured: while it runs, a server may close idle ones unseen. Raises
    FirstAskFailed.
    """
    for kind, workload in workloads.items():
        answer = await peer.ask(workload.next())
        if answer.error is not None:
            raise FirstAskFailed(f"The first request ({kind}) failed: {answer.error}.")
    best = None
    if reference is not None:
        best = reference.best(duration_s)
        await peer.reconnect()
    for clients in concurrency:
        loads = [Load(workload, clients) for workload in workloads.values()]
        measured = await run_closed_loop(
            peer, loads, warmup_s=warmup_s, duration_s=duration_s, on_answer=on_answer
        )
        rate = None
        if reference is not None:
            rate = reference.rate(clients, duration_s)
            await peer.reconnect()
        for (kind, workload), figures in zip(workloads.items(), measured, strict=True):
            yield Line(kind, workload.unit, clients, figures, rate, best)


REFRESH_S = 0.5  # drawing costs time on the cores that are being measured


@asynccontextmanager
async def show_progress(total_s: float) -> AsyncIterator[OnAnswer]:
    """Show the time and the number of answers; yield what is to be called with each answer."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    answers = errors = 0

    def count(answer: Answer) -> None:
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
                status = f"{answers} answers, {errors} errors"
                shown.update(task, completed=done_s, description=status, refresh=True)
                await asyncio.sleep(REFRESH_S)

        drawing = asyncio.create_task(draw())
        try:
            yield count
        finally:
            drawing.cancel()
