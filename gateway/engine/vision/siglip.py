"""The vision tower of Gemma 3: patches → the features of tokens.

Sources: transformers' `SiglipVisionModel` and `Gemma3MultiModalProjector`, with the same names.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from gateway.engine.models.counts import MOST_WIDTH, text_config
from gateway.engine.models.encoder_kernels import attend_by_numpy, gelu_by_numpy
from gateway.engine.vision.parts import (
    HELD,
    Angles,
    Grid,
    Kernel,
    PartedTower,
    Work,
    attend,
    places,
)
from gateway.engine.vision.patches import CHANNELS

_LAYER: Final = re.compile(r"^vision_tower\.(vision_model\.)?")
_UNUSED: Final = ("head.", "embeddings.position_ids")  # Gemma 3 has a pooling of its own


@dataclass(frozen=True, slots=True)
class SiglipVision:
    """The settings in `vision_config` of config.json, and of the projection."""

    layers: ClassVar = "encoder.layers."

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    merge: int  # patches per side of a token
    output: int  # the decoder's hidden size
    eps: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "SiglipVision":
        """Read the settings. Raises KeyError, TypeError and ValueError."""
        vision, tokens = config["vision_config"], config.get("mm_tokens_per_image", 256)
        names = [each.name for each in fields(cls)][:6]
        numbers = {name: int(vision[name]) for name in names}
        side = max(1, numbers["patch_size"] * math.isqrt(int(tokens)))
        numbers["merge"] = numbers["image_size"] // side
        numbers["output"] = int(text_config(config)["hidden_size"])
        if min(numbers.values()) < 1 or max(numbers.values()) > MOST_WIDTH:
            raise ValueError("a size of vision_config is below 1 or too large")
        if numbers["hidden_size"] % numbers["num_attention_heads"]:
            raise ValueError("hidden_size of vision_config is no multiple of its heads")
        if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise ValueError("hidden_act of vision_config is not supported")
        return cls(**numbers, eps=float(vision.get("layer_norm_eps", 1e-6)))

    @property
    def depth(self) -> int:
        return self.num_hidden_layers

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def arrange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return a checkpoint's arrays by the tower's names."""
        named = {_LAYER.sub("", name): each for name, each in arrays.items()}
        named = {name: each for name, each in named.items() if not name.startswith(_UNUSED)}
        name = "embeddings.patch_embedding.weight"
        kernel = named.get(name)
        # (hidden, channels, rows, columns), but mlx-vlm has channels last.
        if kernel is not None and kernel.ndim == 4:
            if kernel.shape[1] != CHANNELS or kernel.shape[-1] != self.patch_size:
                kernel = kernel.transpose(0, 3, 1, 2)
            named[name] = kernel.reshape(len(kernel), -1)
        return named

    def open(self) -> "SiglipTower":
        return SiglipTower(self)


class _Attention(Module):
    def __init__(self, numbers: SiglipVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, self._heads = numbers.hidden_size, numbers.num_attention_heads
        self.kernel: Kernel = attend
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(size, size) for _ in "qkvo")

    def project(self, x: mx.array) -> mx.array:
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        return mx.stack([each.reshape(len(x), self._heads, -1).swapaxes(0, 1) for each in parts])

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        attended = self.kernel(queries * queries.shape[-1] ** -0.5, keys, values)
        output: mx.array = self.out_proj(attended.swapaxes(0, 1).reshape(queries.shape[1], -1))
        return output


class _Mlp(Module):
    def __init__(self, numbers: SiglipVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activation: Callable[[mx.array], mx.array] = gelu_approx
        self.fc1 = Linear(numbers.hidden_size, numbers.intermediate_size)
        self.fc2 = Linear(numbers.intermediate_size, numbers.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.fc2(self.activation(self.fc1(x)))
        return output


class _Layer(Module):
    def __init__(self, numbers: SiglipVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer_norm1 = LayerNorm(numbers.hidden_size, eps=numbers.eps)
        self.layer_norm2 = LayerNorm(numbers.hidden_size, eps=numbers.eps)
        self.self_attn = _Attention(numbers)
        self.mlp = _Mlp(numbers)

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        return self.self_attn.project(self.layer_norm1(x))

    def attend(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        x = x + self.self_attn.attend(queries, keys, values)
        return x + self.mlp(self.layer_norm2(x))


class _Embeddings(Module):
    def __init__(self, numbers: SiglipVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = CHANNELS * numbers.patch_size**2
        self.patch_embedding = Linear(width, numbers.hidden_size)
        self.position_embedding = Embedding(numbers.patches, numbers.hidden_size)


class _Encoder(Module):
    def __init__(self, numbers: SiglipVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [_Layer(numbers) for _ in range(numbers.depth)]


class _Projector(Module):
    def __init__(self, numbers: SiglipVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eps = numbers.eps
        self.mm_input_projection_weight = mx.zeros((numbers.hidden_size, numbers.output))
        self.mm_soft_emb_norm = _Scale(numbers.hidden_size)

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

    depth = 1

    def __init__(self, numbers: SiglipVision) -> None:
        super().__init__(numbers.num_attention_heads, numbers.merge**2)
        self.numbers = numbers
        self.embeddings = _Embeddings(numbers)
        self.encoder = _Encoder(numbers)
        self.post_layernorm = LayerNorm(numbers.hidden_size, eps=numbers.eps)
        self.multi_modal_projector = _Projector(numbers)

    def check_fit(self, patches: Any, decoder: Mapping[str, Any]) -> None:
        """Raises ValueError for image settings or a decoder's config that don't fit."""
        if patches.side != self.numbers.image_size or patches.merge != self.numbers.merge:
            raise ValueError("image_size of vision_config is not the size of the image processor")

    def compute_on_cpu(self) -> None:
        """Use the functions for float32 on a CPU, where mlx computes exp and tanh slowly."""
        for layer in self.encoder.layers:
            layer.self_attn.kernel, layer.mlp.activation = attend_by_numpy, gelu_by_numpy

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

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that an image's token takes while it is encoded and read."""
        numbers = self.numbers
        return self.dtype.size * (numbers.hidden_size * self._merged * HELD + numbers.output)

    @property
    def dtype(self) -> mx.Dtype:
        return self.post_layernorm.weight.dtype
