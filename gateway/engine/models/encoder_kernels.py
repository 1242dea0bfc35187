"""Activations, attention and normalization, chosen for the device when a model is loaded.

On a CPU, mlx computes exp, erf and tanh one element at a time (10 to 60 ns each), but sums,
products and shifts with vector instructions (0.1 ns), in one pass over the array for each
operation. So on a CPU exp, erf and tanh are built here from few sums, products and shifts. If
`mx.compile` finds a g++, it fuses these operations into one or two passes (2.2 times as fast for
GELU, 1.7 for exp), with one trace for all shapes. Normalizations are not compiled: mlx turns
broadcasts into slow loops, which would take twice as long. On Metal and CUDA mlx's own functions
are fast.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers import activations

from gateway.engine.device import Device

LOG2_E: Final = math.log2(math.e)
# The bounds to which `exp2` clips its argument.
LEAST: Final = -125.0
MOST: Final = 126.0

# Coefficients for 2^f on [-0.5, 0.5], with a relative error of 1e-7: fitted by least squares,
# reweighted towards the largest error. The range reduction is that of Cody and Waite, Software
# Manual for the Elementary Functions.
_EXP2: Final = (0.693146978, 0.240222421, 0.0555073375, 0.00967151272, 0.0013264726)
# Adding 1.5 * 2^23 rounds a float32 to the nearest integer and leaves it in the low bits.
_ROUND: Final = 1.5 * 2.0**23


def exp2(x: mx.array) -> mx.array:
    """Return 2^x for float32 with a relative error below 3e-7. x is clipped to LEAST and MOST."""
    shifted, power = _split(x)
    return _scaled(shifted.view(mx.int32), power.view(mx.int32)).view(mx.float32)


# Compiled as two functions, because a view inside a compiled function would tie its trace to one
# shape of x, and mlx keeps every trace.
@partial(mx.compile, shapeless=True)
def _split(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return x's integer part, in the lowest bits of a float, and 2^(x's fraction)."""
    x = mx.clip(x, LEAST, MOST)
    shifted = x + _ROUND
    fraction = x - (shifted - _ROUND)
    power = fraction * _EXP2[4]
    for coefficient in reversed(_EXP2[:4]):
        power = (power + coefficient) * fraction
    return shifted, power + 1.0


@partial(mx.compile, shapeless=True)
def _scaled(shifted: mx.array, power: mx.array) -> mx.array:
    """Add the integer part to the exponent bits of `power`."""
    return (shifted << 23) + power


Activation = Callable[[mx.array], mx.array]
Attention = Callable[[mx.array, mx.array, mx.array, mx.array | None], mx.array]
# The arguments are x (rows, dimensions), weight, bias, epsilon.
Normalization = Callable[[mx.array, mx.array, mx.array | None, float], mx.array]

# The number added to the score of a padding token: far below any score, but finite, since -inf
# could lead to inf - inf, which is NaN.
PADDING_SCORE: Final = -1e9
# On a CPU, attention for texts of more than LONG tokens is computed for QUERY_BLOCK queries at a
# time. The scores stay in the processor's cache (MiniLM is 1.3 times as fast at 512 tokens; at 160
# it would be a little slower), and those of a very long text never fill memory. Blocks of 64
# queries take twice the memory of 32 and are no faster.
LONG: Final = 256
QUERY_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The functions that an encoder computes with on one device."""

    activation: Activation
    attend: Attention
    normalize: Normalization
    query_scale: float  # the query weights are multiplied by it at load


def arithmetic(
    device: Device, dtype: mx.Dtype, hidden_act: str, dimensions: int, heads: int
) -> Arithmetic:
    """Choose the functions for a device. Raises KeyError for an activation not in ACTIVATIONS."""
    scale = 1.0 / math.sqrt(dimensions // heads)
    if device is Device.CPU and dtype == mx.float32:
        activation = _ON_CPU[hidden_act]
        zeros = mx.zeros((2, 2))
        # Evaluated once during the load, as mlx takes seconds to compile the functions if there is
        # a g++.
        mx.eval(activation(zeros), exp2(zeros))
        normalize = layer_norm_by_products(dimensions)
        return Arithmetic(activation, attend_base2, normalize, scale * LOG2_E)
    return Arithmetic(_OF_MLX[hidden_act], attend_fused, mx.fast.layer_norm, scale)


# erfc(a sqrt(2)) = 1 / p(a)^16, where p(a) = (q(a)^2 + P[0])^2 + P[1] and q is a cubic with the
# coefficients Q, the highest first. Abramowitz and Stegun (Handbook of Mathematical Functions,
# 7.1.28) give p as a polynomial; this form is as precise in fewer passes over the array. Fitted by
# least squares, reweighted towards the largest error of a * erfc, which is 2e-7.
_Q: Final = (0.0078602723, -0.0285819363, 0.2922924988, 0.4173043838)
_P: Final = (0.0302346432, 0.9582307320)


@partial(mx.compile, shapeless=True)
def gelu(x: mx.array) -> mx.array:
    """Return GELU, x times the normal distribution function, with an error below 1e-6.

    With a = |x| / 2: gelu(x) = x / 2 + a - a * erfc(a * sqrt(2)).
    """
    half = x * 0.5
    size = mx.abs(half)
    power = size * _Q[0]
    for coefficient in _Q[1:3]:
        power = (power + coefficient) * size
    power = power + _Q[3]
    for constant in _P:
        power = mx.square(power) + constant
    for _ in range(4):
        power = mx.square(power)
    result: mx.array = half + size - size / power
    return result


def gelu_tanh(x: mx.array) -> mx.array:
    """Return GELU by its tanh formula (Hendrycks and Gimpel, arXiv:1606.08415), as x * sigmoid."""
    slope = -2.0 * LOG2_E * math.sqrt(2.0 / math.pi)
    inner = x * (slope + (slope * 0.044715) * (x * x))
    return x / (1.0 + exp2(inner))


def silu(x: mx.array) -> mx.array:
    """Return SiLU, x times its sigmoid."""
    return x / (1.0 + exp2(x * -LOG2_E))


def attend_base2(q: mx.array, k: mx.array, v: mx.array, bias: mx.array | None) -> mx.array:
    """Return float32 attention with a softmax in base 2: the query weights include log2(e).

    q, k, v are (rows, heads, tokens, head size); bias is added to the scores.
    """
    tokens = q.shape[2]
    if tokens > LONG:
        assert bias is None or bias.shape[2] == 1
        starts = range(0, tokens, QUERY_BLOCK)
        blocks = [attend_base2(q[:, :, at : at + QUERY_BLOCK], k, v, bias) for at in starts]
        return mx.concatenate(blocks, axis=2)
    scores = q @ k.swapaxes(-1, -2)
    if bias is not None:
        scores = scores + bias
    weights = exp2(scores - mx.max(scores, axis=-1, keepdims=True))
    # Dividing after the product with the values divides fewer numbers.
    return (weights @ v) / mx.sum(weights, axis=-1, keepdims=True)


def attend_fused(q: mx.array, k: mx.array, v: mx.array, bias: mx.array | None) -> mx.array:
    """Return attention from mlx's kernel. The query weights include the scale."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=bias)


def layer_norm_by_products(dimensions: int) -> Normalization:
    """Return a layer normalization that averages by products with a column of 1 / dimensions."""
    # BLAS adds up a row with vector instructions, 0.2 ns an element; mlx's sum adds elements one by
    # one, 0.5 ns.
    average = mx.full((dimensions, 1), 1 / dimensions)
    # Evaluated here, on the loading thread, because several streams read it later.
    mx.eval(average)

    def normalize(x: mx.array, weight: mx.array, bias: mx.array | None, epsilon: float) -> mx.array:
        centred = x - x @ average
        variance = mx.square(centred) @ average
        scaled = centred * mx.rsqrt(variance + epsilon) * weight
        if bias is None:
            return scaled
        return scaled + bias

    return normalize


_OF_MLX: Final[dict[str, Activation]] = {
    "gelu": activations.gelu,
    "gelu_new": activations.gelu_approx,
    "gelu_pytorch_tanh": activations.gelu_approx,
    "relu": activations.relu,
    "silu": activations.silu,
}
_ON_CPU: Final[dict[str, Activation]] = {
    **_OF_MLX,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
}
ACTIVATIONS: Final = tuple(_ON_CPU)

Rotation = Callable[[mx.array], mx.array]


def make_rotation(
    device: Device, theta: float, size: int, positions: int, factor: float = 1.0
) -> Rotation:
    """Make a function that rotates heads (…, tokens, size) by their positions, each divided by
    `factor`.
    """
    if device is Device.CPU:
        return partial(rotate_by_table, table=rotation_table(theta, size, positions, factor))
    return partial(
        mx.fast.rope, dims=size, traditional=False, base=theta, scale=1.0 / factor, offset=0
    )


def rotation_table(theta: float, size: int, positions: int, factor: float = 1.0) -> mx.array:
    """Return (2, positions, size): factors for a head, and for the head with halves swapped."""
    # The rotation is RoFormer's, arXiv:2104.09864, with the halves of a head as the two
    # coordinates.
    frequencies = theta ** -(np.arange(0, size, 2) / size)
    angles = np.arange(positions)[:, None] / factor * frequencies
    cosine, sine = np.cos(angles), np.sin(angles)
    table = np.stack([np.hstack([cosine, cosine]), np.hstack([-sine, sine])])
    return mx.array(table.astype(np.float32))  # evaluated already: several streams read it


def rotate_by_table(x: mx.array, table: mx.array) -> mx.array:
    """Rotate heads (…, tokens, size) with a table, because cos and sin are slow on a CPU."""
    tokens, half = x.shape[-2], x.shape[-1] // 2
    swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
    cosine, sine = table[:, :tokens].astype(x.dtype)
    return x * cosine + swapped * sine
