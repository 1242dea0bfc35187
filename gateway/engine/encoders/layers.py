"""The post-norm transformer layer that BERT and RoBERTa are stacks of."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from gateway.engine.encoders.arithmetic import (
    Activation,
    Arithmetic,
    Attention,
    Normalization,
)


@dataclass(frozen=True, slots=True)
class Dense:
    """A product and a bias. The weight is kept transposed: (inputs, outputs)."""

    weight: mx.array
    bias: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        """Give (rows, outputs) of (rows, inputs)."""
        return mx.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalisation."""

    weight: mx.array
    bias: mx.array
    epsilon: float
    normalize: Normalization

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise each row of (rows, dimensions)."""
        return self.normalize(x, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, then two products with an activation between; each added and normalised."""

    qkv: Dense
    attention_out: Dense
    attention_norm: Norm
    up: Dense
    down: Dense
    norm: Norm
    heads: int
    attend: Attention
    activation: Activation

    def __call__(self, x: mx.array, bias: mx.array | None, rows: int) -> mx.array:
        """Take and give (rows * tokens, dimensions): flat, so that each product is one GEMM."""
        flat, width = x.shape
        # One copy puts all three into the layout the products want; views would be copied thrice.
        split = self.qkv(x).reshape(rows, flat // rows, 3, self.heads, width // self.heads)
        q, k, v = mx.contiguous(split.transpose(2, 0, 3, 1, 4))
        mixed = self.attend(q, k, v, bias).transpose(0, 2, 1, 3).reshape(flat, width)
        x = self.attention_norm(x + self.attention_out(mixed))
        return self.norm(x + self.down(self.activation(self.up(x))))

    def parameters(self) -> list[mx.array]:
        """List every array the layer holds."""
        parts = (self.qkv, self.attention_out, self.attention_norm, self.up, self.down, self.norm)
        return [array for part in parts for array in (part.weight, part.bias)]


def make_norm(
    weights: Mapping[str, mx.array], name: str, choice: Arithmetic, epsilon: float
) -> Norm:
    """Make a normalisation of the two weights under a name."""
    return Norm(weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon, choice.normalize)


def make_layer(
    weights: Mapping[str, mx.array],
    choice: Arithmetic,
    heads: int,
    epsilon: float,
) -> Layer:
    """Make a layer of its weights, named as in the checkpoint below `encoder.layer.N.`."""

    def dense(*names: str, first_scale: float = 1.0) -> Dense:
        """Put products side by side, the first one scaled."""
        scales = [first_scale] + [1.0] * (len(names) - 1)
        pairs = list(zip(names, scales, strict=True))
        weight = mx.concatenate([weights[f"{n}.weight"] * s for n, s in pairs])
        bias = mx.concatenate([weights[f"{n}.bias"] * s for n, s in pairs])
        return Dense(mx.contiguous(weight.T), bias)

    attention = "attention.self."
    return Layer(
        qkv=dense(
            f"{attention}query",
            f"{attention}key",
            f"{attention}value",
            first_scale=choice.query_scale,
        ),
        attention_out=dense("attention.output.dense"),
        attention_norm=make_norm(weights, "attention.output.LayerNorm", choice, epsilon),
        up=dense("intermediate.dense"),
        down=dense("output.dense"),
        norm=make_norm(weights, "output.LayerNorm", choice, epsilon),
        heads=heads,
        attend=choice.attend,
        activation=choice.activation,
    )
