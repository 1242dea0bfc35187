"""The cost of choosing a step's tokens, beside mlx-lm's filters called row by row.

A server must call mlx-lm's filters row by row when its rows ask for different values;
`--one-call` gives them all rows at once, as its own server does when all rows ask alike. Ratios
count: both are run in turn in one process.

    python -m benchmarks.sampling --vocabulary 151936 --rows 1 8 32

`--masks` measures the masks of grammars instead: some rows of the largest batch are bound. Beside
them each bound row is masked by itself and all rows are joined again, as mlx-lm's batch generator
does with processors of logits.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from gateway.engine.device import prepare_malloc
from gateway.engine.generation.sampling import Sampler, adjust_logits, choose, is_finite
from gateway.engine.grammar.matching import Mask, apply_masks, words
from gateway.jobs.chat import Sampling

GREEDY = Sampling(temperature=0)
ASKED: Mapping[str, Sampling] = {
    "greedy": GREEDY,
    "presence_penalty 0.5": Sampling(temperature=0, presence_penalty=0.5),
    "temperature 0.7": Sampling(temperature=0.7),
    "0.7, top_p 0.8, top_k 20": Sampling(temperature=0.7, top_p=0.8, top_k=20),
    "0.6, top_p 0.95": Sampling(temperature=0.6, top_p=0.95),
    "min_p 0.05": Sampling(min_p=0.05),
}


# Ids that may come within a string, nearly all, and where only punctuation may.
ALLOWED = (0.99, 0.001)


def ours(logits: mx.array, asked: Sequence[Sampling]) -> Callable[[int], None]:
    """Return a step of ours: the engine's work between a pass and its tokens."""
    rows, vocab_size = logits.shape
    samplers = [Sampler(each, vocab_size) for each in asked]
    for sampler in samplers:
        for token in range(200):
            sampler.count(token)

    def step(position: int) -> None:
        finite = is_finite(logits)
        choice = choose(samplers, adjust_logits(samplers, logits), [position] * rows)
        mx.eval(choice.tokens, finite, *([] if choice.is_sure is None else [choice.is_sure]))

    return step


def theirs(logits: mx.array, asked: Sequence[Sampling], *, one_call: bool) -> Callable[[int], None]:
    """Return the same with mlx-lm's samplers."""
    draws = [
        make_sampler(temp=each.temperature, top_p=each.top_p, top_k=each.top_k, min_p=each.min_p)
        for each in asked
    ]

    def step(position: int) -> None:
        parts = [logits] if one_call else [logits[i : i + 1] for i in range(len(logits))]
        mx.eval(
            [
                draw(each - mx.logsumexp(each, axis=-1, keepdims=True))
                for draw, each in zip(draws, parts, strict=False)
            ]
        )

    return step


def mask_together(logits: mx.array, masks: Mask, bound: list[int]) -> Callable[[int], None]:
    """Return a step of ours that masks the bound rows."""

    def step(position: int) -> None:
        mx.eval(apply_masks(logits, masks, bound))

    return step


def mask_each(logits: mx.array, masks: Mask, bound: list[int]) -> Callable[[int], None]:
    """Return the same, row by row."""
    mask_of = dict(zip(bound, masks, strict=True))

    def step(position: int) -> None:
        rows = []
        for i in range(len(logits)):
            row = logits[i : i + 1]
            if i in mask_of:
                bits = np.unpackbits(
                    mask_of[i].view(np.uint8), count=row.shape[1], bitorder="little"
                )
                row = mx.where(mx.array(bits.view(np.bool_)), row, -mx.inf)
            rows.append(row)
        mx.eval(mx.concatenate(rows))

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


def measure_choices(given: argparse.Namespace) -> None:
    """Print the cost of choosing tokens."""
    print("| asked | rows | ours, ms | mlx-lm's, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for name, asked in ASKED.items():
        for rows in given.rows:
            measure_choice(name, [asked] * rows, given)
    if not given.one_call:
        for name, asked in list(ASKED.items())[1:]:
            for rows in given.rows[1:]:
                measure_choice(f"{name} by one row", [asked] + [GREEDY] * (rows - 1), given)


def measure_choice(name: str, asked: Sequence[Sampling], given: argparse.Namespace) -> None:
    """Print a line of the table."""
    logits = draw_logits(len(asked), given.vocabulary)
    steps = [ours(logits, asked), theirs(logits, asked, one_call=given.one_call)]
    mine, other = medians(steps, given.rounds)
    print(f"| {name} | {len(asked)} | {mine:.1f} | {other:.1f} | {other / mine:.1f} |")


def measure_masks(given: argparse.Namespace) -> None:
    """Print the cost of masks, by the rows bound."""
    rows = max(given.rows)
    logits = draw_logits(rows, given.vocabulary)
    generator = np.random.default_rng(0)
    print("| bound | of | ours, ms | row by row, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for count in given.rows:
        share = np.resize(ALLOWED, count)[:, None]
        bits = generator.random((count, 32 * words(given.vocabulary))) < share
        masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        bound = [i * rows // count for i in range(count)]
        steps = [mask_together(logits, masks, bound), mask_each(logits, masks, bound)]
        mine, other = medians(steps, given.rounds)
        print(f"| {count} | {rows} | {mine:.1f} | {other:.1f} | {other / mine:.1f} |")


def draw_logits(rows: int, vocab_size: int) -> mx.array:
    """Return random logits, evaluated."""
    logits = mx.random.normal((rows, vocab_size)) * 3
    mx.eval(logits)
    return logits


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The cost of choosing a step's tokens.")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one-call", action="store_true")
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--device", choices=("cpu", "gpu"))
    given = parser.parse_args(arguments)
    prepare_malloc()
    if given.device:
        mx.set_default_device(mx.Device(mx.cpu if given.device == "cpu" else mx.gpu))
    if given.masks:
        measure_masks(given)
    else:
        measure_choices(given)


if __name__ == "__main__":
    main(sys.argv[1:])
