"""The parts, numbered: parity first, then figures. Each part runs in a process of its own."""

import asyncio
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.checkpoints import write_bge_base, write_reranker
from benchmarks.device.cells import NAME, measure_cells
from benchmarks.device.parity import Comparison, compare_chat, compare_embeddings, compare_scores
from benchmarks.device.results import Result
from benchmarks.device.shapes import FORMATS, NARROW, SHAPES, Shape, folder_of
from benchmarks.device.speed import Plan, measure_host, measure_speed, name_dtype
from gateway.engine.device import Device, choose_device, configure, prepare_malloc

GIB: Final = 1 << 30
# Tokens added to a prompt: a window of the full shape then loses the first token, and more.
BEYOND_WINDOW: Final = 600
SMALL_BERT: Final = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
COMPARED: Final = (
    ("float32", "qwen3-0.6b"),
    ("float32", "hybrid"),
    ("float32", "sliding"),
    ("float32", "moe"),
    ("float16", "qwen3-0.6b"),
    ("float16", "hybrid"),
    ("bfloat16", "qwen3-0.6b"),
    ("bfloat16", "hybrid"),
    ("bfloat16", "sliding"),
    ("4bit", "qwen3-0.6b"),
    ("4bit", "qwen3-8b"),
    ("4bit", "moe"),
)
# Each has the GiB that its weights take.
MEASURED: Final = (
    ("qwen3-0.6b", "bfloat16", 1.5),
    ("qwen3-0.6b", "4bit", 0.5),
    ("qwen3-4b", "bfloat16", 8),
    ("qwen3-4b", "4bit", 2.5),
    ("qwen3-8b", "bfloat16", 16),
    ("qwen3-8b", "4bit", 5),
    ("hybrid", "4bit", 3),
    ("sliding", "bfloat16", 2),
    ("moe", "4bit", 5),
)
MEASURED_SMALL: Final = (
    ("qwen3-0.6b", "bfloat16", 0),
    ("qwen3-0.6b", "4bit", 0),
    ("hybrid", "4bit", 0),
    ("sliding", "bfloat16", 0),
    ("moe", "4bit", 0),
)
SERVED: Final = (
    ("qwen3-0.6b", "bfloat16"),
    ("qwen3-0.6b", "4bit"),
    ("qwen3-4b", "4bit"),
    ("qwen3-8b", "4bit"),
    ("moe", "4bit"),
)
SERVED_SMALL: Final = SERVED[:2]


@dataclass(frozen=True, slots=True)
class Bench:
    """The place where a part runs: the folder of the models, and whether they are small."""

    models: Path
    is_small: bool

    @property
    def device(self) -> Device:
        return choose_device("auto")

    @property
    def plan(self) -> Plan:
        return Plan.of(is_small=self.is_small)

    def folder(self, shape: Shape, form: str, *, is_small: bool | None = None) -> Path:
        small = self.is_small if is_small is None else is_small
        return folder_of(shape, form, self.models, is_small=small)


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its name, a guess of its seconds, and the bytes of memory that it needs."""

    name: str
    seconds: int
    run: Callable[[Bench], Result]
    needs_bytes: int = 0
    needs_http: bool = False

    def obstacle(self, memory: int) -> str:
        """Say why this part cannot run here, if so."""
        if self.needs_http and importlib.util.find_spec("aiohttp") is None:
            return "aiohttp is not installed"
        if self.needs_bytes > memory:
            needed, offered = self.needs_bytes / GIB, memory / GIB
            return f"it needs {needed:.0f} GiB, and this device has {offered:.0f}"
        return ""


def parts(*, is_small: bool) -> list[Part]:
    """List all parts of a run, in their order."""
    measured = MEASURED_SMALL if is_small else MEASURED
    served = SERVED_SMALL if is_small else SERVED
    sizes = {(shape, form): size for shape, form, size in measured}
    return [
        *(_compare_part(form, name, is_small=is_small) for form, name in COMPARED),
        Part("parity embeddings", 15, _compare_embeddings),
        Part("parity rerank", 30, _compare_scores),
        *(
            # both parties' weights if they differ, and KV
            Part(f"speed {shape} {form}", _guess(size), _measure(shape, form), _need(size, 1.5))
            for shape, form, size in measured
        ),
        *(
            Part(
                f"http {shape} {form}",
                _guess(sizes[shape, form]),
                _serve(shape, form),
                _need(sizes[shape, form], 3),
                needs_http=True,
            )
            for shape, form in served
        ),
        Part("host", 60, _measure_host),
        Part("embeddings", 30, _measure_embeddings, needs_http=True),
        Part("lane", 20, _measure_lane, needs_http=True),
        Part(NAME, 180, _measure_cells, 0 if is_small else _need(3, 2)),
    ]


def prepare(device: Device) -> None:
    """Set this process up as the gateway's own is."""
    if device is Device.CPU:
        prepare_malloc()
    configure(device)


def _guess(gib: float) -> int:
    return round(40 + 40 * gib)


def _need(gib: float, times: float) -> int:
    return round(gib * times * GIB)


def _compare_part(form: str, name: str, *, is_small: bool) -> Part:
    """Return a part that compares a shape; in float32 on the CPU, and so a small one."""
    on_cpu = form == "float32"
    small = is_small or on_cpu

    def run(bench: Bench) -> Result:
        device = Device.CPU if on_cpu else bench.device
        prepare(device)
        dtype = str(FORMATS[form]).removeprefix("mlx.core.")
        folder = bench.folder(SHAPES[name], form, is_small=small)
        more = BEYOND_WINDOW if name == "sliding" and not small else 0
        with tempfile.TemporaryDirectory() as scratch:
            comparisons = compare_chat(folder, Path(scratch), device, dtype, more)
        return Result("done", subject=_subject(name, form, device, small), comparisons=comparisons)

    return Part(f"parity {name} {form}", 20 if small else 60, run)


def _subject(name: str, form: str, device: Device, is_small: bool) -> str:
    size = ", small" if is_small else ""
    return f"{name}{size}, {form}, {device.value}"


def _compare_texts(
    folder: Path, bench: Bench, compare: Callable[[Path, Device, str], list[Comparison]]
) -> Result:
    """Compare in each dtype, in float32 on the CPU."""
    comparisons: list[Comparison] = []
    for dtype in ("float32", "float16", "bfloat16"):
        device = Device.CPU if dtype == "float32" else bench.device
        prepare(device)
        for comparison in compare(folder, device, dtype):
            mode = f"{comparison.mode}, {dtype}, {device.value}"
            comparisons.append(replace(comparison, mode=mode))
    return Result("done", subject=folder.name, comparisons=comparisons)


def _compare_embeddings(bench: Bench) -> Result:
    return _compare_texts(_embedder(bench), bench, compare_embeddings)


def _compare_scores(bench: Bench) -> Result:
    folder = bench.models / "reranker"
    if not (folder / "model.safetensors").exists():
        write_reranker(folder)
    return _compare_texts(folder, bench, compare_scores)


def _embedder(bench: Bench) -> Path:
    """Return a BERT of the shape of bge-base-en-v1.5, or of 3 layers by 128."""
    folder = bench.models / ("bert-small" if bench.is_small else "bge-base")
    if not (folder / "modules.json").exists():
        write_bge_base(folder, **(SMALL_BERT if bench.is_small else {}))
    return folder


def _named(name: str, bench: Bench) -> str:
    return f"{name}, small" if bench.is_small else name


def _measure(name: str, form: str) -> Callable[[Bench], Result]:
    def run(bench: Bench) -> Result:
        prepare(bench.device)
        folder = bench.folder(SHAPES[name], form)
        figures = measure_speed(folder, _named(name, bench), form, bench.device, bench.plan)
        return Result("done", figures=figures)

    return run


def _serve(name: str, form: str) -> Callable[[Bench], Result]:
    def run(bench: Bench) -> Result:
        from benchmarks.device.serving import measure_servers  # it needs aiohttp

        prepare(bench.device)
        folder = bench.folder(SHAPES[name], form)
        dtype = name_dtype(form, bench.device)
        measuring = measure_servers(folder, _named(name, bench), dtype, bench.plan)
        return Result("done", figures=asyncio.run(measuring))

    return run


def _narrow(bench: Bench) -> tuple[Path, str, str]:
    """Return the folder of the narrow model, its name and its format: the device's fast one."""
    form = "float32" if bench.device is Device.CPU else "bfloat16"
    return bench.folder(NARROW, form, is_small=True), NARROW.name, form


def _measure_host(bench: Bench) -> Result:
    prepare(bench.device)
    folder, name, form = _narrow(bench)
    return Result("done", figures=measure_host(folder, name, form, bench.device, bench.plan))


def _measure_embeddings(bench: Bench) -> Result:
    from benchmarks.device.serving import measure_embeddings

    prepare(bench.device)
    folder = _embedder(bench)
    seconds = 2 if bench.is_small else 10
    return Result("done", figures=measure_embeddings(folder, folder.name, bench.device, seconds))


def _measure_lane(bench: Bench) -> Result:
    from benchmarks.device.serving import measure_lane

    prepare(bench.device)
    folder, name, form = _narrow(bench)
    return Result("done", figures=asyncio.run(measure_lane(folder, name, form, bench.device)))


def _measure_cells(bench: Bench) -> Result:
    prepare(bench.device)
    figures = measure_cells(bench.models, bench.device, is_small=bench.is_small)
    return Result("done", figures=figures)


def pick(listed: Sequence[Part], numbers: Sequence[int]) -> list[Part]:
    """Return the parts of these numbers, from 1; all if there are none."""
    return [listed[number - 1] for number in numbers] if numbers else list(listed)
