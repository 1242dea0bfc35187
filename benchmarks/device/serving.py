"""Figures of the parts around the engines: servers over HTTP, embeddings, and the lane."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml

from benchmarks import servers
from benchmarks.device.results import Figure
from benchmarks.device.speed import Plan, draw_prompts, name_streams
from benchmarks.loading import load_embedding, load_generation
from benchmarks.steps import Steps
from benchmarks.targets.rig import rate, rest
from benchmarks.workloads import Wording, burst
from gateway.bench.figures import Answer
from gateway.bench.load import Load, Peer, run_closed_loop
from gateway.bench.requests import Kind, Texts
from gateway.engine.device import Device, leave
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Sampling
from gateway.jobs.steps import SequenceParams
from gateway.serving.lane import Lane

OURS, THEIRS, ENGINE = "gateway, HTTP", "mlx-lm's server", "gateway's engine"
MLX_LM_NAME: Final = "default_model"  # what its server calls the one it was started with
CLIENTS: Final = (1, 64)
PROMPT_WORDS: Final = 30
TURNS: Final = 2000
STEPS: Final = 50
_seeds = count(1)


def write_models(folder: Path, kind: str) -> Path:
    """Write a models.yaml of one model, beside its folder."""
    file = folder.parent / f"{folder.name}.yaml"
    entry = {"kind": kind, "source": f"path:{folder.name}", "preload": True}
    text = yaml.safe_dump({"version": 1, "models": {folder.name: entry}})
    file.write_text(text, encoding="utf-8")
    return file


def _wording(model: str, words: int, max_tokens: int) -> Wording:
    """Return prompts of this number of words, each a token, that were never asked before."""
    texts = Texts(next(_seeds), [words])
    return Wording(
        model=model, texts=texts, texts_per_request=1, prompts=texts, max_tokens=max_tokens
    )


async def measure_servers(folder: Path, shape: str, form: str, plan: Plan) -> list[Figure]:
    """Measure both servers as they come, in turn: tokens a second, and time to first token."""
    figures: list[Figure] = []
    async with AsyncExitStack() as stack:
        models = write_models(folder, "chat")
        urls = {
            OURS: await stack.enter_async_context(servers.gateway(models)),
            THEIRS: await stack.enter_async_context(servers.mlx_lm(folder)),
        }
        peers = {who: await stack.enter_async_context(Peer(url)) for who, url in urls.items()}
        names = {OURS: folder.name, THEIRS: MLX_LM_NAME}

        async def ask(streams: int, words: int, tokens: int, who: str) -> list[Answer]:
            workload = _wording(names[who], words, tokens).workload(Kind.CHAT)
            answers = await burst(peers[who], workload, streams)
            await rest()
            return answers

        for streams in plan.streams:
            answers = await _in_turn(plan.rounds, partial(ask, streams, PROMPT_WORDS, plan.tokens))
            for who, rounds in answers.items():
                value = median([rate(answered) for answered in rounds[1:]])
                note = _lost(rounds)
                at = name_streams(streams)
                figures.append(Figure("tokens", value, "tokens/s", who, shape, form, at, note))
        for length in plan.prompts:
            answers = await _in_turn(plan.rounds, partial(ask, 1, length, 2))
            for who, rounds in answers.items():
                figures.append(_first_token(who, shape, form, f"prompt of {length}", rounds))
    return figures


async def _in_turn(
    rounds: int, ask: Callable[[str], Awaitable[list[Answer]]]
) -> dict[str, list[list[Answer]]]:
    """Ask both in every round. The first makes the shapes, and does not count."""
    answers: dict[str, list[list[Answer]]] = {OURS: [], THEIRS: []}
    for _ in range(rounds + 1):
        for who, rounds_of in answers.items():
            rounds_of.append(await ask(who))
    return answers


def _first_token(
    who: str, shape: str, form: str, at: str, rounds: Sequence[Sequence[Answer]]
) -> Figure:
    right = [answer for answers in rounds[1:] for answer in answers if answer.error is None]
    seconds = median([answer.first for answer in right]) if right else float("nan")
    return Figure("time to first token", 1e3 * seconds, "ms", who, shape, form, at, _lost(rounds))


def _lost(rounds: Sequence[Sequence[Answer]]) -> str:
    """Say how many requests failed, and how the first of them did."""
    wrong = [answer.error for answers in rounds for answer in answers if answer.error is not None]
    total = sum(map(len, rounds))
    return f"{len(wrong)} of {total} requests failed: {wrong[0]}" if wrong else ""


def measure_embeddings(folder: Path, shape: str, device: Device, seconds: float) -> list[Figure]:
    """Measure vectors a second of texts of 15 words: in one pass, and over HTTP by clients."""
    engine = load_embedding(folder, name=folder.name, device=device)
    dtype = str(engine.dtype).removeprefix("mlx.core.")
    figures = []
    for rows in CLIENTS:
        texts, vectors, started = Texts(next(_seeds), [15]), 0, time.perf_counter()
        engine.embed(engine.encode([texts[number] for number in range(rows)]))
        started = time.perf_counter()
        while (spent := time.perf_counter() - started) < seconds:
            numbers = range(vectors, vectors + rows)
            vectors += len(engine.embed(engine.encode([texts[number] for number in numbers])))
        at = f"{rows} at once"
        value = vectors / spent
        figures.append(Figure("embeddings", value, "vectors/s", ENGINE, shape, dtype, at))
    engine.close()
    return figures + asyncio.run(_embed_over_http(folder, shape, dtype, seconds))


async def _embed_over_http(folder: Path, shape: str, dtype: str, seconds: float) -> list[Figure]:
    figures = []
    async with servers.gateway(write_models(folder, "embedding")) as url, Peer(url) as peer:
        for clients in CLIENTS:
            workload = _wording(folder.name, 15, 1).workload(Kind.EMBEDDINGS)
            load = Load(workload, clients)
            [measured] = await run_closed_loop(
                peer, [load], warmup_s=seconds / 4, duration_s=seconds
            )
            note = ", ".join(f"{n} {error}" for error, n in measured.errors.items())
            at, value = f"{clients} at once", measured.units_per_s
            figures.append(Figure("embeddings", value, "vectors/s", OURS, shape, dtype, at, note))
    return figures


async def measure_lane(folder: Path, shape: str, form: str, device: Device) -> list[Figure]:
    """Measure a turn of the lane: empty, with one call that does nothing, and with one step of a
    model's, of one model and of two in turn.
    """
    figures: list[Figure] = []

    def add(at: str, seconds: float, model: str = "no model", dtype: str = "none") -> None:
        figures.append(Figure("a turn of the lane", 1e6 * seconds, "µs", "lane", model, dtype, at))

    async with Lane(leave) as lane:
        add("empty", await _time(TURNS, lambda _: _empty_turn(lane)))
        add("one call", await _time(TURNS, lambda _: _call(lane, _do_nothing)))
        pair = [await _call(lane, _start, folder, device) for _ in range(2)]
        steps: list[list[float]] = [[], []]
        for _ in range(4):
            for models, rounds in zip((1, 2), steps, strict=True):
                decoding = pair[:models]

                def step(number: int, decoding: list[GenerationEngine] = decoding) -> Any:
                    return _call(lane, Steps(decoding[number % len(decoding)]).decode)

                rounds.append(await _time(STEPS, step))
        add("a step of one model", median(steps[0][1:]), shape, form)
        add("a step of two models in turn", median(steps[1][1:]), shape, form)
        for _ in range(2):
            await _call(lane, pair.pop().close)
    return figures


async def _time(times: int, act: Callable[[int], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    for number in range(times):
        await act(number)
    return (time.perf_counter() - started) / times


async def _empty_turn(lane: Lane) -> None:
    async with lane.turn("chat"):
        pass


async def _call(lane: Lane, function: Callable[..., Any], *args: Any) -> Any:
    async with lane.turn("chat") as turn:
        return await turn(function, *args)


def _do_nothing() -> None:
    pass


def _start(folder: Path, device: Device) -> GenerationEngine:
    """Load a model, and begin an answer that is longer than all steps."""
    engine = load_generation(folder, name=folder.name, device=device)
    job = SequenceParams(
        prompt=draw_prompts(1, 8, 0)[0],
        max_tokens=10 * STEPS,
        sampling=Sampling(temperature=0, ignore_eos=True),
        is_bare=True,
    )
    steps = Steps(engine)
    steps.join(1, job)
    steps.prefill(64)
    return engine
