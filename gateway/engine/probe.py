"""Whether mlx works here: a broken build ends the process, so whoever asks does so in its own."""

import mlx.core as mx


def multiply() -> None:
    """Multiply two small matrices on this thread's default device."""
    mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
