"""Whether mlx works here. A broken build ends the process, so run this in one of its own."""

import time

import mlx.core as mx


def multiply() -> None:
    """Multiply two small matrices on this thread's default device."""
    mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))


def gflops(size: int = 512, times: int = 9) -> float:
    """Return how fast square float32 matrices are multiplied, at best, in 10⁹ operations a second.

    At best, since other work on the machine can only slow it.
    """
    matrix = mx.ones((size, size))
    mx.eval(matrix @ matrix)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        mx.eval(matrix @ matrix)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9
