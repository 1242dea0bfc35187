"""The hidden states of a model from which tokens are guessed."""

from typing import Any

import mlx.core as mx


def keep_state(states: Any, hidden: mx.array) -> mx.array:
    """Keep each row's last hidden state of a pass in an `ArraysCache`.

    Return the states before the pass's tokens and after the last one, (rows, n + 1, width).
    """
    rows, tokens, width = hidden.shape
    before = mx.zeros((rows, 1, width), hidden.dtype) if states[0] is None else states[0]
    series = mx.concatenate([before, hidden], axis=1)
    if states.lengths is None:
        states[0] = mx.contiguous(series[:, -1:])
    else:  # the rows are padded
        ends = mx.clip(states.lengths, 0, tokens)[:, None, None]
        states[0] = mx.take_along_axis(series, ends, axis=1)
    # After a rollback, the next guess needs the states of the accepted tokens.
    states.recent = None if getattr(states, "earlier", None) is None else hidden
    states.advance(tokens)
    return series
