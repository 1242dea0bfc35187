"""The division of a batch into passes of an encoder, and their order."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Final

import mlx.core as mx

# On a CPU, the buffers of a larger pass exceed the processor's cache.
SLICE_TOKENS: Final = 512
# Multiply-adds that are worth a thread, which takes 0.4 ms to start.
WORTH_A_THREAD: Final = 30_000_000


def bucket(length: int) -> int:
    """Round a length up to a multiple of 8 and, above 64, by at most a quarter."""
    step = 8
    if length > 64:
        step = 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


def worthwhile_threads(tokens: int, weights: int, threads: int) -> int:
    return max(1, min(threads, tokens * weights // WORTH_A_THREAD))


def slice_rows(lengths: Sequence[int], threads: int) -> list[int]:
    """Divide rows, sorted by length, into passes; return the number of rows in each pass.

    A pass costs its rows times its longest row: at most SLICE_TOKENS, unless one row is longer. Use
    as few passes as possible, rounded up to a multiple of `threads`, and make the most expensive
    pass as cheap as possible.
    """
    costs = range(lengths[-1], len(lengths) * lengths[-1] + 1)
    row_count = threads
    while True:
        cheapest = bisect_left(costs, True, key=lambda cost: len(_runs(lengths, cost)) <= row_count)
        if costs[cheapest] <= max(SLICE_TOKENS, lengths[-1]):
            return _runs(lengths, costs[cheapest])
        row_count += threads


def _runs(lengths: Sequence[int], cost: int) -> list[int]:
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
    """Advance passes of equal depth together, layer by layer, each on its own stream."""
    while True:
        states: list[mx.array] = []
        for one, stream in zip(passes, cycle(streams), strict=False):
            with mx.stream(stream):
                states += islice(one, 1)
        if not states:
            return
        yield states
