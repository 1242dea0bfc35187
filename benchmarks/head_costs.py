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
from gateway.engine.device import Device, active_bytes
from tests.checkpoints import AFTER_LAST, HEADED, add_head, write_chat

SIZE: Final[dict[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 2112,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
}
LINEAR: Final = {
    "full_attention_interval": 4,
    "linear_num_value_heads": 12,
    "linear_num_key_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
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


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a model with a head, for those two")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.folder is not None:
        print(measure(given.folder, given.rounds))
        return
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            add_head(write_chat(Path(folder), **config))
            size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
            print(f"{name}, {size / 1e6:.0f} MB: {measure(Path(folder), given.rounds)}", flush=True)


if __name__ == "__main__":
    main()
