"""The ModernBERT encoder, without its heads.

Source: transformers, models/modernbert/modeling_modernbert.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from gateway.engine.device import Device, pick_dtype
from gateway.engine.embedding.bert import (
    Dense,
    Norm,
    arrays_of,
    make_dense,
    make_norm,
    read_activation,
)
from gateway.engine.models.checkpoint import (
    Checkpoint,
    dequantize,
    fit_weights,
)
from gateway.engine.models.counts import MOST_LAYERS, MOST_POSITIONS, read_count
from gateway.engine.models.encoder_kernels import (
    PADDING_SCORE,
    Activation,
    Arithmetic,
    Attention,
    Rotation,
    arithmetic,
    make_rotation,
)

# Queries of a block; a larger block computes more masked scores.
BLOCK: Final = 128
# PADDING_SCORE would be -inf in float16, and a row of -inf becomes NaN.
HALF_PADDING_SCORE: Final = -3e4
# Ignored weights: the heads of task models.
IGNORED: Final = ("head.", "decoder.", "classifier.")


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """The settings in config.json that affect results."""

    vocabulary: int
    dimensions: int
    heads: int
    intermediate: int
    positions: int
    padding_id: int
    epsilon: float
    activation: str
    # Each layer's largest distance between tokens that see each other, or None.
    windows: Sequence[int | None]
    thetas: Sequence[float]  # bases of the layers' rotations
    quantization: Mapping[str, Any]


def read_config(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> ModernBertConfig:
    unsupported = ("attention_bias", "mlp_bias", "norm_bias", "is_causal")
    activation = read_activation(checkpoint, raw, "hidden_activation", unsupported)
    with checkpoint.reading_config():
        are_local = _local_layers(raw)
        window = int(raw.get("local_attention", 128)) // 2
        thetas = _thetas(checkpoint, raw)
        config = ModernBertConfig(
            vocabulary=int(raw["vocab_size"]),
            dimensions=int(raw["hidden_size"]),
            heads=int(raw["num_attention_heads"]),
            intermediate=int(raw["intermediate_size"]),
            positions=read_count(raw, "max_position_embeddings", MOST_POSITIONS),
            padding_id=read_count(raw, "pad_token_id", int(raw["vocab_size"]) - 1),
            epsilon=float(raw.get("norm_eps", 1e-5)),
            activation=activation,
            windows=[window if is_local else None for is_local in are_local],
            thetas=[thetas[is_local] for is_local in are_local],
            quantization=dict(raw.get("quantization") or {}),
        )
    if config.heads < 1 or config.dimensions % (2 * config.heads):
        raise checkpoint.failed("config.json: hidden_size / num_attention_heads is not even")
    return config


def _local_layers(raw: Mapping[str, Any]) -> list[bool]:
    layers = read_count(raw, "num_hidden_layers", MOST_LAYERS)
    types = raw.get("layer_types")
    if types:
        known = {"full_attention": False, "sliding_attention": True}
        return [known[kind] for kind in types[:layers]]
    interval = int(raw.get("global_attn_every_n_layers", 3))
    return [index % interval != 0 for index in range(layers)]


def _thetas(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bases of the rotations in global and in local layers."""
    rope_parameters = raw.get("rope_parameters") or {}
    full, local = (
        rope_parameters.get("full_attention") or {},
        rope_parameters.get("sliding_attention") or {},
    )
    for rope in (full, local, raw.get("rope_scaling") or {}):
        kind = rope.get("rope_type", "default")
        if kind != "default":
            raise checkpoint.failed(f"config.json: rope_type `{kind}` is not supported")
    whole = float(full.get("rope_theta") or raw.get("global_rope_theta") or 160_000.0)
    return whole, float(local.get("rope_theta") or raw.get("local_rope_theta") or 10_000.0)


def weight_shapes(config: ModernBertConfig) -> dict[str, tuple[int, ...]]:
    d, i = config.dimensions, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.tok_embeddings.weight": (config.vocabulary, d),
        "embeddings.norm.weight": (d,),
        "final_norm.weight": (d,),
    }
    for index in range(len(config.windows)):
        layer = f"layers.{index}."
        if index:
            shapes[f"{layer}attn_norm.weight"] = (d,)
        shapes[f"{layer}attn.Wqkv.weight"] = (3 * d, d)
        shapes[f"{layer}attn.Wo.weight"] = (d, d)
        shapes[f"{layer}mlp_norm.weight"] = (d,)
        shapes[f"{layer}mlp.Wi.weight"] = (2 * i, d)
        shapes[f"{layer}mlp.Wo.weight"] = (d, i)
    return shapes


@dataclass(frozen=True, slots=True)
class Span:
    """A block of queries, the keys that they see, and the bias of the scores."""

    queries: slice
    keys: slice
    bias: mx.array | None


def make_spans(
    length: int, mask: mx.array | None, window: int | None, block: int, dtype: mx.Dtype
) -> list[Span]:
    """Divide a row's queries into blocks, and leave out keys outside the window."""
    # Source: transformers, masking_utils.py, sliding_window_bidirectional_overlay.
    masked_score = HALF_PADDING_SCORE if dtype == mx.float16 else PADDING_SCORE
    spans = []
    for start in range(0, length, block):
        end, low, high = min(start + block, length), 0, length
        seen = None if mask is None else mask[:, None, None, :]
        if window is not None and length > window + 1:
            low, high = max(0, start - window), min(length, end + window)
            distance = mx.abs(mx.arange(start, end)[:, None] - mx.arange(low, high)[None])
            near = (distance <= window)[None, None]
            seen = near if seen is None else near & seen[..., low:high]
        bias = None if seen is None else mx.where(seen, 0.0, masked_score).astype(dtype)
        spans.append(Span(slice(start, end), slice(low, high), bias))
    return spans


@dataclass(frozen=True, slots=True)
class ModernBertLayer:
    """One ModernBERT layer: attention, then a gated product, each after a norm."""

    attention_norm: Norm | None  # None in the first layer
    qkv: Dense
    attention_out: Dense
    norm: Norm
    up: Dense
    gate: Dense
    down: Dense
    heads: int
    attend: Attention
    activation: Activation

    def __call__(self, x: mx.array, rows: int, rotate: Rotation, spans: Sequence[Span]) -> mx.array:
        """Map (rows * tokens, dimensions) to the same shape."""
        flat, width = x.shape
        read = x if self.attention_norm is None else self.attention_norm(x)
        split = self.qkv(read).reshape(rows, flat // rows, 3, self.heads, width // self.heads)
        qkv = mx.contiguous(split.transpose(2, 0, 3, 1, 4))
        q, k, v = rotate(qkv[0]), rotate(qkv[1]), qkv[2]
        parts = [
            self.attend(q[:, :, span.queries], k[:, :, span.keys], v[:, :, span.keys], span.bias)
            for span in spans
        ]
        mixed = mx.concatenate(parts, axis=2)
        x = x + self.attention_out(mixed.transpose(0, 2, 1, 3).reshape(flat, width))
        read = self.norm(x)
        return x + self.down(self.activation(self.up(read)) * self.gate(read))


def make_layer(
    weights: Mapping[str, mx.array], choice: Arithmetic, heads: int, epsilon: float
) -> ModernBertLayer:
    """Make a layer from its weights, named without the prefix `layers.N.`."""
    attention_norm = None
    if "attn_norm.weight" in weights:
        attention_norm = make_norm(weights, "attn_norm", choice, epsilon)
    q, k, v = mx.split(weights["attn.Wqkv.weight"], 3)
    up, gate = mx.split(weights["mlp.Wi.weight"], 2)
    return ModernBertLayer(
        attention_norm=attention_norm,
        qkv=Dense(mx.concatenate([q * choice.query_scale, k, v]).T, None),
        attention_out=make_dense(weights, "attn.Wo"),
        norm=make_norm(weights, "mlp_norm", choice, epsilon),
        up=Dense(up.T, None),
        gate=Dense(gate.T, None),
        down=make_dense(weights, "mlp.Wo"),
        heads=heads,
        attend=choice.attend,
        activation=choice.activation,
    )


class ModernBert:
    """The ModernBERT encoder: (rows, tokens) ids to (rows, tokens, dimensions) hidden states."""

    def __init__(
        self, checkpoint: Checkpoint, raw: Mapping[str, Any], device: Device, dtype: str | None
    ) -> None:
        config = read_config(checkpoint, raw)
        packed = dequantize(checkpoint, checkpoint.weights(), config.quantization)
        arrays = {name.removeprefix("model."): array for name, array in packed.items()}
        weights = fit_weights(checkpoint, arrays, weight_shapes(config), IGNORED)
        weights_dtype = pick_dtype(device, dtype, weights["embeddings.tok_embeddings.weight"].dtype)
        weights = {name: array.astype(weights_dtype) for name, array in weights.items()}
        choice = arithmetic(
            device, weights_dtype, config.activation, config.dimensions, config.heads
        )
        self.config = config
        self.dimensions = config.dimensions
        self.vocabulary = config.vocabulary
        self.padding_id = config.padding_id
        self.max_tokens = config.positions
        self._dtype = weights_dtype
        self.words = weights["embeddings.tok_embeddings.weight"]
        self._norms = [
            make_norm(weights, name, choice, config.epsilon)
            for name in ("embeddings.norm", "final_norm")
        ]
        self._layers = [
            make_layer(
                {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)},
                choice,
                config.heads,
                config.epsilon,
            )
            for prefix in (f"layers.{index}." for index in range(len(config.windows)))
        ]
        size = config.dimensions // config.heads
        self._rotations = {
            theta: make_rotation(device, theta, size, config.positions)
            for theta in set(config.thetas)
        }

    @staticmethod
    def read_max_tokens(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> int:
        return read_config(checkpoint, raw).positions

    def __call__(
        self, tokens: mx.array, mask: mx.array | None, types: mx.array | None = None
    ) -> Iterator[mx.array]:
        rows, length = tokens.shape
        shape = (rows, length, self.dimensions)
        spans = {window: self._spans(length, mask, window) for window in set(self.config.windows)}
        first, last = self._norms
        x = first(self.words[tokens].reshape(rows * length, self.dimensions))
        yield x.reshape(shape)
        layers = zip(self._layers, self.config.thetas, self.config.windows, strict=True)
        for layer, theta, window in layers:
            x = layer(x, rows, self._rotations[theta], spans[window])
            yield x.reshape(shape)
        yield last(x).reshape(shape)

    def parameters(self) -> list[mx.array]:
        return arrays_of([self.words, self._norms, self._layers])

    def _spans(self, length: int, mask: mx.array | None, window: int | None) -> list[Span]:
        block = length if window is None else BLOCK
        return make_spans(length, mask, window, block, self._dtype)
