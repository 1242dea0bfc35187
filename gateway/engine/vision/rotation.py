"""M-RoPE, which rotates queries and keys by a token's time, row and column."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import YarnRoPE

_AXES: Final = 3


class Positions:
    """The positions of the pass being built, shared by all layers."""

    def __init__(self) -> None:
        self.shifts: mx.array | None = None  # (rows,), added to the offsets
        self._points: mx.array | None = None
        self._tables: tuple[mx.array, mx.array] | None = None

    @property
    def points(self) -> mx.array | None:
        """Return each token's position, (rows, tokens, 3), or None without images."""
        return self._points

    def place(self, points: mx.array | None = None, shifts: mx.array | None = None) -> None:
        self._points, self.shifts, self._tables = points, shifts, None

    def tables(self, axes: mx.array, frequencies: mx.array) -> tuple[mx.array, mx.array]:
        """Return the pass's cosines and sines, (rows, 1, tokens, half of the rotated size)."""
        if self._tables is None:
            assert self._points is not None
            angles = self._points[..., axes].astype(mx.float32) * frequencies
            self._tables = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
        return self._tables


class Rotation(Module):
    """A replacement for a decoder's rope that reads `Positions`."""

    def __init__(
        self,
        rope: Any,
        sections: Sequence[int],
        positions: Positions,
        *,
        is_interleaved: bool = True,
    ) -> None:
        """`sections` are the numbers of pairs for time, row and column, which alternate if
        interleaved, and otherwise follow one another.

        Raises ValueError for an unsupported kind of rope, and for sections that don't fit.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._rope, self._positions = rope, positions
        self._dims, self._frequencies, self._scale = _numbers(rope)
        axes = np.zeros(self._dims // 2, np.int32)
        for axis in range(1, _AXES if is_interleaved else 0):
            axes[axis : _AXES * sections[axis] : _AXES] = axis
        if not is_interleaved:
            if len(sections) != _AXES or sum(sections) != len(axes) or min(sections) < 0:
                raise ValueError(f"mrope_section is {sections!r:.40}, for {len(axes)} pairs")
            axes = np.repeat(np.arange(_AXES, dtype=np.int32), sections)
        self._axes = mx.array(axes)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x, (rows, heads, tokens, size), whose rows begin at `offset` in the KV cache."""
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
    """Return a rope's rotated size, the frequencies of its pairs, and its scale."""
    if isinstance(rope, YarnRoPE):
        return rope.dims, mx.reciprocal(rope._freqs.astype(mx.float32)), float(rope.mscale)
    if isinstance(rope, RoPE) and not rope.traditional:
        exponents = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
        return rope.dims, rope.scale / rope.base**exponents, 1.0
    raise ValueError(f"images cannot be read with a rope of the kind {type(rope).__name__}")
