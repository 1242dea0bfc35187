"""M-RoPE, which turns a decoder's queries and keys by the time, the row and the column of a token.

It stands in the place of an attention's `rope`. In a pass without images it is that very rope, at
the positions that the images before have left.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import YarnRoPE

_AXES: Final = 3


class Positions:
    """The positions of the pass that is being built, which all layers of a model share."""

    def __init__(self) -> None:
        self.shifts: mx.array | None = None  # (rows,): added to the offsets; None adds nothing
        self._points: mx.array | None = None
        self._tables: tuple[mx.array, mx.array] | None = None

    @property
    def points(self) -> mx.array | None:
        """Return the position of each token, (rows, tokens, 3); None in a pass without images."""
        return self._points

    def place(self, points: mx.array | None = None, shifts: mx.array | None = None) -> None:
        """Set the positions of the next pass."""
        self._points, self.shifts, self._tables = points, shifts, None

    def tables(self, axes: mx.array, frequencies: mx.array) -> tuple[mx.array, mx.array]:
        """Return cosines and sines, (rows, 1, tokens, half of the turned numbers), made once."""
        if self._tables is None:
            assert self._points is not None
            angles = self._points[..., axes].astype(mx.float32) * frequencies
            self._tables = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
        return self._tables


class Rotation(Module):
    """A decoder's rope that reads `Positions`."""

    def __init__(self, rope: Any, sections: Sequence[int], positions: Positions) -> None:
        """`sections` are the numbers of pairs that turn by time, row and column, interleaved.

        Raises ValueError for a rope of another kind.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._rope, self._positions = rope, positions
        self._dims, self._frequencies, self._scale = _numbers(rope)
        axes = np.zeros(self._dims // 2, np.int32)
        for axis in range(1, _AXES):
            axes[axis : _AXES * sections[axis] : _AXES] = axis
        self._axes = mx.array(axes)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Turn x, (rows, heads, tokens, size), whose first tokens have these offsets in KV."""
        positions = self._positions
        if positions.points is None:
            shifts = positions.shifts
            turned: mx.array = self._rope(x, offset=offset if shifts is None else offset + shifts)
            return turned
        cosines, sines = positions.tables(self._axes, self._frequencies)
        half = self._dims // 2
        first = x[..., :half].astype(mx.float32) * self._scale
        second = x[..., half : self._dims].astype(mx.float32) * self._scale
        halves = first * cosines - second * sines, second * cosines + first * sines
        rest = x[..., self._dims :]
        return mx.concatenate([*(each.astype(x.dtype) for each in halves), rest], axis=-1)


def _numbers(rope: Any) -> tuple[int, mx.array, float]:
    """Return the numbers that a rope turns, the frequencies of their pairs, and its scale."""
    if isinstance(rope, YarnRoPE):
        return rope.dims, mx.reciprocal(rope._freqs.astype(mx.float32)), float(rope.mscale)
    if isinstance(rope, RoPE) and not rope.traditional:
        exponents = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
        return rope.dims, rope.scale / rope.base**exponents, 1.0
    raise ValueError(f"images cannot be read with a rope of the kind {type(rope).__name__}")
