"""The vision tower of Qwen3-VL and Qwen3.5 to 3.8: patches → the features of tokens.

Source: transformers' `Qwen3VLVisionModel`, with the same names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from gateway.engine.models.counts import MOST_WIDTH
from gateway.engine.models.encoder_kernels import attend_by_numpy, gelu_by_numpy
from gateway.engine.vision.parts import (
    HELD,
    Angles,
    Grid,
    Kernel,
    PartedTower,
    Work,
    attend,
    attend_in,
    places,
    rotate,
)
from gateway.engine.vision.patches import CHANNELS

EPS: Final = 1e-6
_THETA: Final = 10000.0


@dataclass(frozen=True, slots=True)
class QwenVision:
    """The settings in `vision_config` of config.json."""

    layers: ClassVar = "blocks."  # begins the names of layers' arrays

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    out_hidden_size: int
    num_position_embeddings: int  # a square grid of learned positions
    in_channels: int = 3
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2  # patches per side of a token
    deepstack: tuple[int, ...] = ()  # layers whose output is added to the decoder's first layers

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "QwenVision":
        """Read the settings. Raises KeyError, TypeError and ValueError."""
        names = {each.name for each in fields(cls)} & config.keys()
        deepstack = tuple(map(int, config.get("deepstack_visual_indexes") or ()))
        numbers = cls(**{name: int(config[name]) for name in names}, deepstack=deepstack)
        side = round(numbers.num_position_embeddings**0.5)
        if min(getattr(numbers, name) for name in names) < 1:
            raise ValueError("a size of vision_config is below 1")
        if numbers.hidden_size % (4 * numbers.num_heads):
            raise ValueError("hidden_size of vision_config is no multiple of 4 × num_heads")
        if side * side != numbers.num_position_embeddings:
            raise ValueError("num_position_embeddings of vision_config is no square")
        if max(numbers.patch_numbers, numbers.token_numbers) > MOST_WIDTH:
            raise ValueError("patch_size or spatial_merge_size of vision_config is too large")
        if not {*deepstack} <= {*range(numbers.depth)}:
            raise ValueError("deepstack_visual_indexes of vision_config name no layers")
        if len({*deepstack}) < len(deepstack):
            raise ValueError("deepstack_visual_indexes of vision_config name a layer twice")
        return numbers

    def arrange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return a tower's arrays with the projection of patches as a matrix."""
        old, new = "patch_embed.proj.", "patch_embed."
        products = {name.replace(old, new): each for name, each in arrays.items()}
        name = "patch_embed.weight"
        projection = products.get(name)
        # (hidden, channels, frames, rows, columns), but mlx-vlm has channels last.
        if projection is not None and projection.ndim == 5:
            if projection.shape[1] != self.in_channels:
                projection = projection.transpose(0, 4, 1, 2, 3)
            products[name] = projection.reshape(len(projection), -1)
        return products

    def open(self) -> "QwenTower":
        return QwenTower(self)

    @property
    def patch_numbers(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def token_numbers(self) -> int:
        return self.hidden_size * self.spatial_merge_size**2


class _Attention(Module):
    def __init__(self, numbers: QwenVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = numbers.hidden_size
        self._heads = numbers.num_heads
        self.kernel: Kernel = attend
        self.qkv = Linear(size, 3 * size)
        self.proj = Linear(size, size)

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        """Return queries and keys, rotated, and values, (3, heads, patches, size)."""
        projected = self.qkv(x).reshape(len(x), 3, self._heads, -1).transpose(1, 2, 0, 3)
        return rotate(projected, angles)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        output: mx.array = self.proj(attend_in(self.kernel, queries, keys, values, window))
        return output


class _Mlp(Module):
    def __init__(self, numbers: QwenVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activation: Callable[[mx.array], mx.array] = gelu_approx
        self.linear_fc1 = Linear(numbers.hidden_size, numbers.intermediate_size)
        self.linear_fc2 = Linear(numbers.intermediate_size, numbers.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.linear_fc2(self.activation(self.linear_fc1(x)))
        return output


class Block(Module):
    """A layer of the tower."""

    def __init__(self, numbers: QwenVision, norm: Any = LayerNorm, mlp: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm1 = norm(numbers.hidden_size, eps=EPS)
        self.norm2 = norm(numbers.hidden_size, eps=EPS)
        self.attn = _Attention(numbers)
        self.mlp = _Mlp(numbers) if mlp is None else mlp

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        return self.attn.project(self.norm1(x), angles)

    def attend(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        x = x + self.attn.attend(queries, keys, values, window)
        output: mx.array = x + self.mlp(self.norm2(x))
        return output


class _Merger(Module):
    def __init__(self, numbers: QwenVision, *, is_deep: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width = numbers.token_numbers
        self._is_deep = is_deep
        self.norm = LayerNorm(self._width if is_deep else numbers.hidden_size, eps=EPS)
        self.linear_fc1 = Linear(self._width, self._width)
        self.linear_fc2 = Linear(self._width, numbers.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        if self._is_deep:
            x = self.norm(x.reshape(-1, self._width))
        else:
            x = self.norm(x).reshape(-1, self._width)
        features: mx.array = self.linear_fc2(gelu(self.linear_fc1(x)))
        return features


class QwenTower(PartedTower):
    """A tower with its weights, which encodes one image at a time."""

    def __init__(self, numbers: QwenVision) -> None:
        super().__init__(numbers.num_heads, numbers.spatial_merge_size**2)
        self.numbers = numbers
        # The convolution over whole patches is one matrix product.
        self.patch_embed = Linear(numbers.patch_numbers, numbers.hidden_size)
        self.pos_embed = Embedding(numbers.num_position_embeddings, numbers.hidden_size)
        self.blocks = [Block(numbers) for _ in range(numbers.depth)]
        self.merger = _Merger(numbers)
        self.deepstack_merger_list = [_Merger(numbers, is_deep=True) for _ in numbers.deepstack]

    @property
    def depth(self) -> int:
        return 1 + len(self.numbers.deepstack)

    def check_fit(self, patches: Any, decoder: Mapping[str, Any]) -> None:
        """Raises ValueError for image settings or a decoder's config that don't fit."""
        numbers = self.numbers
        for name, own, other in (
            ("patch_size", numbers.patch_size, patches.patch),
            ("spatial_merge_size", numbers.spatial_merge_size, patches.merge),
            ("temporal_patch_size", numbers.temporal_patch_size, patches.frames),
            ("in_channels", numbers.in_channels, CHANNELS),
            ("out_hidden_size", numbers.out_hidden_size, decoder["hidden_size"]),
        ):
            if own != other:
                raise ValueError(f"{name} of vision_config is {own}, and other parts have {other}")
        if len(numbers.deepstack) > decoder["num_hidden_layers"]:
            raise ValueError("deepstack_visual_indexes are more than the decoder's layers")

    def compute_on_cpu(self) -> None:
        """Use the functions for float32 on a CPU, where mlx computes exp and tanh slowly."""
        for block in self.blocks:
            block.attn.kernel, block.mlp.activation = attend_by_numpy, gelu_by_numpy

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1 + DeepStack layers, decoder's hidden size), in
        steps.

        `patches`, (patches, values), are ordered by token.
        """
        rows, columns = places(grid, self.numbers.spatial_merge_size)
        angles = self._angles(rows, columns)

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

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that an image's token takes while it is encoded and read."""
        numbers, itemsize = self.numbers, self.dtype.size
        patches = numbers.token_numbers * HELD
        return itemsize * (patches + numbers.out_hidden_size * (1 + len(numbers.deepstack)))

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.blocks[0].norm1.weight.dtype
        return dtype

    def _positions(self, rows: Any, columns: Any, grid: Grid) -> mx.array:
        """Return interpolated learned positions, (patches, hidden)."""
        side = round(self.numbers.num_position_embeddings**0.5)
        below, across = _neighbours(rows, grid[0], side), _neighbours(columns, grid[1], side)
        total: mx.array | None = None
        for row, row_share in below:
            for column, column_share in across:
                share = mx.array((row_share * column_share)[:, None]).astype(self.dtype)
                part = self.pos_embed(mx.array(row * side + column)) * share
                total = part if total is None else total + part
        assert total is not None
        return total

    def _angles(self, rows: Any, columns: Any) -> tuple[mx.array, mx.array]:
        """Return cosines and sines, (patches, half a head), by row and then by column."""
        half = self.numbers.hidden_size // self.numbers.num_heads // 2
        frequencies = 1.0 / _THETA ** (mx.arange(0, half, 2) / half)
        places = mx.array(np.stack([rows, columns], 1).astype(np.float32))
        angles = (places[..., None] * frequencies).reshape(len(rows), -1)
        return mx.cos(angles), mx.sin(angles)


def _neighbours(places: Any, count: int, side: int) -> list[tuple[Any, Any]]:
    """Return the two nearest of `side` learned positions, and the share of each."""
    exact = places.astype(np.float32) * np.float32((side - 1) / max(count - 1, 1))
    low = np.floor(exact).astype(np.int32)
    share = (exact - low).astype(np.float32)
    return [(low, 1 - share), (np.minimum(low + 1, side - 1), share)]
