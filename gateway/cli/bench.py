"""`mlx-gateway bench`: measures a server's speed with different numbers of clients."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from gateway.bench.pictures import draw_png
from gateway.bench.requests import Ask, Kind, Texts, Workload, chat, embeddings, rerank
from gateway.cli import lazy
from gateway.cli.gateways import first_key, require_running
from gateway.cli.terminal import fail, show
from gateway.settings import load_settings

if TYPE_CHECKING:
    from gateway.bench.figures import Figures, Spread
    from gateway.bench.load import Peer

    Measured = list[tuple[int, Figures]]

NO_CLIENT = "mlx-gateway bench needs aiohttp, of the extra `bench`: pip install aiohttp"
KEY = "GATEWAY_BENCH_API_KEY"
URL_HELP = "Address of the server, any OpenAI-compatible one."
KEY_HELP = "API key of the server. Without it: the gateway's own, or OPENAI_API_KEY."
EMBEDDER, WRITER = "text-embedding-3-small", "gpt-4o-mini"
MODELS = {Kind.EMBEDDINGS: EMBEDDER, Kind.RERANK: EMBEDDER, Kind.CHAT: WRITER}
UNITS = {Kind.EMBEDDINGS: "vectors", Kind.RERANK: "pairs", Kind.CHAT: "tokens"}
RERANKED_TEXTS = 32
IMAGE_SIZE = (640, 480)  # 300 tokens, if a token is a square of 32 pixels
COLUMNS = (
    "Clients", "Requests/s", "Units/s",
    "p50 ms", "p95 ms", "p99 ms", "First p50 ms", "First p95 ms", "Errors",
)  # fmt: skip


NUMBERS = "N,N,…"


def bench(
    kind: Kind = typer.Argument(help="The kind of requests."),
    url: str | None = typer.Option(None, help=URL_HELP, show_default="the gateway's"),
    model: str | None = typer.Option(None, help="The model to ask.", show_default="by kind"),
    api_key: str | None = typer.Option(None, envvar=KEY, help=KEY_HELP),
    concurrency: str = typer.Option("1,8,32", metavar=NUMBERS, help="Clients at once in each run."),
    duration: float = typer.Option(10, min=0.1, help="Seconds to measure each number of clients."),
    warmup: float = typer.Option(2, min=0, help="Seconds of load before each measurement."),
    texts: int | None = typer.Option(None, min=1, help="Texts per call.", show_default="by kind"),
    words: str = typer.Option("15", metavar=NUMBERS, help="Words per text, in turn."),
    prompt_words: str = typer.Option("30", metavar=NUMBERS, help="Words per prompt, in turn."),
    images: int = typer.Option(0, min=0, help="New images in a prompt, of 640 × 480 pixels."),
    max_tokens: int = typer.Option(64, min=1, help="Tokens in an answer."),
    timeout: float = typer.Option(600, min=0.1, help="Seconds after which a request has failed."),
    seed: int | None = typer.Option(None, min=0, help="Seed of texts.", show_default="a new one"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Measure a server: rates, times and errors with 1 to many clients.

    Ends with status 1 if any answer was wrong.
    """
    if find_spec("aiohttp") is None:
        fail(NO_CLIENT)
    clients = _numbers(concurrency, "--concurrency")
    # A server may have cached the texts of the last run.
    if seed is None:
        seed = time.time_ns() % 2**32
    documents = Texts(seed, _numbers(words, "--words"))
    prompts = Texts(seed, _numbers(prompt_words, "--prompt-words"))
    make = _maker(kind, model or MODELS[kind], documents, prompts, texts, max_tokens)
    if images and kind is not Kind.CHAT:
        raise typer.BadParameter("only chat requests have images", param_hint="--images")
    if images:
        make = _image_maker(model or WRITER, prompts, seed, images, max_tokens)
    if url is None:
        settings = load_settings()
        url, api_key = require_running(settings, option="--url"), api_key or first_key(settings)
    api_key = api_key or os.environ.get("OPENAI_API_KEY")
    peer = lazy.load.Peer(url, key=api_key, timeout_s=timeout)
    measured = asyncio.run(_measure(peer, Workload(make), clients, warmup, duration))
    if as_json:
        results = [_as_json(count, UNITS[kind], figures) for count, figures in measured]
        report = {"kind": kind, "url": url, "seed": seed, "duration_s": duration}
        print(json.dumps({**report, "results": results}, indent=2))
    else:
        show(COLUMNS, [_row(count, UNITS[kind], figures) for count, figures in measured])
        for problem in describe_problems(measured):
            print(problem)
    if any(figures.errors for _, figures in measured):
        raise SystemExit(1)


def _maker(
    kind: Kind, model: str, documents: Texts, prompts: Texts, length: int | None, max_tokens: int
) -> Callable[[int], Ask]:
    match kind:
        case Kind.EMBEDDINGS:
            return lambda number: embeddings(model, documents.part(number, length or 1))
        case Kind.RERANK:
            count = length or RERANKED_TEXTS
            return lambda number: rerank(model, prompts[number], documents.part(number, count))
        case Kind.CHAT:
            return lambda number: chat(model, prompts[number], max_tokens=max_tokens)


def _image_maker(
    model: str, prompts: Texts, seed: int, images: int, max_tokens: int
) -> Callable[[int], Ask]:
    def make(number: int) -> Ask:
        seeds = range((seed << 32) + number * images, (seed << 32) + (number + 1) * images)
        drawn = [draw_png(each, *IMAGE_SIZE) for each in seeds]
        return chat(model, prompts[number], max_tokens=max_tokens, images=drawn)

    return make


def _numbers(given: str, option: str) -> list[int]:
    parts = given.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        problem = f"{given} should be whole numbers from 1 on, like 1,8,32"
        raise typer.BadParameter(problem, param_hint=option)
    return [int(part) for part in parts]


async def _measure(
    peer: "Peer", workload: Workload, clients: list[int], warmup_s: float, duration_s: float
) -> "Measured":
    measured = []
    async with peer:
        # The first request may load the model.
        first = await peer.ask(workload.next())
        if first.error is not None:
            fail(f"The first request failed: {first.error}.")
        for count in clients:
            if sys.stderr.isatty():
                print(f"Measuring {count} clients for {duration_s:g} s…", file=sys.stderr)
            [figures] = await lazy.load.run_closed_loop(
                peer, [lazy.load.Load(workload, count)], warmup_s=warmup_s, duration_s=duration_s
            )
            measured.append((count, figures))
    return measured


def _row(clients: int, unit: str, figures: "Figures") -> tuple[str, ...]:
    return (
        str(clients),
        f"{figures.requests_per_s:.1f}",
        f"{figures.units_per_s:.1f} {unit}",
        *_milliseconds(figures.latency, "p50", "p95", "p99"),
        *_milliseconds(figures.first, "p50", "p95"),
        str(sum(figures.errors.values())),
    )


def _milliseconds(spread: "Spread | None", *names: str) -> list[str]:
    if spread is None:
        return ["–"] * len(names)
    return [f"{spread.in_ms()[name]:.1f}" for name in names]


def describe_problems(measured: "Measured") -> Iterator[str]:
    for clients, figures in measured:
        for name, number in sorted(figures.errors.items()):
            yield f"{clients} clients: {number} × {name}"
        if not figures.requests and not figures.errors:
            yield f"{clients} clients: no request ended in time; raise --duration"


def _as_json(clients: int, unit: str, figures: "Figures") -> dict[str, Any]:
    return {
        "clients": clients,
        "requests": figures.requests,
        "requests_per_s": figures.requests_per_s,
        f"{unit}_per_s": figures.units_per_s,
        "latency_ms": figures.latency and figures.latency.in_ms(),
        "first_token_ms": figures.first and figures.first.in_ms(),
        "errors": dict(figures.errors),
    }
