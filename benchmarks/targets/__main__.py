"""python -m benchmarks.targets: measure, print one markdown table; 1 if a target is missed."""

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from benchmarks.servers import DidNotStart
from benchmarks.targets import (
    beside,
    chatting,
    embedding,
    host,
    onboard,
    prefix,
    recording,
    reranking,
    small,
    speculation,
    starting,
    structured,
    vision,
)
from benchmarks.targets.rig import Rig
from benchmarks.targets.verdicts import Verdict, markdown, not_measured
from gateway.errors import GatewayError

Measurement: TypeAlias = Callable[[Rig], Awaitable[list[Verdict]]]
MEASUREMENTS: dict[str, Measurement] = {
    "embeddings": embedding.many,
    "single": embedding.alone,
    "near-free": small.small,
    "burst": embedding.together,
    "start": starting.start,
    "chat": chatting.chat,
    "chat-sampled": chatting.sampled,
    "chat-as-it-comes": chatting.as_it_comes,
    "host": host.host,
    "smollm2": onboard.onboard,
    "long-request": embedding.long,
    "rerank": reranking.reranking,
    "rerank-labels": reranking.labels,
    "structured": structured.together,
    "structured-stream": structured.stream,
    "speculation": speculation.speculation,
    "speculation-kinds": speculation.kinds,
    "beside": beside.beside,
    "prefill": prefix.cold,
    "prefix": prefix.prefix,
    "recording": recording.recording,
    "connections": small.steady,
    "vision": vision.vision,
}
ROUNDS = 5
QUICK = 0.2  # factor of every duration


def main() -> None:
    """Build the models, measure the chosen targets, and print the verdicts."""
    options = _options()
    print(machine(), file=sys.stderr)
    with TemporaryDirectory(prefix="mlx-gateway-bench-") as folder:
        rounds = options.rounds or (1 if options.quick else ROUNDS)
        scale = QUICK if options.quick else 1
        peers = {"llama_cpp": options.llama_cpp, "mlx_vlm": options.mlx_vlm}
        rig = Rig.built(Path(folder), rounds=rounds, scale=scale, **peers)
        names = options.only or MEASUREMENTS
        verdicts = asyncio.run(measured(rig, {name: MEASUREMENTS[name] for name in names}))
    print(markdown(verdicts))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in verdicts], indent=2))
    sys.exit(not all(verdict.is_met for verdict in verdicts))


def machine() -> str:
    """Describe this machine, and how busy it is before anything is measured."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx-gateway", "mlx", "mlx-lm"))
    busy, cores = os.getloadavg()[0], os.cpu_count()
    return f"{platform.platform()}, {cores} cores, load {busy:.1f}; {versions}"


async def measured(rig: Rig, measurements: Mapping[str, Measurement]) -> list[Verdict]:
    """Make each measurement, and tell of it at once. SIGTERM ends the servers too."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    verdicts: list[Verdict] = []
    for name, measure in measurements.items():
        started = time.monotonic()
        try:
            found = await measure(rig)
        except (DidNotStart, GatewayError) as error:
            found = [not_measured(name, str(error))]
        except Exception as error:  # a fault of one measurement: the others are still worth having
            traceback.print_exc()
            found = [not_measured(name, f"{type(error).__name__}: {error}")]
        verdicts += found
        rows = markdown(found).splitlines()[2:]
        print(f"{name} ({time.monotonic() - started:.0f} s)", *rows, sep="\n", file=sys.stderr)
    return verdicts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"measure each so often ({ROUNDS})")
    parser.add_argument(
        "--only", action="append", choices=MEASUREMENTS, help="measure this; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="FOLDER",
        help="where `npm install node-llama-cpp` was run: what SmolLM2 is compared with",
    )
    parser.add_argument(
        "--mlx-vlm",
        type=Path,
        metavar="FILE",
        help="the Python of an environment with mlx-vlm, which `vision` is compared with",
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
