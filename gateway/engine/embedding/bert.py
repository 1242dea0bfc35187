"""The BERT and RoBERTa encoders, without pooler and task heads.

Source: transformers, models/bert/modeling_bert.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import mlx.core as mx

from gateway.engine.device import Device, clear_cache, cpu_threads, pick_dtype
from gateway.engine.embedding.packed import (
    Kernels,
    NormInPlace,
    PackedLayer,
    PackedLayers,
    find_kernels,
    pack_dense,
)
from gateway.engine.models.checkpoint import (
    Checkpoint,
    dequantize,
    fit_weights,
)
from gateway.engine.models.counts import MOST_LAYERS, MOST_POSITIONS, read_count
from gateway.engine.models.encoder_kernels import (
    ACTIVATIONS,
    PADDING_SCORE,
    Activation,
    Arithmetic,
    Attention,
    Normalization,
    Rotation,
    arithmetic,
    make_rotation,
)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer."""

    # (inputs, outputs): a transposed view. With a copy, OpenBLAS for AVX-512 takes 3 times as long.
    weight: mx.array
    bias: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.weight
        return mx.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalization."""

    weight: mx.array
    bias: mx.array | None
    epsilon: float
    normalize: Normalization

    def __call__(self, x: mx.array) -> mx.array:
        return self.normalize(x, self.weight, self.bias, self.epsilon)


def arrays_of(part: object) -> list[mx.array]:
    """List every array of a part, which may be a layer, a list or an array."""
    if isinstance(part, mx.array):
        return [part]
    children: Sequence[object] = ()
    if isinstance(part, list):
        children = part
    elif is_dataclass(part):
        children = [getattr(part, field.name) for field in fields(part)]
    return [array for child in children for array in arrays_of(child)]


@dataclass(frozen=True, slots=True)
class BertLayer:
    """One BERT layer: attention, then two products with an activation between them."""

    qkv: Dense
    attention_out: Dense
    attention_norm: Norm
    up: Dense
    down: Dense
    norm: Norm
    heads: int
    attend: Attention
    activation: Activation
    gate: Dense | None = None  # if set, activation(gate(x)) multiplies up(x)
    rotate: Rotation | None = None

    def __call__(self, x: mx.array, bias: mx.array | None, rows: int) -> mx.array:
        """Map (rows * tokens, dimensions) to the same shape."""
        flat, width = x.shape
        # One copy here is faster than a copy of each view.
        split = self.qkv(x).reshape(rows, flat // rows, 3, self.heads, width // self.heads)
        q, k, v = mx.contiguous(split.transpose(2, 0, 3, 1, 4))
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        mixed = self.attend(q, k, v, bias).transpose(0, 2, 1, 3).reshape(flat, width)
        x = self.attention_norm(x + self.attention_out(mixed))
        if self.gate is None:
            return self.norm(x + self.down(self.activation(self.up(x))))
        return self.norm(x + self.down(self.activation(self.gate(x)) * self.up(x)))


def make_dense(weights: Mapping[str, mx.array], name: str) -> Dense:
    return Dense(weights[f"{name}.weight"].T, weights.get(f"{name}.bias"))


def make_norm(
    weights: Mapping[str, mx.array], name: str, choice: Arithmetic, epsilon: float
) -> Norm:
    return Norm(weights[f"{name}.weight"], weights.get(f"{name}.bias"), epsilon, choice.normalize)


def make_layer(
    weights: Mapping[str, mx.array],
    choice: Arithmetic,
    heads: int,
    epsilon: float,
    rotate: Rotation | None = None,
) -> BertLayer:
    """Make a layer from its weights, named without the prefix `encoder.layer.N.`."""

    scales = {"query": choice.query_scale, "key": 1.0, "value": 1.0}
    qkv = {
        f"qkv.{part}": mx.concatenate(
            [weights[f"attention.self.{n}.{part}"] * s for n, s in scales.items()]
        )
        for part in ("weight", "bias")
        if f"attention.self.query.{part}" in weights
    }
    is_gated = "intermediate.gate.weight" in weights
    return BertLayer(
        qkv=make_dense(qkv, "qkv"),
        attention_out=make_dense(weights, "attention.output.dense"),
        attention_norm=make_norm(weights, "attention.output.LayerNorm", choice, epsilon),
        up=make_dense(weights, "intermediate.dense"),
        down=make_dense(weights, "output.dense"),
        norm=make_norm(weights, "output.LayerNorm", choice, epsilon),
        heads=heads,
        attend=choice.attend,
        activation=choice.activation,
        gate=make_dense(weights, "intermediate.gate") if is_gated else None,
        rotate=rotate,
    )


def pack_layer(layer: BertLayer, kernels: Kernels) -> PackedLayer:
    """Pack the weights of a layer with GELU, without gate and rotation. Must run on the lane."""
    qkv, attention_out, up, down = (
        pack_dense(dense.weight, dense.bias, kernels)
        for dense in (layer.qkv, layer.attention_out, layer.up, layer.down)
    )
    attention_norm, norm = (
        NormInPlace(each.weight, each.bias, each.epsilon)
        for each in (layer.attention_norm, layer.norm)
    )
    packed = PackedLayer(qkv, attention_out, attention_norm, up, down, norm, layer.heads)
    mx.eval(arrays_of(packed))  # the threads that read them cannot compute them
    return packed


# More are not measured: OpenBLAS divides a short text between its threads, packed layers do not.
MOST_THREADS: Final = 2
POSITIONS: Final = "embeddings.position_embeddings.weight"
TYPES: Final = "embeddings.token_type_embeddings.weight"
# Ignored weights: buffers, and the heads of task models.
IGNORED: Final = (
    "embeddings.position_ids",
    "embeddings.token_type_ids",
    "pooler.",
    "cls.",
    "lm_head.",
    "classifier.",
    "linear.",
)


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The settings in config.json that affect results."""

    vocabulary: int
    dimensions: int
    layers: int
    heads: int
    intermediate: int
    positions: int
    token_types: int
    padding_id: int
    epsilon: float
    activation: str
    quantization: Mapping[str, Any]
    # None if positions are embeddings, not rotations.
    theta: float | None = None
    factor: float = 1.0  # divides positions before the rotation
    is_gated: bool = False
    unbiased: tuple[str, ...] = ()  # prefixes of linear layers without a bias


def modern_name(name: str) -> str:
    # Checkpoints from before 2019, such as bert-base-uncased, name these weights differently.
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(f"LayerNorm{old}"):
            return name.removesuffix(old) + new
    return name


def read_config(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> BertConfig:
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise checkpoint.failed(f"config.json: position_embedding_type `{kind}` is not supported")
    activation = read_activation(checkpoint, raw, "hidden_act", ("is_decoder", "is_causal"))
    with checkpoint.reading_config():
        config = BertConfig(
            vocabulary=int(raw["vocab_size"]),
            dimensions=int(raw["hidden_size"]),
            layers=read_count(raw, "num_hidden_layers", MOST_LAYERS),
            heads=int(raw["num_attention_heads"]),
            intermediate=int(raw["intermediate_size"]),
            positions=read_count(raw, "max_position_embeddings", MOST_POSITIONS),
            token_types=int(raw["type_vocab_size"]),
            padding_id=read_count(raw, "pad_token_id", int(raw["vocab_size"]) - 1),
            epsilon=float(raw.get("layer_norm_eps", 1e-12)),
            activation=activation,
            quantization=dict(raw.get("quantization") or {}),
        )
    if config.heads < 1 or config.dimensions % config.heads:
        raise checkpoint.failed("config.json: hidden_size is no multiple of num_attention_heads")
    return config


def read_activation(
    checkpoint: Checkpoint, raw: Mapping[str, Any], key: str, unsupported: Sequence[str] = ()
) -> str:
    for name in unsupported:
        if raw.get(name):
            raise checkpoint.failed(f"config.json: {name} is not supported for this architecture")
    activation: str = raw.get(key, "gelu")
    if activation not in ACTIVATIONS:
        raise checkpoint.failed(
            f"config.json: {key} `{activation}` is none of {', '.join(ACTIVATIONS)}"
        )
    return activation


def weight_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    d, i = config.dimensions, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocabulary, d),
        "embeddings.LayerNorm.weight": (d,),
        "embeddings.LayerNorm.bias": (d,),
    }
    if config.theta is None:
        shapes[POSITIONS] = (config.positions, d)
    if config.token_types:
        shapes[TYPES] = (config.token_types, d)
    products = {
        "attention.self.query": (d, d),
        "attention.self.key": (d, d),
        "attention.self.value": (d, d),
        "attention.output.dense": (d, d),
        "intermediate.dense": (i, d),
        "output.dense": (d, i),
    }
    if config.is_gated:
        products["intermediate.gate"] = (i, d)
    for index in range(config.layers):
        layer = f"encoder.layer.{index}."
        for name, (rows, columns) in products.items():
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if not name.startswith(config.unbiased):
                shapes[f"{layer}{name}.bias"] = (rows,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{layer}{name}.weight"] = shapes[f"{layer}{name}.bias"] = (d,)
    return shapes


class Bert:
    """The BERT encoder: (rows, tokens) ids to (rows, tokens, dimensions) hidden states."""

    prefix = "bert."

    def __init__(
        self, checkpoint: Checkpoint, raw: Mapping[str, Any], device: Device, dtype: str | None
    ) -> None:
        config = self._read_config(checkpoint, raw)
        packed = dequantize(checkpoint, checkpoint.weights(), config.quantization)
        arrays = self._bert_names(packed)
        weights = fit_weights(checkpoint, arrays, weight_shapes(config), IGNORED)
        weights_dtype = pick_dtype(
            device, dtype, weights["embeddings.word_embeddings.weight"].dtype
        )
        weights = {name: array.astype(weights_dtype) for name, array in weights.items()}
        choice = arithmetic(
            device, weights_dtype, config.activation, config.dimensions, config.heads
        )
        self.config = config
        self.dimensions = config.dimensions
        self.vocabulary = config.vocabulary
        self.padding_id = config.padding_id
        self.max_tokens = self._max_tokens(config)
        self._dtype = weights_dtype
        self.words = weights["embeddings.word_embeddings.weight"]
        none = mx.zeros((1, config.dimensions), weights_dtype)
        types = weights.get(TYPES, none)
        # Most tokens have type 0, so its vector is added to all positions in advance.
        self._positions = weights.get(POSITIONS, none) + types[0]
        self._second = types[1] - types[0] if config.token_types > 1 else None
        self._norm = make_norm(weights, "embeddings.LayerNorm", choice, config.epsilon)
        rotate = None
        if config.theta is not None:
            size = config.dimensions // config.heads
            rotate = make_rotation(device, config.theta, size, config.positions, config.factor)
        self._layers = [
            make_layer(
                {name.removeprefix(prefix): w for name, w in weights.items() if prefix in name},
                choice,
                config.heads,
                config.epsilon,
                rotate,
            )
            for prefix in (f"encoder.layer.{index}." for index in range(config.layers))
        ]
        is_plain = config.activation == "gelu" and rotate is None and not config.is_gated
        is_here = device is Device.CPU and cpu_threads() <= MOST_THREADS
        is_packed = is_here and is_plain and weights_dtype == mx.float32
        self._kernels = find_kernels() if is_packed else None
        self._packed = PackedLayers(cpu_threads())  # all layers, or none

    def __call__(
        self, tokens: mx.array, mask: mx.array | None, types: mx.array | None = None
    ) -> Iterator[mx.array]:
        rows, length = tokens.shape
        shape = (rows, length, self.dimensions)
        bias = None
        if mask is not None:
            bias = mx.where(mask, 0.0, PADDING_SCORE)[:, None, None, :].astype(self._dtype)
        x = self.words[tokens] + self._position_vectors(tokens)
        if types is not None and self._second is not None:
            x = x + types[..., None].astype(self._dtype) * self._second
        x = self._norm(x.reshape(rows * length, self.dimensions))
        yield x.reshape(shape)
        if self._packed.layers:
            yield from (state.reshape(shape) for state in self._packed(x, bias, rows))
            return
        for layer in self._layers:
            x = layer(x, bias, rows)
            yield x.reshape(shape)

    def pack_in_steps(self) -> Iterator[None]:
        """Pack the weights, one layer per step, if there are kernels. Must run on the lane."""
        while self._kernels is not None and self._layers:
            self._packed.layers.append(pack_layer(self._layers.pop(0), self._kernels))
            clear_cache()  # frees the weights that were packed
            yield

    def parameters(self) -> list[mx.array]:
        parts = [self.words, self._positions, self._second, self._norm]
        return arrays_of([*parts, *self._layers, *self._packed.layers])

    def _position_vectors(self, tokens: mx.array) -> mx.array:
        return self._positions[: tokens.shape[1]]

    @classmethod
    def read_max_tokens(cls, checkpoint: Checkpoint, raw: Mapping[str, Any]) -> int:
        return cls._max_tokens(cls._read_config(checkpoint, raw))

    @staticmethod
    def _max_tokens(config: BertConfig) -> int:
        return config.positions

    @classmethod
    def _read_config(cls, checkpoint: Checkpoint, raw: Mapping[str, Any]) -> BertConfig:
        return read_config(checkpoint, raw)

    @classmethod
    def _bert_names(cls, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {modern_name(name.removeprefix(cls.prefix)): a for name, a in arrays.items()}


class Roberta(Bert):
    """RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions start after the padding id.

    Source: transformers, models/roberta/modeling_roberta.py, create_position_ids_from_input_ids.
    """

    prefix = "roberta."

    def _position_vectors(self, tokens: mx.array) -> mx.array:
        return self._positions[position_ids(tokens, self.padding_id)]

    @staticmethod
    def _max_tokens(config: BertConfig) -> int:
        return config.positions - config.padding_id - 1


def position_ids(tokens: mx.array, padding_id: int) -> mx.array:
    """Number each row's real tokens from padding_id + 1; padding tokens get padding_id."""
    # A padding token inside a text isn't counted either; transformers does the same.
    real = (tokens != padding_id).astype(mx.int32)
    return mx.cumsum(real, axis=1) * real + padding_id
