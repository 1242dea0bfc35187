"""What choosing the tokens of a step costs, beside mlx-lm's filters called row by row.

Row by row is what a server must do with mlx-lm's filters when its rows ask for different values;
`--one-call` gives them all rows at once, as its own server does when all rows ask alike. Ratios
count: both are run in turn in one process.

    python -m benchmarks.sampling --vocabulary 151936 --rows 1 8 32
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from gateway.engine.generation.sampling import Sampler, adjust_logits, choose, is_finite
from gateway.jobs import Sampling

ASKED: Mapping[str, Sampling] = {
    "greedy": Sampling(temperature=0),
    "temperature 0.7": Sampling(temperature=0.7),
    "0.7, top_p 0.8, top_k 20": Sampling(temperature=0.7, top_p=0.8, top_k=20),
    "0.6, top_p 0.95": Sampling(temperature=0.6, top_p=0.95),
    "min_p 0.05": Sampling(min_p=0.05),
}


def ours(logits: mx.array, asked: Sampling) -> Callable[[int], None]:
    """Return a step of ours: what the engine does between a pass and its tokens."""
    rows, vocab_size = logits.shape
    samplers = [Sampler(asked, vocab_size) for _ in range(rows)]

    def step(position: int) -> None:
        finite = is_finite(logits)
        choice = choose(samplers, adjust_logits(samplers, logits), [position] * rows)
        mx.eval(choice.tokens, finite, *([] if choice.is_sure is None else [choice.is_sure]))

    return step


def theirs(logits: mx.array, asked: Sampling, *, one_call: bool) -> Callable[[int], None]:
    """Return the same with mlx-lm's sampler."""
    draw = make_sampler(
        temp=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, min_p=asked.min_p
    )

    def step(position: int) -> None:
        parts = [logits] if one_call else [logits[i : i + 1] for i in range(len(logits))]
        mx.eval([draw(each - mx.logsumexp(each, axis=-1, keepdims=True)) for each in parts])

    return step


def medians(steps: Sequence[Callable[[int], None]], rounds: int) -> list[float]:
    """Return the median milliseconds of each, run in turn."""
    took: list[list[float]] = [[] for _ in steps]
    for position in range(rounds + 1):
        for step, times in zip(steps, took, strict=True):
            started = time.perf_counter()
            step(position)
            times.append(1000 * (time.perf_counter() - started))
    return [statistics.median(times[1:]) for times in took]  # the first warms up


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The cost of choosing a step's tokens.")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one-call", action="store_true")
    parser.add_argument("--device", choices=("cpu", "gpu"))
    given = parser.parse_args(arguments)
    if given.device:
        mx.set_default_device(mx.Device(mx.cpu if given.device == "cpu" else mx.gpu))
    print("| asked | rows | ours, ms | mlx-lm's, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for name, asked in ASKED.items():
        for rows in given.rows:
            logits = mx.random.normal((rows, given.vocabulary)) * 3
            mx.eval(logits)
            steps = [ours(logits, asked), theirs(logits, asked, one_call=given.one_call)]
            mine, other = medians(steps, given.rounds)
            print(f"| {name} | {rows} | {mine:.1f} | {other:.1f} | {other / mine:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
