"""The vision tower of Qwen3-VL and Qwen3.5 to 3.8: patches → the features of tokens.

Source: transformers' `Qwen3VLVisionModel`, with the same names.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from gateway.engine.vision.parts import (
    Angles,
    Attention,
    Grid,
    Layer,
    Mlp,
    PartedTower,
    Work,
    places,
    rotate,
    turn,
)
from gateway.engine.vision.tower_numbers import TowerNumbers


class _Attention(Attention):
    input_names = ("qkv",)
    output_name = "proj"

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        """Return queries and keys, rotated, and values, (3, heads, patches, size)."""
        projected = self.qkv(x).reshape(len(x), 3, self._heads, -1).transpose(1, 2, 0, 3)
        return rotate(projected, angles)


class _Mlp(Mlp):
    names = ("linear_fc1", "linear_fc2")


class Block(Layer):
    """A layer of the tower."""

    names = ("norm1", "attn", "norm2", "mlp")

    def __init__(self, numbers: TowerNumbers, norm: Any = LayerNorm, mlp: Any = _Mlp) -> None:
        norms = [norm(numbers.hidden, eps=numbers.eps) for _ in range(2)]
        super().__init__(norms, _Attention(numbers, has_bias=True), mlp(numbers))


class Projection(Module):
    """The projection of patches, which are whole frames of pixels."""

    def __init__(self, numbers: TowerNumbers, *, has_bias: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = numbers.channels * numbers.frames * numbers.patch**2
        self.proj = Linear(width, numbers.hidden, bias=has_bias)

    def __call__(self, patches: mx.array) -> mx.array:
        projected: mx.array = self.proj(patches)
        return projected


class _Merger(Module):
    def __init__(self, numbers: TowerNumbers, *, is_deep: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width = numbers.hidden * numbers.merge**2
        self._is_deep = is_deep
        self.norm = LayerNorm(self._width if is_deep else numbers.hidden, eps=numbers.eps)
        self.linear_fc1 = Linear(self._width, self._width)
        self.linear_fc2 = Linear(self._width, numbers.output)

    def __call__(self, x: mx.array) -> mx.array:
        if self._is_deep:
            x = self.norm(x.reshape(-1, self._width))
        else:
            x = self.norm(x).reshape(-1, self._width)
        features: mx.array = self.linear_fc2(gelu(self.linear_fc1(x)))
        return features


class QwenTower(PartedTower):
    """A tower with its weights, which encodes one image at a time."""

    projection = "patch_embed.proj.weight"

    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__(numbers)
        self.depth = 1 + len(numbers.deepstack)
        self.patch_embed = Projection(numbers)
        self.pos_embed = Embedding(numbers.positions, numbers.hidden)
        self.blocks = [Block(numbers) for _ in range(numbers.layers)]
        self.merger = _Merger(numbers)
        self.deepstack_merger_list = [_Merger(numbers, is_deep=True) for _ in numbers.deepstack]

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1 + DeepStack layers, decoder's hidden size), in
        steps.

        `patches`, (patches, values), are ordered by token.
        """
        rows, columns = places(grid, self.numbers.merge)
        turns = turn((rows, columns), self.numbers).reshape(len(rows), -1)
        angles = mx.cos(turns), mx.sin(turns)

        def embed(part: slice) -> mx.array:
            places = self._positions(rows[part], columns[part], grid)
            embedded: mx.array = self.patch_embed(patches[part].astype(self.dtype)) + places
            return embedded

        x = yield from self._in_parts(len(patches), embed)
        deep: list[mx.array] = []
        for number, block in enumerate(self.blocks):
            x = yield from self._pass_layer(block, x, angles)
            if number in self.numbers.deepstack:
                merger = self.deepstack_merger_list[self.numbers.deepstack.index(number)]
                deep.append((yield from self._merge(merger, x)))
        features = yield from self._merge(self.merger, x)
        return mx.stack([features, *deep], axis=1)

    def _merge(self, merger: _Merger, x: mx.array) -> Work:
        return self._in_parts(len(x), lambda part: merger(x[part]))

    def _positions(self, rows: Any, columns: Any, grid: Grid) -> mx.array:
        """Return interpolated learned positions, (patches, hidden)."""
        side = math.isqrt(self.numbers.positions)
        below, across = _neighbours(rows, grid[0], side), _neighbours(columns, grid[1], side)
        total: mx.array | None = None
        for row, row_share in below:
            for column, column_share in across:
                share = mx.array((row_share * column_share)[:, None]).astype(self.dtype)
                part = self.pos_embed(mx.array(row * side + column)) * share
                total = part if total is None else total + part
        assert total is not None
        return total


def _neighbours(places: Any, count: int, side: int) -> list[tuple[Any, Any]]:
    """Return the two nearest of `side` learned positions, and the share of each."""
    exact = places.astype(np.float32) * np.float32((side - 1) / max(count - 1, 1))
    low = np.floor(exact).astype(np.int32)
    share = (exact - low).astype(np.float32)
    return [(low, 1 - share), (np.minimum(low + 1, side - 1), share)]
