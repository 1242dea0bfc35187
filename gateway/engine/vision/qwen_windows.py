"""The vision tower of Qwen2.5-VL, most of whose layers attend within windows.

Source: transformers' `Qwen2_5_VisionTransformerPretrainedModel`, with the same names.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from numpy.typing import NDArray

from gateway.engine.vision.parts import GatedMlp, Grid, PartedTower, Runs, Work, places, turn
from gateway.engine.vision.qwen import Block, Projection
from gateway.engine.vision.tower_numbers import TowerNumbers


class _Mlp(GatedMlp):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__(numbers, has_bias=True)


class _Merger(Module):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width = numbers.hidden * numbers.merge**2
        self.ln_q = RMSNorm(numbers.hidden, eps=numbers.eps)
        # The activation has no arrays, but a number in their names.
        sizes = self._width, numbers.output
        self.mlp: list[Any] = [Linear(self._width, size) for size in sizes]
        self.mlp.insert(1, gelu)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.ln_q(x).reshape(-1, self._width)
        for module in self.mlp:
            x = module(x)
        return x


class WindowTower(PartedTower):
    """A tower with its weights, which encodes one image at a time."""

    projection = "patch_embed.proj.weight"

    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__(numbers)
        self.patch_embed = Projection(numbers, has_bias=False)
        self.blocks = [Block(numbers, RMSNorm, _Mlp) for _ in range(numbers.layers)]
        self.merger = _Merger(numbers)

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1, decoder's hidden size), in steps.

        `patches`, (patches, values), are ordered by token.
        """
        numbers = self.numbers
        merge = numbers.merge
        order, runs = order_by_window((grid[0] // merge, grid[1] // merge), numbers.window)
        ordered = (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
        where = [each[ordered] for each in places(grid, merge)]
        turns = turn(where, numbers).reshape(len(ordered), -1)
        angles = mx.cos(turns), mx.sin(turns)
        patches = patches[mx.array(ordered)].astype(self.dtype)

        x = yield from self._in_parts(len(patches), lambda part: self.patch_embed(patches[part]))
        windows = [(tokens * merge**2, count * merge**2) for tokens, count in runs]
        for number, block in enumerate(self.blocks):
            near = None if number in numbers.full else windows
            x = yield from self._pass_layer(block, x, angles, near)
        features = yield from self._in_parts(len(x), lambda part: self.merger(x[part]))
        return features[mx.array(np.argsort(order))][:, None]


def order_by_window(grid: Grid, side: int) -> tuple[NDArray[np.int64], Runs]:
    """Return the tokens of a grid (rows, columns), by the size of their window and by window.

    Also returns each size of windows in tokens, with the tokens of all such windows.
    """
    row, column = (each.reshape(-1) for each in np.mgrid[: grid[0], : grid[1]])
    high, wide = (
        np.minimum(total - place // side * side, side)
        for total, place in zip(grid, (row, column), strict=True)
    )
    window = row // side * grid[1] + column // side
    order = np.lexsort((window, high * wide))
    sizes, counts = np.unique(high * wide, return_counts=True)
    return order, [*zip(sizes.tolist(), counts.tolist(), strict=True)]
