"""The vision tower of Pixtral, Mistral 3 and Ministral 3, and their projector.

Source: transformers' `PixtralVisionModel`, `Mistral3MultiModalProjector` and
`LlavaMultiModalProjector`, with the same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, gelu_approx, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from gateway.engine.models.counts import MOST_WIDTH
from gateway.engine.models.encoder_kernels import (
    Activation,
    attend_by_numpy,
    gelu_by_numpy,
    silu_by_numpy,
)
from gateway.engine.vision.parts import (
    HELD,
    Angles,
    GatedMlp,
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

_EPS: Final = 1e-5
_SIZES: Final = frozenset(
    {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"num_channels", "patch_size"}
)
_TEXT_TYPES: Final = ("mistral", "ministral3", "llama")
# Activations by their names in config.json, and those for float32 on a CPU.
_ACTIVATIONS: Final[dict[str, tuple[Activation, Activation]]] = {
    "silu": (silu, silu_by_numpy),
    "gelu": (gelu, gelu),
    "gelu_pytorch_tanh": (gelu_approx, gelu_by_numpy),
}


@dataclass(frozen=True, slots=True)
class PixtralVision:
    """The settings of the tower and the projector in config.json."""

    layers: ClassVar = "transformer.layers."  # begins the names of layers' arrays

    out_hidden_size: int  # the decoder's
    hidden_size: int = 1024  # transformers' defaults
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = CHANNELS
    patch_size: int = 16
    merge: int = 1  # patches per side of a token
    hidden_act: str = "gelu"
    theta: float = 10000.0
    eps: float | None = None  # the epsilon of Mistral 3's projector; None without a norm
    has_bias: bool = True  # in the projector

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "PixtralVision":
        """Read the settings. Raises KeyError, TypeError and ValueError."""
        vision, text, kind = config["vision_config"], config["text_config"], config["model_type"]
        for name, only, default in (
            ("projector_hidden_act", "gelu", "gelu"),
            ("vision_feature_layer", -1, -2 if kind == "llava" else -1),
            ("vision_feature_select_strategy", "full", "default" if kind == "llava" else "full"),
        ):
            if config.get(name, default) != only:
                raise ValueError(f"{name} is {config.get(name, default)!r:.40}, not {only!r}")
        if text.get("model_type", "mistral") not in _TEXT_TYPES:
            raise ValueError(f"text_config has the model_type {text['model_type']!r:.40}")
        rope = vision.get("rope_parameters") or vision
        is_merging = kind == "mistral3"
        numbers = cls(
            out_hidden_size=int(text["hidden_size"]),
            **{name: int(vision[name]) for name in _SIZES & vision.keys()},
            merge=int(config.get("spatial_merge_size", 2)) if is_merging else 1,
            hidden_act=str(vision.get("hidden_act", "gelu")),
            theta=float(rope.get("rope_theta", 10000.0)),
            eps=float(text["rms_norm_eps"]) if is_merging else None,
            has_bias=bool(config.get("multimodal_projector_bias", not is_merging)),
        )
        if min(numbers.merge, *(getattr(numbers, name) for name in _SIZES)) < 1:
            raise ValueError("a size of vision_config is below 1")
        if numbers.hidden_size % (4 * numbers.num_attention_heads):
            raise ValueError("hidden_size of vision_config is no multiple of 4 × its heads")
        if max(numbers.patch_numbers, numbers.token_numbers) > MOST_WIDTH:
            raise ValueError("patch_size or spatial_merge_size is too large")
        if numbers.hidden_act not in _ACTIVATIONS:
            raise ValueError(f"hidden_act {numbers.hidden_act!r:.40} of vision_config is unknown")
        return numbers

    def arrange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return a tower's arrays with the projection of patches as a matrix."""
        name, products = "patch_conv.weight", dict(arrays)
        projection = products.get(name)
        # (hidden, channels, rows, columns), but mlx-vlm has channels last.
        if projection is not None and projection.ndim == 4:
            if projection.shape[1] != self.num_channels:
                projection = projection.transpose(0, 3, 1, 2)
            products[name] = projection.reshape(len(projection), -1)
        return products

    def open(self) -> "PixtralTower":
        return PixtralTower(self)

    @property
    def depth(self) -> int:
        return self.num_hidden_layers

    @property
    def patch_numbers(self) -> int:
        return self.num_channels * self.patch_size**2

    @property
    def token_numbers(self) -> int:
        return self.hidden_size * self.merge**2


class _Attention(Module):
    def __init__(self, numbers: PixtralVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._heads = numbers.num_attention_heads
        self.kernel: Kernel = attend
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, Linear(numbers.hidden_size, numbers.hidden_size, bias=False))


class _Layer(Module):
    def __init__(self, numbers: PixtralVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, inner = numbers.hidden_size, numbers.intermediate_size
        activation = _ACTIVATIONS[numbers.hidden_act][0]
        self.attention_norm, self.ffn_norm = RMSNorm(size, eps=_EPS), RMSNorm(size, eps=_EPS)
        self.attention = _Attention(numbers)
        self.feed_forward = GatedMlp(size, inner, bias=False, activation=activation)

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        own, x = self.attention, self.attention_norm(x)
        projected = mx.stack([own.q_proj(x), own.k_proj(x), own.v_proj(x)])
        heads = projected.reshape(3, len(x), own._heads, -1).transpose(0, 2, 1, 3)
        return rotate(heads, angles)

    def attend(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        attended = attend_in(self.attention.kernel, queries, keys, values, window)
        x = x + self.attention.o_proj(attended)
        output: mx.array = x + self.feed_forward(self.ffn_norm(x))
        return output


class _Transformer(Module):
    def __init__(self, numbers: PixtralVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [_Layer(numbers) for _ in range(numbers.depth)]


class _PatchMerger(Module):
    def __init__(self, numbers: PixtralVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.merging_layer = Linear(numbers.token_numbers, numbers.hidden_size, bias=False)


class _Projector(Module):
    def __init__(self, numbers: PixtralVision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, out, self._merged = numbers.hidden_size, numbers.out_hidden_size, numbers.merge**2
        if numbers.eps is not None:
            self.norm = RMSNorm(size, eps=numbers.eps)
            self.patch_merger = _PatchMerger(numbers)
        self.linear_1 = Linear(size, out, bias=numbers.has_bias)
        self.linear_2 = Linear(out, out, bias=numbers.has_bias)

    def __call__(self, x: mx.array) -> mx.array:
        if "norm" in self:
            # A number of all patches of a token comes before the next number.
            x = self.norm(x).reshape(-1, self._merged, x.shape[-1]).swapaxes(1, 2)
            x = self.patch_merger.merging_layer(x.reshape(len(x), -1))
        features: mx.array = self.linear_2(gelu(self.linear_1(x)))
        return features


class PixtralTower(PartedTower):
    """A tower and its projector with their weights, which encode one image at a time."""

    depth = 1

    def __init__(self, numbers: PixtralVision) -> None:
        super().__init__(numbers.num_attention_heads, numbers.merge**2)
        self.numbers = numbers
        # The convolution over whole patches is one matrix product.
        self.patch_conv = Linear(numbers.patch_numbers, numbers.hidden_size, bias=False)
        self.ln_pre = RMSNorm(numbers.hidden_size, eps=_EPS)
        self.transformer = _Transformer(numbers)
        self.multi_modal_projector = _Projector(numbers)

    def check_fit(self, patches: Any, decoder: Mapping[str, Any]) -> None:
        """Raises ValueError for image settings that don't fit."""
        numbers = self.numbers
        for name, own, other in (
            ("patch_size", numbers.patch_size, patches.patch),
            ("spatial_merge_size", numbers.merge, patches.merge),
            ("num_channels", numbers.num_channels, CHANNELS),
        ):
            if own != other:
                raise ValueError(f"{name} of config.json is {own}, and other parts have {other}")

    def compute_on_cpu(self) -> None:
        """Use the functions for float32 on a CPU, where mlx computes exp and tanh slowly."""
        for layer in self.transformer.layers:
            layer.attention.kernel = attend_by_numpy
            layer.feed_forward.activation = _ACTIVATIONS[self.numbers.hidden_act][1]

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        """Return an image's features, (tokens, 1, decoder's hidden size), in steps.

        `patches`, (patches, values), are ordered by token.
        """
        numbers = self.numbers
        half = numbers.hidden_size // numbers.num_attention_heads // 2
        exponents = np.arange(half).reshape(-1, 2).T / half  # rows' frequencies, and columns'
        where = np.stack(places(grid, numbers.merge))[..., None]
        turns = mx.array((where * numbers.theta ** -exponents[:, None]).astype(np.float32))
        turns = mx.concatenate([*turns], axis=-1)
        angles = mx.cos(turns), mx.sin(turns)
        dtype = self.dtype

        def embed(part: slice) -> mx.array:
            embedded: mx.array = self.ln_pre(self.patch_conv(patches[part].astype(dtype)))
            return embedded

        layers, project = self.transformer.layers, self.multi_modal_projector
        return self._encode_tokens(len(patches), embed, layers, angles, project)

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that an image's token takes while it is encoded and read."""
        return self.dtype.size * (self.numbers.token_numbers * HELD + self.numbers.out_hidden_size)

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.ln_pre.weight.dtype
        return dtype
