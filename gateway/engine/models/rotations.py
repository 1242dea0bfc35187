"""Tables of rotary positions that the layers of a pass share on a CPU.

mlx's `rope` would compute sines and cosines twice in each layer. Results equal those of `rope` to
the last bit.
"""

import math
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx

_own_rope: Final[Any] = mx.fast.rope
_Table = tuple[mx.array, mx.array, mx.array | None]  # cosines, signed sines, frequencies


class _Pass(threading.local):
    """The positions of the pass that this thread builds, and their tables."""

    is_open = False

    def __init__(self) -> None:
        self._offset: int | mx.array | None = None
        self._tables: dict[Hashable, _Table] = {}

    def begin(self, offset: int | mx.array | None) -> None:
        if offset is not self._offset:
            self._offset, self._tables = offset, {}

    def tables(self, offset: int | mx.array) -> dict[Hashable, _Table] | None:
        """Return the tables for these positions; None if they cannot be shared."""
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
    """While entered, the layers of the pass that this thread builds share rotation tables."""
    _pass.is_open = True
    try:
        yield
    finally:
        _pass.is_open = False
        _pass.begin(None)


def share_positions(offset: mx.array) -> mx.array:
    """Let layers share tables for the next positions of rows, (rows,), and return these positions.

    The array must not be changed afterwards.
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
    # The table keeps `freqs` alive, so no other array gets the same id.
    key = dims, traditional, base, scale, id(freqs), tokens
    if key not in tables:
        tables[key] = _make_table(dims, traditional, base, scale, offset, freqs, tokens)
    cosines, sines, _ = tables[key]
    whole = x.shape[-1] == dims
    turning = x if whole else x[..., :dims]
    # Traditional rotations pair neighbours; others pair the same places of both halves.
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
    """Compute a table in the same steps as mlx's `rope` (mlx/fast.cpp), for equal rounding."""
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
