"""Loads models as the gateway does, compares batches with single rows, and measures speed."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any, Final, Literal

import numpy as np

from gateway.api.exchange import template_args
from gateway.app.engines import MlxEngines
from gateway.app.limits import budget_bytes, generation_limits, sized_prefixes
from gateway.app.loading import Batcher, ModelLoader
from gateway.app.prefix_files import PrefixFiles
from gateway.app.self_tests import SelfTest, verdict_store
from gateway.bench.pictures import draw_png
from gateway.bench.requests import Texts
from gateway.doctor.report import Checked, Finding, Report
from gateway.engine.blas import BLAS
from gateway.engine.device import Device, device_facts, gflops
from gateway.engine.generation.self_test import bound_of
from gateway.errors import GatewayError, InsufficientMemory
from gateway.jobs import Caller, Vectors
from gateway.jobs.chat import GenerateJob, Sampling, Usage
from gateway.jobs.embed import EmbedJob
from gateway.jobs.images import ImageInput
from gateway.jobs.rerank import RerankJob
from gateway.jobs.steps import EngineFacts, KvCost, Verdict
from gateway.logs import human_bytes
from gateway.registry import ChatSpec, ModelSpec, Resolved
from gateway.serving.admission import Arrivals
from gateway.serving.budget import Budget
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.embedding.reranker import RerankBatcher
from gateway.serving.faults import DeviceHealth
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.widths import WIDTHS, StepTimes, choose_width
from gateway.serving.lane import Lane
from gateway.serving.models.pulls import Pulls
from gateway.serving.tokenize import ThreadPools
from gateway.settings import Settings

OnStage = Callable[[str, str], None]
Rate = Callable[[int], Awaitable[int]]  # runs N rows at once, and counts their units
MEASURED_S: Final = 1.0  # seconds to measure each speed, after an unmeasured batch
TOKENS: Final = 24  # tokens of each answer
IMAGE_SIDE: Final = 256  # pixels
TEXTS_AT_ONCE: Final = (1, 32)
ROWS_AT_ONCE: Final = (1, 8)
_TEXTS: Final = Texts(0, (15,))
_LENGTHS: Final = Texts(0, (5, 90, 30))  # words of the texts in the compared batch


@dataclass(frozen=True, slots=True)
class Workplace:
    """The objects that loading a model needs."""

    settings: Settings
    engines: MlxEngines
    lane: Lane
    budget: Budget
    loader: ModelLoader


async def check_models(specs: Sequence[ModelSpec], settings: Settings, on_stage: OnStage) -> Report:
    # `_test_batches` runs the whole self-test, so none runs after a load.
    settings = settings.model_copy(update={"self_test": False, "prefix_folder": None})
    engines = MlxEngines(settings)
    budget = Budget(budget_bytes(settings, engines.memory_bytes))
    with ThreadPools() as pool:
        async with Lane(engines.end, health=DeviceHealth(engines.classify, engines.name)) as lane:
            loader = ModelLoader(
                settings,
                engines,
                lane,
                pool,
                Arrivals(),
                budget,
                sized_prefixes(budget, engines.memory_bytes),
                Pulls(engines),
                PrefixFiles(settings, lane),
            )
            place = Workplace(settings, engines, lane, budget, loader)
            async with lane.turn("load") as run:
                await run(engines.begin)
                facts = await run(_read_facts, engines, budget)
            checked = [
                Checked(spec, await _check_model(spec, place, partial(on_stage, spec.id)))
                for spec in specs
            ]
    return Report(facts, [], checked)


def _read_facts(engines: MlxEngines, budget: Budget) -> Mapping[str, Any]:
    device = Device(engines.device)
    facts: dict[str, Any] = {
        "device": engines.device,
        **device_facts(device),
        "memory_bytes": engines.memory_bytes,
        "models_may_hold_bytes": budget.limit_bytes,
    }
    if device is Device.CPU:
        described = {"blas_described": BLAS.described, "gflops": round(gflops(), 1)}
        facts |= {"blas": asdict(BLAS), **described}
    return facts


async def _check_model(
    spec: ModelSpec, place: Workplace, on_stage: Callable[[str], None]
) -> list[Finding]:
    on_stage("load")
    started = time.perf_counter()
    findings = []
    try:
        prepared = await place.loader.prepare(spec)
        room = place.budget.limit_bytes
        if prepared.nbytes > room:
            needed = f"it takes {human_bytes(prepared.nbytes)}"
            reason = f"{needed}, and models may hold {human_bytes(room)}."
            raise InsufficientMemory(spec.id, reason)
        async with prepared.open() as loaded:
            seconds = time.perf_counter() - started
            dtype = _dtype(loaded.model)
            message = f"{human_bytes(loaded.nbytes)}, {dtype}, in {seconds:.1f} seconds."
            measured = {"seconds": seconds, "bytes": loaded.nbytes, "dtype": dtype}
            findings.append(Finding("load", "ok", message, measured))
            for name, stage in _stages(spec, loaded.model, place).items():
                on_stage(name)
                try:  # the other stages are run even if one fails
                    findings.append(await stage())
                except Exception as error:
                    findings.append(Finding(name, "fail", _describe(error)))
    except Exception as error:
        findings.append(Finding("load", "fail", _describe(error)))
    return findings


def _stages(
    spec: ModelSpec, batcher: Batcher, place: Workplace
) -> Mapping[str, Callable[[], Awaitable[Finding]]]:
    if isinstance(batcher, EmbeddingBatcher):
        return {
            "batch": partial(_compare_rows, batcher, place.lane),
            "speed": partial(_measure, "texts", partial(_embed, batcher, count()), TEXTS_AT_ONCE),
        }
    if isinstance(batcher, RerankBatcher):
        return {
            "batch": partial(_compare_rows, batcher, place.lane),
            "speed": partial(_measure, "pairs", partial(_rerank, batcher, count()), TEXTS_AT_ONCE),
        }
    assert isinstance(spec, ChatSpec)
    assert isinstance(batcher, GenerationBatcher)
    write = partial(_write, spec, batcher, count())
    return {
        "files": partial(_check_files, batcher.engine.facts),
        "formats": partial(_check_formats, batcher.engine.facts.unread_formats),
        "batch": partial(_test_batches, spec, batcher, place),
        "images": partial(_send_image, spec, batcher),
        "widths": partial(_tell_widths, batcher),
        "speed": partial(_measure, "tokens", write, ROWS_AT_ONCE),
    }


def _describe(error: Exception) -> str:
    # The gateway's own errors name the model and the cause.
    return str(error) if isinstance(error, GatewayError) else f"{type(error).__name__}: {error}"


def _dtype(batcher: Any) -> str:
    return str(batcher.engine.dtype).rpartition(".")[2]


async def _check_files(facts: EngineFacts) -> Finding:
    compared = {
        "transformers": "answers of its family equal those of transformers, for each config key",
        "mlx-lm": "answers of its family equal mlx-lm's; they were not compared with transformers",
        "no": "answers of its family were not compared with any library",
    }[facts.verified]
    status: Literal["ok", "warn"] = "warn" if facts.notes else "ok"
    guessing = [f"tokens are guessed by {' and '.join(facts.drafters)}"] if facts.drafters else []
    message = "; ".join([*facts.notes, compared, *guessing]) + "."
    measured = {"verified": facts.verified, "drafters": list(facts.drafters)}
    return Finding("files", status, message, measured)


async def _check_formats(unread: Sequence[str]) -> Finding:
    if not unread:
        message = "any tool calls and thinking in its chat template have known formats."
        return Finding("formats", "ok", message)
    settings = " and ".join(f"`{each}`" for each in unread)
    message = f"its template has calls or thinking of unknown form; set {settings} in models.yaml."
    return Finding("formats", "warn", message, {"unread": list(unread)})


async def _test_batches(spec: ChatSpec, batcher: GenerationBatcher, place: Workplace) -> Finding:
    mode = spec.batching.mode
    if mode != "auto":
        return Finding("batch", "skip", f"models.yaml sets `batching: {mode}`.")
    files = await place.engines.files(spec)
    test = SelfTest(
        spec,
        batcher.engine,
        place.lane,
        place.budget,
        verdict_store(place.settings),
        partial(place.engines.digest, spec, files),
        generation_limits(place.settings, spec),
        kv=batcher.engine.facts.kv_cost or KvCost(0),
        is_on=True,
    )
    batcher.verdict = await test.run_to_end()
    batcher.note_batching()
    return judge_verdict(batcher.verdict)


def judge_verdict(verdict: Verdict) -> Finding:
    measured = asdict(verdict)
    if not verdict.problem:
        return Finding("batch", "ok", "logits in a batch equal those of single rows.", measured)
    if not verdict.is_lasting:
        message = f"memory ran out, so the result is unknown: {verdict.problem}."
        return Finding("batch", "warn", message, measured)
    message = f"{verdict.problem}. The gateway runs its rows one at a time."
    return Finding("batch", "fail", message, measured)


async def _tell_widths(batcher: GenerationBatcher) -> Finding:
    return judge_widths(() if batcher.verdict is None else batcher.verdict.step_s)


def judge_widths(step_s: StepTimes) -> Finding:
    if not step_s:
        return Finding("widths", "skip", "no decode step was timed.")
    times = dict(zip(WIDTHS, step_s, strict=False))
    listed = ", ".join(f"{1000 * seconds:.3g} with {rows}" for rows, seconds in times.items())
    widths = {rows: choose_width(step_s, rows) for rows in range(1, max(times) + 1)}
    apart = [
        f"{rows} as {width.rows} ({width.gain:.2f} × the tokens)"
        for rows, width in widths.items()
        if width.alternates
    ]
    turns = f"rows take turns, {', '.join(apart)}" if apart else "all run together"
    message = f"ms of a decode step by rows: {listed}; {turns}."
    return Finding("widths", "ok", message, {"step_s": times})


async def _send_image(spec: ChatSpec, batcher: GenerationBatcher) -> Finding:
    """Have an image decoded, encoded and answered."""
    if batcher.engine.facts.images is None:
        return Finding("images", "skip", "it reads text." if spec.images else "`images: false`.")
    image = ImageInput(draw_png(0, IMAGE_SIDE, IMAGE_SIDE), "doctor's-image", "doctor", "image_url")
    started = time.perf_counter()
    _, usage = await _answer(spec, batcher, image.word, tokens=1, images=[image])
    tokens, seconds = usage.image_tokens, time.perf_counter() - started
    message = f"one of {tokens} tokens was decoded and read in {seconds:.2g} seconds."
    return Finding("images", "ok", message, {"tokens": tokens, "seconds": seconds})


async def _compare_rows(batcher: EmbeddingBatcher | RerankBatcher, lane: Lane) -> Finding:
    texts = _LENGTHS.part(0, 6)
    if isinstance(batcher, EmbeddingBatcher):
        embedder = batcher.engine
        rows: Sequence[Any] = [embedder.truncate(row) for row in embedder.encode(texts)]
        compute: Callable[[Sequence[Any]], Vectors] = embedder.embed
    else:
        rows = batcher.engine.encode_pairs("Hello", texts)
        compute = batcher.engine.score
    async with lane.turn("load") as turn:
        single = np.concatenate([await turn(compute, [row]) for row in rows])
        batched = await turn(compute, rows)
    engine: Any = batcher.engine
    return judge_distance(single, batched, bound_of(engine.dtype))


def judge_distance(single: Vectors, batched: Vectors, allowed: float) -> Finding:
    """Judge the largest difference between a row in a batch and the same row alone."""
    # The distance is relative to the rows' root mean square.
    scale = math.sqrt(np.mean(np.square(single, dtype=np.float64)))
    worst = math.sqrt(np.mean(np.square(single - batched, dtype=np.float64), axis=1).max())
    distance = worst / scale if scale else math.nan
    is_close = distance <= allowed  # False for NaN
    message = f"rows in a batch are {distance:.1g} away from single ones; {allowed:g} is allowed."
    measured = {"rows": len(single), "apart": distance, "allowed": allowed}
    return Finding("batch", "ok" if is_close else "fail", message, measured)


async def _measure(unit: str, work: Rate, sizes: Sequence[int]) -> Finding:
    """Measure the units per second by number of rows at once."""
    rates = {}
    for size in sizes:
        await work(size)  # not timed: the first pass of each shape allocates memory
        units, started, spent = 0, time.perf_counter(), 0.0
        while spent < MEASURED_S:
            units += await work(size)
            spent = time.perf_counter() - started
        rates[str(size)] = units / spent
    listed = ", ".join(f"{rate:.3g} with {size}" for size, rate in rates.items())
    return Finding("speed", "ok", f"{unit}/s by rows at once: {listed}.", {f"{unit}_per_s": rates})


def _caller() -> Caller:
    return Caller(request_id="doctor", deadline=math.inf, allowed_s=math.inf)


async def _embed(batcher: EmbeddingBatcher, numbers: "count[int]", size: int) -> int:
    texts = _TEXTS.part(next(numbers), size)
    await batcher.embed(EmbedJob(caller=_caller(), texts=texts, truncate=True))
    return size


async def _rerank(batcher: RerankBatcher, numbers: "count[int]", size: int) -> int:
    number = next(numbers)
    documents = _TEXTS.part(number, size)
    await batcher.rerank(RerankJob(caller=_caller(), query=_TEXTS[number], documents=documents))
    return size


async def _write(
    spec: ChatSpec, batcher: GenerationBatcher, numbers: "count[int]", size: int
) -> int:
    """Generate `size` answers at once, and return the number of all tokens."""
    answers = (_answer(spec, batcher, _TEXTS[next(numbers)], TOKENS) for _ in range(size))
    return sum([tokens for tokens, _ in await asyncio.gather(*answers)])


async def _answer(
    spec: ChatSpec,
    batcher: GenerationBatcher,
    text: str,
    tokens: int,
    images: Sequence[ImageInput] = (),
) -> tuple[int, Usage]:
    """Generate an answer of a number of tokens; return its number of tokens, and its usage."""
    # Thinking is off, so that each model does the same kind of work.
    spec = spec.model_copy(update={"thinking": False})
    job = GenerateJob(
        caller=_caller(),
        messages=[{"role": "user", "content": text}],
        sampling=Sampling(temperature=0, min_tokens=tokens),
        max_tokens=tokens,
        template_args=template_args(Resolved(spec), spec),
        images=images,
    )
    async with batcher.generate(job) as generation, aclosing(generation.deltas) as deltas:
        return sum([delta.tokens async for delta in deltas]), generation.usage
