"""Rotary positions on a CPU. mlx's `rope` makes the angles of a pass there, their sines and
cosines, anew twice in each layer; here layers share them.

The numbers are those of `rope`, to the last bit. Metal and CUDA have a kernel for it.
"""

import math
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx

_own_rope: Final[Any] = mx.fast.rope
_Table = tuple[mx.array, mx.array, mx.array | None]  # cosines, signed sines; and their frequencies


class _Pass(threading.local):
    """The positions of the pass that a thread builds, and the tables made of them."""

    is_open = False

    def __init__(self) -> None:
        self._offset: int | mx.array | None = None
        self._tables: dict[Hashable, _Table] = {}

    def begin(self, offset: int | mx.array | None) -> None:
        """Share the tables of these positions from now on, unless they are shared already."""
        if offset is not self._offset:
            self._offset, self._tables = offset, {}

    def tables(self, offset: int | mx.array) -> dict[Hashable, _Table] | None:
        """Return the tables of these positions; None for an array that may be written to."""
        if not self.is_open:
            return None
        if not isinstance(offset, int):
            return self._tables if offset is self._offset else None
        if not isinstance(self._offset, int) or self._offset != offset:
            self.begin(offset)
        return self._tables


_pass: Final = _Pass()


@contextmanager
def sharing_rotations() -> Iterator[None]:
    """While entered, this thread builds one pass, whose layers share rotations."""
    _pass.is_open = True
    try:
        yield
    finally:
        _pass.is_open = False
        _pass.begin(None)


def share_positions(offset: mx.array) -> mx.array:
    """Return the positions of rows' next tokens, (rows,), for layers to share their tables. The
    array must not be written to.
    """
    if _pass.is_open:
        _pass.begin(offset)
    return offset


def rotate(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
) -> mx.array:
    """Return the result of `mx.fast.rope` for x, (rows, heads, tokens, size)."""
    tables = _pass.tables(offset) if x.dtype == mx.float32 and x.ndim == 4 else None
    if tables is None:
        rotated: mx.array = _own_rope(
            x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs
        )
        return rotated
    tokens = x.shape[-2]
    key = dims, traditional, base, scale, id(freqs), tokens
    if key not in tables:
        tables[key] = _make_table(dims, traditional, base, scale, offset, freqs, tokens)
    cosines, sines, _ = tables[key]
    whole = x.shape[-1] == dims
    turning = x if whole else x[..., :dims]
    # Pairs are neighbours, or numbers at the same place of two halves.
    if traditional:
        pairs = turning.reshape(*x.shape[:-1], dims // 2, 2)
        swapped = pairs[..., ::-1]
    else:
        pairs = turning.reshape(*x.shape[:-1], 2, dims // 2)
        swapped = pairs[..., ::-1, :]
    turned = (pairs * cosines + swapped * sines).reshape(turning.shape)
    return turned if whole else mx.concatenate([turned, x[..., dims:]], axis=-1)


def _make_table(
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None,
    tokens: int,
) -> _Table:
    """Make a table by mlx's own steps, in their order (mlx/fast.cpp, rope), so that both round
    alike.
    """
    places = mx.arange(tokens) + (offset if isinstance(offset, int) else offset[:, None, None])
    if freqs is None:
        assert base is not None
        inverse = mx.exp(mx.arange(0, -dims // 2, -1) * (math.log(base) / (dims // 2)))
    else:
        inverse = mx.reciprocal(freqs.astype(mx.float32))
    angles = (places.astype(mx.float32) * scale)[..., None] * inverse
    cosines, sines = mx.cos(angles), mx.sin(angles)
    axis = -1 if traditional else -2
    return mx.stack([cosines] * 2, axis), mx.stack([-sines, sines], axis), freqs
