"""What an MTP head costs at rest, in load time and memory: `python -m benchmarks.head_costs`.

Writes a plain and a hybrid model with random weights, each with a head, and loads them with the
head and without it (`mtp_head: false`), by turns, each time in a new process. Prints medians.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from benchmarks.loading import load_generation
from benchmarks.steps import Steps
from gateway.engine.device import Device, active_bytes
from gateway.jobs import Caller
from gateway.jobs.chat import GenerateJob, Sampling
from tests.checkpoints import AFTER_LAST, HEADED, add_head, write_chat

SIZE: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LINEAR: Final = {
    "full_attention_interval": 4,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
STEPS: Final = 10  # steps that are timed together
GREEDY: Final = Sampling(temperature=0, ignore_eos=True)
CALLER: Final = Caller(request_id="measure", deadline=float("inf"), allowed_s=600)
MODELS: Final = {"plain": AFTER_LAST | SIZE, "hybrid": HEADED | SIZE | LINEAR}


def load(folder: Path, has_head: bool) -> tuple[float, float, float]:
    """Load a model; return seconds, processor seconds, and MB in memory."""
    began, busy = time.perf_counter(), time.process_time()
    engine = load_generation(
        folder, name="it", device=Device.CPU, speculate_rows=8, has_head=has_head
    )
    spent = time.perf_counter() - began, time.process_time() - busy
    if ("mtp_head" in engine.facts.drafters) != has_head:
        raise RuntimeError(f"{folder}: {'; '.join(engine.facts.notes) or 'it has no head'}")
    return *spent, active_bytes() / 1e6


def measure(folder: Path, rounds: int) -> str:
    """Return the medians of `rounds` loads with a model's head, and of as many without."""
    found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        processes.submit(load, folder, True).result()  # the files are then in the page cache
        for number in range(2 * rounds):
            has_head = (number + number // 2) % 2 == 0  # on, off, off, on, …
            found[has_head].append(processes.submit(load, folder, has_head).result())
    said = []
    for has_head, loads in found.items():
        seconds, busy, size = map(statistics.median, zip(*loads, strict=True))
        spread = f"{min(each[0] for each in loads):.2f}–{max(each[0] for each in loads):.2f}"
        name = "with" if has_head else "without"
        said.append(f"{name}: {seconds:.2f} s ({spread}), processor {busy:.2f} s, {size:.1f} MB")
    return "; ".join(said)


def measure_rest(folder: Path, rows: int, rounds: int) -> str:
    """Return medians of a decode step while a head rests, and without one, by turns."""
    running: dict[bool, Steps] = {}
    for has_head in (True, False):
        engine = load_generation(
            folder, name="it", device=Device.CPU, speculate_rows=8, has_head=has_head
        )
        steps = running[has_head] = Steps(engine)
        job = GenerateJob(
            prompt="Hello", caller=CALLER, max_tokens=STEPS * (rounds + 2), sampling=GREEDY
        )
        for number in range(rows):
            steps.join(number, *engine.prepare(job))
        while steps.is_reading:
            steps.prefill()
    spent: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for has_head in (number % 2 == 0, number % 2 == 1):
            began = time.process_time()
            for _ in range(STEPS):
                running[has_head].change(kind="decode", drafters=())
            running[has_head].engine.synchronize()
            spent[has_head].append((time.process_time() - began) / STEPS * 1000)
    on, off = statistics.median(spent[True]), statistics.median(spent[False])
    pair = f"{on:.1f} ms of processor time, without it {off:.1f}"
    return f"rows: {rows}; a step while the head rests: {pair}, the ratio {on / off:.3f}"


def tell(folder: Path, rounds: int) -> None:
    print(measure(folder, rounds), flush=True)
    for rows in (1, 4):
        print(measure_rest(folder, rows, 6 * rounds), flush=True)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a model with a head, for those two")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.folder is not None:
        tell(given.folder, given.rounds)
        return
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            add_head(write_chat(Path(folder), **config))
            size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
            print(f"{name}, {size / 1e6:.0f} MB", flush=True)
            tell(Path(folder), given.rounds)


if __name__ == "__main__":
    main()
