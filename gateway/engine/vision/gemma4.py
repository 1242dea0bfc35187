"""The vision tower of Gemma 4: patches → the features of tokens.

Sources: transformers' `Gemma4VisionModel` and `Gemma4MultimodalEmbedder`, with the same names.
"""

from functools import partial
from typing import Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from gateway.engine.vision.parts import (
    Angles,
    Attention,
    GatedMlp,
    Grid,
    Layer,
    Layers,
    PartedTower,
    Work,
    places,
    rotate,
    turn,
)
from gateway.engine.vision.tower_numbers import TowerNumbers

_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")


class _Projection(Module):
    """A linear layer, with inputs and outputs clipped to bounds in the files if there are any."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, is_clipped: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = Linear(inputs, outputs, bias=bias)
        self._is_clipped = is_clipped
        for name in _BOUNDS if is_clipped else ():
            setattr(self, name, mx.array(0.0))

    def __call__(self, x: mx.array) -> mx.array:
        if not self._is_clipped:
            output: mx.array = self.linear(x)
            return output
        output = self.linear(mx.clip(x, self.input_min, self.input_max))
        return mx.clip(output, self.output_min, self.output_max)


class _Attention(Attention):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__(numbers, linear=partial(_Projection, is_clipped=numbers.is_clipped))
        self._scale, self._eps = 1.0, numbers.eps
        self.q_norm = RMSNorm(numbers.head, eps=numbers.eps)
        self.k_norm = RMSNorm(numbers.head, eps=numbers.eps)

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        """Return queries and keys, rotated, and values, (3, heads, patches, size)."""
        parts = [
            each(x).reshape(len(x), self._heads, -1).swapaxes(0, 1)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        ]
        values = mx.fast.rms_norm(parts[2], None, self._eps)
        normed = mx.stack([self.q_norm(parts[0]), self.k_norm(parts[1]), values])
        # The first half of each head is rotated by column, and the second by row.
        halves = normed.reshape(*normed.shape[:-1], 2, -1)
        return rotate(halves, angles).reshape(normed.shape)


class _Layer(Layer):
    names = ("input_layernorm", "self_attn", "pre_feedforward_layernorm", "mlp")

    def __init__(self, numbers: TowerNumbers) -> None:
        norms = [RMSNorm(numbers.hidden, eps=numbers.eps) for _ in range(4)]
        linear = partial(_Projection, is_clipped=numbers.is_clipped)
        super().__init__(norms[:2], _Attention(numbers), GatedMlp(numbers, linear=linear))
        self.post_attention_layernorm, self.post_feedforward_layernorm = norms[2:]

    def attend(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        attended = self.self_attn.attend(queries, keys, values, window)
        x = x + self.post_attention_layernorm(attended)
        output = self.mlp(self.pre_feedforward_layernorm(x))
        added: mx.array = self.post_feedforward_layernorm(output)
        return x + added


class _Embedder(Module):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = numbers.channels * numbers.patch**2
        self._channels = numbers.channels
        self.input_proj = Linear(width, numbers.hidden, bias=False)
        self.position_embedding_table = mx.zeros((2, numbers.positions, numbers.hidden))

    def __call__(self, patches: mx.array, rows: mx.array, columns: mx.array) -> mx.array:
        across, below = self.position_embedding_table
        in_pixels = patches.reshape(len(patches), self._channels, -1).swapaxes(1, 2)
        values = (2 * (in_pixels - 0.5)).astype(across.dtype).reshape(len(patches), -1)
        embedded: mx.array = self.input_proj(values) + (across[columns] + below[rows])
        return embedded


class _Output(Module):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding_projection = Linear(numbers.hidden, numbers.output, bias=False)


class Gemma4Tower(PartedTower):
    """A tower with its weights, which encodes one image at a time."""

    projection = "patch_embedder.input_proj.weight"

    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__(numbers, () if numbers.is_clipped else _BOUNDS)
        self.patch_embedder = _Embedder(numbers)
        self.encoder = Layers([_Layer(numbers) for _ in range(numbers.layers)])
        self.embed_vision = _Output(numbers)
        if numbers.is_standardized:
            self.std_bias = mx.zeros((numbers.hidden,))
            self.std_scale = mx.zeros((numbers.hidden,))

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1, decoder's hidden size), in steps.

        `patches`, (patches, values), are ordered by token.
        """
        numbers = self.numbers
        found = places(grid, numbers.merge)
        rows, columns = (mx.array(each.astype(np.int32)) for each in found)
        turns = turn(found[::-1], numbers)
        angles = mx.cos(turns), mx.sin(turns)

        def embed(part: slice) -> mx.array:
            embedded: mx.array = self.patch_embedder(patches[part], rows[part], columns[part])
            return embedded

        def pool(x: mx.array) -> mx.array:
            tokens = x.reshape(-1, self._merged, x.shape[-1]).astype(mx.float32)
            pooled = tokens.mean(axis=1).astype(x.dtype).astype(mx.float32)
            pooled = pooled * numbers.hidden**0.5
            if numbers.is_standardized:
                pooled = (pooled - self.std_bias) * self.std_scale
            normed = mx.fast.rms_norm(pooled.astype(x.dtype), None, numbers.eps)
            projected: mx.array = self.embed_vision.embedding_projection(normed)
            return projected

        return self._encode_tokens(len(patches), embed, self.encoder.layers, angles, pool)
