"""`mlx-gateway bench`: a server's rates by number of clients, and its overhead."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.bench.kinds import EMBEDDER, PARTS, USUAL, Kind
from gateway.cli._table import show
from gateway.errors import GatewayError
from gateway.registry import load_catalog
from gateway.settings import load_settings, variables

if TYPE_CHECKING:
    from gateway.bench.engine import Reference
    from gateway.bench.load import Line, Peer
    from gateway.bench.workloads import Wording, Workload

NO_CLIENT = "mlx-gateway bench needs aiohttp, of the extra `bench`: pip install aiohttp"
KEYS = ["GATEWAY_BENCH_API_KEY", "OPENAI_API_KEY"]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Whole numbers from 1 on, written with commas."""

    each: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.each))


def _numbers(given: object) -> Numbers:
    parts = str(given).split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{given} should be whole numbers from 1 on, like 1,8,32")
    return Numbers(tuple(map(int, parts)))


def bench(
    kind: Annotated[Kind, typer.Argument(help="The kind of requests.")],
    url: Annotated[
        str, typer.Option(help="Address of the server, any OpenAI-compatible one.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to ask; of mixed work, the chat model.", show_default="by kind"
        ),
    ] = None,
    embedder: Annotated[str, typer.Option(help="The embedding model of mixed work.")] = EMBEDDER,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEYS, help="API key, if the server needs one.")
    ] = None,
    concurrency: Annotated[
        Numbers,
        typer.Option(
            parser=_numbers,
            metavar="N,N,…",
            help="Clients at once, one number after another; of mixed work, of each kind.",
        ),
    ] = Numbers((1, 8, 32)),
    duration: Annotated[
        float, typer.Option(min=0.1, help="Seconds to measure each number of clients.")
    ] = 10,
    warmup: Annotated[
        float, typer.Option(min=0, help="Seconds of load before each measurement.")
    ] = 2,
    texts: Annotated[
        int | None,
        typer.Option(
            min=1, help="Texts in a request of embeddings or rerank.", show_default="by kind"
        ),
    ] = None,
    words: Annotated[
        Numbers,
        typer.Option(
            parser=_numbers, metavar="N,N,…", help="Words in a text; several numbers are mixed."
        ),
    ] = Numbers((15,)),
    prompt_words: Annotated[
        Numbers,
        typer.Option(
            parser=_numbers, metavar="N,N,…", help="Words in a prompt; several numbers are mixed."
        ),
    ] = Numbers((30,)),
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in an answer.", show_default="by kind")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a request has failed.")
    ] = 600,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the random texts.", show_default="new each time"),
    ] = None,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="Also measure the engine alone, in this process, and compare."
        ),
    ] = False,
    models: Annotated[Path | None, typer.Option(help="The models file, for --engine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure a server: rates, times and errors with 1 to many clients; every answer is checked.

    Ends with status 1 if any answer was wrong.
    """
    if engine and kind is Kind.MIXED:
        raise typer.BadParameter("it measures one kind of work, not mixed", param_hint="--engine")
    if find_spec("aiohttp") is None:
        print(NO_CLIENT, file=sys.stderr)
        raise SystemExit(1)
    from gateway.bench import report
    from gateway.bench.load import FirstAskFailed, Peer
    from gateway.bench.workloads import Texts, Wording

    # Other texts at each run: a server may remember the last one's.
    seed = time.time_ns() % 2**32 if seed is None else seed
    models_asked = {part: model or USUAL[part].model for part in PARTS[kind]}
    if kind is Kind.MIXED:
        models_asked[Kind.EMBEDDINGS] = embedder
    wordings = {
        part: Wording(
            model=name,
            texts=Texts(seed, words.each),
            texts_per_request=texts or USUAL[part].texts,
            prompts=Texts(seed, prompt_words.each),
            max_tokens=max_tokens or USUAL[part].max_tokens or 1,
        )
        for part, name in models_asked.items()
    }
    workloads = {part: wording.workload(part) for part, wording in wordings.items()}
    try:
        lines = asyncio.run(
            _measure(
                Peer(url, key=api_key, timeout_s=timeout),
                workloads,
                concurrency.each,
                warmup_s=warmup,
                duration_s=duration,
                engine=_engine(wordings[kind], workloads[kind], models) if engine else None,
            )
        )
    except (FirstAskFailed, GatewayError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    if as_json:
        asked = {"kind": kind, "url": url, "seed": seed, "duration_s": duration}
        print(json.dumps(report.as_json(lines, asked), indent=2))
    else:
        show(report.columns(with_engine=engine), report.rows(lines, with_engine=engine))
        for note in report.notes(lines):
            print(note)
    if any(line.figures.errors for line in lines):
        raise SystemExit(1)


def _engine(
    wording: "Wording", workload: "Workload", models: Path | None
) -> "AbstractAsyncContextManager[Reference]":
    from gateway.bench.engine import open_reference

    settings = load_settings({"models": models})
    return open_reference(settings, load_catalog(settings.models, variables()), wording, workload)


async def _measure(
    peer: "Peer",
    workloads: "dict[Kind, Workload]",
    concurrency: Sequence[int],
    *,
    warmup_s: float,
    duration_s: float,
    engine: "AbstractAsyncContextManager[Reference] | None",
) -> "list[Line]":
    from gateway.bench.load import measure_rounds, show_progress

    total_s = (warmup_s + duration_s) * len(concurrency)
    if engine is not None:
        total_s += duration_s * (len(concurrency) + 1)
    async with engine or nullcontext() as reference, peer, show_progress(total_s) as bar:
        return [
            line
            async for line in measure_rounds(
                peer,
                workloads,
                concurrency,
                warmup_s=warmup_s,
                duration_s=duration_s,
                reference=reference,
                on_answer=bar,
            )
        ]
