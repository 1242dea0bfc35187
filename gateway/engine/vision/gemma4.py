"""The vision tower of Gemma 4: patches → the features of tokens.

Sources: transformers' `Gemma4VisionModel` and `Gemma4MultimodalEmbedder`, with the same names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from gateway.engine.models.counts import MOST_WIDTH, text_config
from gateway.engine.models.encoder_kernels import attend_by_numpy, gelu_by_numpy
from gateway.engine.vision.gemma_patches import SOFT_TOKENS
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

_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True)
class Gemma4Vision:
    """The settings in `vision_config` of config.json."""

    layers: ClassVar = "encoder.layers."

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    patch_size: int
    pooling_kernel_size: int
    position_embedding_size: int
    output: int  # the decoder's hidden size
    use_clipped_linears: bool
    standardize: bool
    theta: float
    eps: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Gemma4Vision":
        """Read the settings. Raises KeyError, TypeError and ValueError."""
        vision = config["vision_config"]
        numbers = {name: int(vision[name]) for name in [each.name for each in fields(cls)][:8]}
        numbers["output"] = int(text_config(config)["hidden_size"])
        if min(numbers.values()) < 1 or max(numbers.values()) > MOST_WIDTH:
            raise ValueError("a size of vision_config is below 1 or too large")
        if numbers["head_dim"] % 4:
            raise ValueError("head_dim of vision_config is no multiple of 4")
        if (
            vision.get("num_key_value_heads", numbers["num_attention_heads"])
            != (numbers["num_attention_heads"])
        ):
            raise ValueError("num_key_value_heads of vision_config is not supported")
        if vision.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise ValueError("hidden_activation of vision_config is not supported")
        rope = vision.get("rope_parameters") or {}
        return cls(
            **numbers,
            use_clipped_linears=bool(vision.get("use_clipped_linears")),
            standardize=bool(vision.get("standardize")),
            theta=float(rope.get("rope_theta", 100.0)),
            eps=float(vision.get("rms_norm_eps", 1e-6)),
        )

    @property
    def depth(self) -> int:
        return self.num_hidden_layers

    def arrange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return a checkpoint's arrays by the tower's names."""
        named = {name.removeprefix("vision_tower."): each for name, each in arrays.items()}
        if self.use_clipped_linears:
            return named
        return {name: each for name, each in named.items() if not name.endswith(_BOUNDS)}

    def open(self) -> "Gemma4Tower":
        return Gemma4Tower(self)


class _Projection(Module):
    """A linear layer, with inputs and outputs clipped to bounds in the files if there are any."""

    def __init__(self, numbers: Gemma4Vision, inputs: int, outputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = Linear(inputs, outputs, bias=False)
        self._is_clipped = numbers.use_clipped_linears
        for name in _BOUNDS if self._is_clipped else ():
            setattr(self, name, mx.array(0.0))

    def __call__(self, x: mx.array) -> mx.array:
        if not self._is_clipped:
            output: mx.array = self.linear(x)
            return output
        output = self.linear(mx.clip(x, self.input_min, self.input_max))
        return mx.clip(output, self.output_min, self.output_max)


class _Attention(Module):
    def __init__(self, numbers: Gemma4Vision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._heads, self._eps = numbers.num_attention_heads, numbers.eps
        self.kernel: Kernel = attend
        size, width = numbers.hidden_size, self._heads * numbers.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            _Projection(numbers, size, width) for _ in range(3)
        )
        self.o_proj = _Projection(numbers, width, size)
        self.q_norm = RMSNorm(numbers.head_dim, eps=numbers.eps)
        self.k_norm = RMSNorm(numbers.head_dim, eps=numbers.eps)

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        """Return queries and keys, rotated, and values, (3, heads, patches, size)."""
        parts = [
            each(x).reshape(len(x), self._heads, -1)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        ]
        turned = [
            _rotate(norm(part).swapaxes(0, 1), angles)
            for norm, part in zip((self.q_norm, self.k_norm), parts[:2], strict=True)
        ]
        return mx.stack([*turned, mx.fast.rms_norm(parts[2], None, self._eps).swapaxes(0, 1)])

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        attended = self.kernel(queries, keys, values)
        output: mx.array = self.o_proj(attended.swapaxes(0, 1).reshape(queries.shape[1], -1))
        return output


def _rotate(x: mx.array, angles: Angles) -> mx.array:
    """Rotate the first half of each head by column, and the second by row."""
    cosines, sines = angles
    parts = []
    for i, part in enumerate(mx.split(x.astype(mx.float32), 2, axis=-1)):
        first, second = mx.split(part, 2, axis=-1)
        cosine, sine = cosines[:, i], sines[:, i]
        parts += [first * cosine - second * sine, second * cosine + first * sine]
    return mx.concatenate(parts, axis=-1).astype(x.dtype)


class _Mlp(Module):
    def __init__(self, numbers: Gemma4Vision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, inner = numbers.hidden_size, numbers.intermediate_size
        self.activation: Callable[[mx.array], mx.array] = gelu_approx
        self.gate_proj, self.up_proj = (_Projection(numbers, size, inner) for _ in range(2))
        self.down_proj = _Projection(numbers, inner, size)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return output


class _Layer(Module):
    def __init__(self, numbers: Gemma4Vision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        norms = (RMSNorm(numbers.hidden_size, eps=numbers.eps) for _ in range(4))
        self.input_layernorm, self.post_attention_layernorm = next(norms), next(norms)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms
        self.self_attn = _Attention(numbers)
        self.mlp = _Mlp(numbers)

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        return self.self_attn.project(self.input_layernorm(x), angles)

    def attend(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn.attend(queries, keys, values))
        output = self.mlp(self.pre_feedforward_layernorm(x))
        added: mx.array = self.post_feedforward_layernorm(output)
        return x + added


class _Embedder(Module):
    def __init__(self, numbers: Gemma4Vision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = numbers.hidden_size
        self.input_proj = Linear(CHANNELS * numbers.patch_size**2, size, bias=False)
        self.position_embedding_table = mx.zeros((2, numbers.position_embedding_size, size))

    def __call__(self, patches: mx.array, rows: mx.array, columns: mx.array) -> mx.array:
        across, below = self.position_embedding_table
        in_pixels = patches.reshape(len(patches), CHANNELS, -1).swapaxes(1, 2)
        values = (2 * (in_pixels - 0.5)).astype(across.dtype).reshape(len(patches), -1)
        embedded: mx.array = self.input_proj(values) + (across[columns] + below[rows])
        return embedded


class _Encoder(Module):
    def __init__(self, numbers: Gemma4Vision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [_Layer(numbers) for _ in range(numbers.depth)]


class _Output(Module):
    def __init__(self, numbers: Gemma4Vision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding_projection = Linear(numbers.hidden_size, numbers.output, bias=False)


class Gemma4Tower(PartedTower):
    """A tower with its weights, which encodes one image at a time."""

    depth = 1

    def __init__(self, numbers: Gemma4Vision) -> None:
        super().__init__(numbers.num_attention_heads, numbers.pooling_kernel_size**2)
        self.numbers = numbers
        self.patch_embedder = _Embedder(numbers)
        self.encoder = _Encoder(numbers)
        self.embed_vision = _Output(numbers)
        if numbers.standardize:
            self.std_bias = mx.zeros((numbers.hidden_size,))
            self.std_scale = mx.zeros((numbers.hidden_size,))

    def check_fit(self, patches: Any, decoder: Mapping[str, Any]) -> None:
        """Raises ValueError for image settings or a decoder's config that don't fit."""
        numbers, merge = self.numbers, patches.merge
        if (patches.patch, merge) != (numbers.patch_size, numbers.pooling_kernel_size):
            raise ValueError("the patches of vision_config are not those of the image processor")
        if SOFT_TOKENS[-1] * merge > numbers.position_embedding_size:
            raise ValueError("position_embedding_size of vision_config is too small for images")

    def compute_on_cpu(self) -> None:
        """Use the functions for float32 on a CPU, where mlx computes exp and tanh slowly."""
        for layer in self.encoder.layers:
            layer.self_attn.kernel, layer.mlp.activation = attend_by_numpy, gelu_by_numpy

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1, decoder's hidden size), in steps.

        `patches`, (patches, values), are ordered by token.
        """
        numbers = self.numbers
        found = places(grid, numbers.pooling_kernel_size)
        rows, columns = (mx.array(each.astype(np.int32)) for each in found)
        half = numbers.head_dim // 2
        frequencies = 1.0 / numbers.theta ** (mx.arange(0, half, 2) / half)
        turns = mx.stack([columns, rows], axis=1)[..., None] * frequencies
        angles = mx.cos(turns), mx.sin(turns)  # (patches, 2, a quarter of a head)

        def embed(part: slice) -> mx.array:
            embedded: mx.array = self.patch_embedder(patches[part], rows[part], columns[part])
            return embedded

        def pool(x: mx.array) -> mx.array:
            tokens = x.reshape(-1, self._merged, x.shape[-1]).astype(mx.float32)
            pooled = tokens.mean(axis=1).astype(x.dtype).astype(mx.float32)
            pooled = pooled * numbers.hidden_size**0.5
            if numbers.standardize:
                pooled = (pooled - self.std_bias) * self.std_scale
            normed = mx.fast.rms_norm(pooled.astype(x.dtype), None, numbers.eps)
            projected: mx.array = self.embed_vision.embedding_projection(normed)
            return projected

        return self._encode_tokens(len(patches), embed, self.encoder.layers, angles, pool)

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that an image's token takes while it is encoded and read."""
        numbers = self.numbers
        width = max(numbers.hidden_size, numbers.num_attention_heads * numbers.head_dim)
        return self.dtype.size * (width * self._merged * HELD + numbers.output)

    @property
    def dtype(self) -> mx.Dtype:
        return self.patch_embedder.position_embedding_table.dtype
