"""The vision tower of Qwen2.5-VL, most of whose layers attend within windows.

Source: transformers' `Qwen2_5_VisionTransformerPretrainedModel`, with the same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from numpy.typing import NDArray

from gateway.engine.models.encoder_kernels import attend_by_numpy, silu_by_numpy
from gateway.engine.vision.parts import GatedMlp, Grid, PartedTower, Runs, Work, places
from gateway.engine.vision.qwen import EPS, Block, QwenTower, QwenVision


@dataclass(frozen=True, slots=True)
class WindowVision(QwenVision):
    """The settings in `vision_config` of config.json."""

    num_position_embeddings: int = 1  # there are none
    window_size: int = 112  # pixels per side
    full: tuple[int, ...] = ()  # layers that attend to the whole image

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "WindowVision":
        """Read the settings. Raises KeyError, TypeError and ValueError."""
        numbers = super(WindowVision, cls).read(config)
        assert isinstance(numbers, cls)
        full = tuple(map(int, config.get("fullatt_block_indexes") or ()))
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError("hidden_act of vision_config is not silu")
        if numbers.window_size < numbers.patch_size * numbers.spatial_merge_size:
            raise ValueError("window_size of vision_config is smaller than a token")
        if not full or not {*full} <= {*range(numbers.depth)}:
            raise ValueError("fullatt_block_indexes of vision_config name no layers")
        return replace(numbers, full=full)

    def open(self) -> "WindowTower":
        return WindowTower(self)


class _Merger(Module):
    def __init__(self, numbers: WindowVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width = numbers.token_numbers
        self.ln_q = RMSNorm(numbers.hidden_size, eps=EPS)
        # The activation has no arrays, but a number in their names.
        sizes = self._width, numbers.out_hidden_size
        self.mlp: list[Any] = [Linear(self._width, size) for size in sizes]
        self.mlp.insert(1, gelu)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.ln_q(x).reshape(-1, self._width)
        for module in self.mlp:
            x = module(x)
        return x


class WindowTower(QwenTower):
    """A tower with its weights, which encodes one image at a time."""

    def __init__(self, numbers: WindowVision) -> None:
        PartedTower.__init__(self, numbers.num_heads, numbers.spatial_merge_size**2)
        size, inner = numbers.hidden_size, numbers.intermediate_size
        self.numbers = numbers
        self.patch_embed = Linear(numbers.patch_numbers, size, bias=False)
        self.blocks = [
            Block(numbers, RMSNorm, GatedMlp(size, inner, bias=True, activation=silu))
            for _ in range(numbers.depth)
        ]
        self.merger: Any = _Merger(numbers)

    def compute_on_cpu(self) -> None:
        for block in self.blocks:
            block.attn.kernel, block.mlp.activation = attend_by_numpy, silu_by_numpy

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        numbers = self.numbers
        assert isinstance(numbers, WindowVision)
        merge = numbers.spatial_merge_size
        side = numbers.window_size // merge // numbers.patch_size
        order, runs = order_by_window((grid[0] // merge, grid[1] // merge), side)
        ordered = (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
        rows, columns = places(grid, merge)
        angles = self._angles(rows[ordered], columns[ordered])
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
