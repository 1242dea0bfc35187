"""How a batch of rows is cut into passes, how wide they are, and in what order they are built."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Final

import mlx.core as mx

# Beyond some 500 tokens a pass gains nothing on a CPU, and its buffers leave the cache.
SLICE_TOKENS: Final = 512
# Multiply-adds below which a second thread costs more than it computes: to start it takes 0.4 ms.
WORTH_A_THREAD: Final = 30_000_000


def bucket(length: int) -> int:
    """Round a length up so that few shapes occur: to 8 up to 64, then to at most a quarter more.

    Short texts are the many, and there a step of 8 wastes least; 512 tokens make 20 shapes.
    """
    step = 8 if length <= 64 else 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


def worthwhile_threads(tokens: int, weights: int, threads: int) -> int:
    """Choose how many threads share a pass of so many tokens, each times so many weights."""
    return max(1, min(threads, tokens * weights // WORTH_A_THREAD))


def slice_rows(lengths: Sequence[int], threads: int) -> list[int]:
    """Cut rows, shortest first, into runs worth one pass each: the rows of each run.

    A run costs its rows times its longest. There are as few runs as leave none above
    SLICE_TOKENS, the same number for every thread, and the dearest is as cheap as can be. A row
    is never divided.
    """
    costs = range(lengths[-1], len(lengths) * lengths[-1] + 1)
    most = threads
    while True:
        cheapest = bisect_left(costs, True, key=lambda cost: len(_runs(lengths, cost)) <= most)
        if costs[cheapest] <= max(SLICE_TOKENS, lengths[-1]):
            return _runs(lengths, costs[cheapest])
        most += threads


def _runs(lengths: Sequence[int], cost: int) -> list[int]:
    """Fill runs of at most `cost` with the rows in order."""
    runs = [0]
    for length in lengths:
        if (runs[-1] + 1) * length <= cost:
            runs[-1] += 1
        else:
            runs.append(1)
    return runs


def in_step(
    passes: Sequence[Iterator[mx.array]], streams: Sequence[mx.Stream]
) -> Iterator[list[mx.array]]:
    """Advance all passes, equally long, by one layer at a time, each on its stream."""
    while True:
        states: list[mx.array] = []
        for one, stream in zip(passes, cycle(streams), strict=False):
            with mx.stream(stream):
                states += islice(one, 1)
        if not states:
            return
        yield states
