"""The vision tower of Pixtral, Mistral 3 and Ministral 3, and their projector.

Source: transformers' `PixtralVisionModel`, `Mistral3MultiModalProjector` and
`LlavaMultiModalProjector`, with the same names.
"""

from typing import Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from gateway.engine.vision.parts import (
    Attention,
    GatedMlp,
    Grid,
    Layer,
    Layers,
    PartedTower,
    Work,
    places,
)
from gateway.engine.vision.tower_numbers import TowerNumbers

_EPS: Final = 1e-5


class _Layer(Layer):
    names = ("attention_norm", "attention", "ffn_norm", "feed_forward")

    def __init__(self, numbers: TowerNumbers) -> None:
        norms = [RMSNorm(numbers.hidden, eps=_EPS) for _ in range(2)]
        super().__init__(norms, Attention(numbers), GatedMlp(numbers))


class _PatchMerger(Module):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = numbers.hidden * numbers.merge**2
        self.merging_layer = Linear(width, numbers.hidden, bias=False)


class _Projector(Module):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._merged = numbers.merge**2
        if numbers.has_merger:
            self.norm = RMSNorm(numbers.hidden, eps=numbers.eps)
            self.patch_merger = _PatchMerger(numbers)
        self.linear_1 = Linear(numbers.hidden, numbers.output, bias=numbers.has_bias)
        self.linear_2 = Linear(numbers.output, numbers.output, bias=numbers.has_bias)

    def __call__(self, x: mx.array) -> mx.array:
        if "norm" in self:
            # A number of all patches of a token comes before the next number.
            x = self.norm(x).reshape(-1, self._merged, x.shape[-1]).swapaxes(1, 2)
            x = self.patch_merger.merging_layer(x.reshape(len(x), -1))
        features: mx.array = self.linear_2(gelu(self.linear_1(x)))
        return features


class PixtralTower(PartedTower):
    """A tower and its projector with their weights, which encode one image at a time."""

    projection = "patch_conv.weight"

    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__(numbers)
        width = numbers.channels * numbers.patch**2
        self.patch_conv = Linear(width, numbers.hidden, bias=False)
        self.ln_pre = RMSNorm(numbers.hidden, eps=_EPS)
        self.transformer = Layers([_Layer(numbers) for _ in range(numbers.layers)])
        self.multi_modal_projector = _Projector(numbers)

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1, decoder's hidden size), in steps.

        `patches`, (patches, values), are ordered by token.
        """
        numbers = self.numbers
        half = numbers.head // 2
        exponents = np.arange(half).reshape(-1, 2).T / half  # rows' frequencies, and columns'
        where = np.stack(places(grid, numbers.merge))[..., None]
        turns = mx.array((where * numbers.theta ** -exponents[:, None]).astype(np.float32))
        turns = mx.concatenate([*turns], axis=-1)
        angles = mx.cos(turns), mx.sin(turns)

        def embed(part: slice) -> mx.array:
            embedded: mx.array = self.ln_pre(self.patch_conv(patches[part].astype(self.dtype)))
            return embedded

        layers, project = self.transformer.layers, self.multi_modal_projector
        return self._encode_tokens(len(patches), embed, layers, angles, project)
