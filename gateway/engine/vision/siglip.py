"""The vision tower of Gemma 3: patches → the features of tokens.

Sources: transformers' `SiglipVisionModel` and `Gemma3MultiModalProjector`, with the same names.
"""

from typing import Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from gateway.engine.vision.parts import (
    Attention,
    Grid,
    Layer,
    Layers,
    Mlp,
    PartedTower,
    Work,
    places,
)
from gateway.engine.vision.tower_numbers import TowerNumbers

_UNUSED: Final = ("head.", "embeddings.position_ids")  # Gemma 3 has a pooling of its own


class _Attention(Attention):
    output_name = "out_proj"


class _Layer(Layer):
    names = ("layer_norm1", "self_attn", "layer_norm2", "mlp")

    def __init__(self, numbers: TowerNumbers) -> None:
        norms = [LayerNorm(numbers.hidden, eps=numbers.eps) for _ in range(2)]
        super().__init__(norms, _Attention(numbers, has_bias=True), Mlp(numbers))


class _Embeddings(Module):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.patch_embedding = Linear(numbers.channels * numbers.patch**2, numbers.hidden)
        self.position_embedding = Embedding(numbers.positions, numbers.hidden)


class _Projector(Module):
    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eps = numbers.eps
        self.mm_input_projection_weight = mx.zeros((numbers.hidden, numbers.output))
        self.mm_soft_emb_norm = _Scale(numbers.hidden)

    def __call__(self, x: mx.array) -> mx.array:
        scaled = mx.fast.rms_norm(x, 1.0 + self.mm_soft_emb_norm.weight, self._eps)
        projected: mx.array = scaled @ self.mm_input_projection_weight
        return projected


class _Scale(Module):
    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.zeros((size,))


class SiglipTower(PartedTower):
    """A tower with its weights, which encodes images of one size."""

    projection = "embeddings.patch_embedding.weight"

    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__(numbers, _UNUSED)
        self.embeddings = _Embeddings(numbers)
        self.encoder = Layers([_Layer(numbers) for _ in range(numbers.layers)])
        self.post_layernorm = LayerNorm(numbers.hidden, eps=numbers.eps)
        self.multi_modal_projector = _Projector(numbers)

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1, decoder's hidden size), in steps.

        `patches`, (patches, values), are ordered by token.
        """
        rows, columns = places(grid, self.numbers.merge)
        indices = mx.array((rows * grid[1] + columns).astype(np.int32))
        angles = mx.zeros((len(patches), 0)), mx.zeros((len(patches), 0))
        embeddings = self.embeddings

        def embed(part: slice) -> mx.array:
            embedded: mx.array = embeddings.patch_embedding(patches[part].astype(self.dtype))
            found: mx.array = embedded + embeddings.position_embedding(indices[part])
            return found

        def pool(x: mx.array) -> mx.array:
            tokens = self.post_layernorm(x).reshape(-1, self._merged, x.shape[-1])
            features: mx.array = self.multi_modal_projector(tokens.mean(axis=1))
            return features

        return self._encode_tokens(len(patches), embed, self.encoder.layers, angles, pool)
