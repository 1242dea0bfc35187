"""Activations, attention and normalization of encoders, chosen for a device.

On a CPU, mlx computes exp, erf and tanh one element at a time (10 to 60 ns each), but sums,
products and shifts with vector instructions (0.1 ns each). Therefore the CPU's functions are built
from sums, products and shifts.
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
LEAST: Final = -125.0
MOST: Final = 126.0

# Least-squares coefficients for 2^f on [-0.5, 0.5] with a relative error of 1e-7. The range
# reduction is Cody and Waite's (Software Manual for the Elementary Functions).
_EXP2: Final = (0.693146978, 0.240222421, 0.0555073375, 0.00967151272, 0.0013264726)
# Adding this rounds a float32 to an integer, which the low bits then hold.
_ROUND: Final = 1.5 * 2.0**23


def exp2(x: mx.array) -> mx.array:
    """Return 2^x for float32 with a relative error below 3e-7. x is clipped to LEAST and MOST."""
    shifted, power = _split(x)
    return _scaled(shifted.view(mx.int32), power.view(mx.int32)).view(mx.float32)


# Two functions are compiled, because a view inside one would need a trace for each shape.
@partial(mx.compile, shapeless=True)
def _split(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return x's integer part, in a float's low bits, and 2^(x's fraction)."""
    x = mx.clip(x, LEAST, MOST)
    shifted = x + _ROUND
    fraction = x - (shifted - _ROUND)
    power = fraction * _EXP2[4]
    for coefficient in reversed(_EXP2[:4]):
        power = (power + coefficient) * fraction
    return shifted, power + 1.0


@partial(mx.compile, shapeless=True)
def _scaled(shifted: mx.array, power: mx.array) -> mx.array:
    return (shifted << 23) + power


Activation = Callable[[mx.array], mx.array]
Attention = Callable[[mx.array, mx.array, mx.array, mx.array | None], mx.array]
# The arguments are x, (rows, dimensions), weight, bias and epsilon.
Normalization = Callable[[mx.array, mx.array, mx.array | None, float], mx.array]

# The number added to a padding token's score; -inf could lead to NaN.
PADDING_SCORE: Final = -1e9
# Texts of over LONG tokens are computed in blocks of QUERY_BLOCK queries, whose scores stay in the
# CPU's cache (MiniLM is 1.3 times as fast at 512 tokens).
LONG: Final = 256
QUERY_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The functions of an encoder on one device."""

    activation: Activation
    attend: Attention
    normalize: Normalization
    query_scale: float  # a factor for the query weights, applied at load


def arithmetic(
    device: Device, dtype: mx.Dtype, hidden_act: str, dimensions: int, heads: int
) -> Arithmetic:
    """Choose the functions for a device. Raises KeyError for an unknown activation."""
    scale = 1.0 / math.sqrt(dimensions // heads)
    if device is Device.CPU and dtype == mx.float32:
        activation = _ON_CPU[hidden_act]
        zeros = mx.zeros((2, 2))
        # The first evaluation compiles the functions, which takes seconds.
        mx.eval(activation(zeros), exp2(zeros))
        normalize = layer_norm_by_products(dimensions)
        return Arithmetic(activation, attend_base2, normalize, scale * LOG2_E)
    return Arithmetic(_OF_MLX[hidden_act], attend_fused, mx.fast.layer_norm, scale)


# erfc(a sqrt(2)) = 1 / p(a)^16, where p(a) = (q(a)^2 + P[0])^2 + P[1] and q is a cubic with the
# coefficients Q, highest first. The fit has an error of 2e-7 in a * erfc. The form is a variant of
# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.28.
GELU_Q: Final = (0.0078602723, -0.0285819363, 0.2922924988, 0.4173043838)
GELU_P: Final = (0.0302346432, 0.9582307320)


@partial(mx.compile, shapeless=True)
def gelu(x: mx.array) -> mx.array:
    """Return GELU with an error below 1e-6: x / 2 + a - a * erfc(a * sqrt(2)) with a = |x| / 2."""
    half = x * 0.5
    size = mx.abs(half)
    power = size * GELU_Q[0]
    for coefficient in GELU_Q[1:3]:
        power = (power + coefficient) * size
    power = power + GELU_Q[3]
    for constant in GELU_P:
        power = mx.square(power) + constant
    for _ in range(4):
        power = mx.square(power)
    result: mx.array = half + size - size / power
    return result


def gelu_tanh(x: mx.array) -> mx.array:
    """Return GELU by its tanh formula (arXiv:1606.08415), written as x * sigmoid."""
    slope = -2.0 * LOG2_E * math.sqrt(2.0 / math.pi)
    inner = x * (slope + (slope * 0.044715) * (x * x))
    return x / (1.0 + exp2(inner))


def silu(x: mx.array) -> mx.array:
    return x / (1.0 + exp2(x * -LOG2_E))


def attend_base2(q: mx.array, k: mx.array, v: mx.array, bias: mx.array | None) -> mx.array:
    """Return float32 attention for query weights that include log2(e).

    q, k and v are (rows, heads, tokens, head size); bias is added to the scores.
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
    return (weights @ v) / mx.sum(weights, axis=-1, keepdims=True)


def attend_by_numpy(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Return float32 attention, (heads, queries, head size), of scaled queries.

    numpy's exp takes 0.5 ns a score, and exp2 4 to 15 ns (Sapphire Rapids, numpy 2.4.6). mlx
    computes the products: the threads of numpy's own BLAS would compete with those of mlx's.
    """
    outputs = []
    for queries, keys, values in zip(q, k, v, strict=True):
        scores = queries @ keys.T
        weights = np.asarray(scores)  # the same memory, so `scores` become the weights
        with np.errstate(all="ignore"):
            weights -= weights.max(axis=-1, keepdims=True)
            np.exp(weights, out=weights)
        outputs.append(scores @ values / mx.array(weights.sum(axis=-1, keepdims=True)))
    return mx.stack(outputs)


def gelu_by_numpy(x: mx.array) -> mx.array:
    """Return float32 GELU by its tanh formula; numpy's tanh is fast as well."""
    values = np.asarray(x)
    with np.errstate(all="ignore"):
        inner = values * values
        inner *= 0.044715
        inner += 1
        inner *= values
        inner *= math.sqrt(2 / math.pi)
        np.tanh(inner, out=inner)
        inner += 1
        inner *= 0.5
        inner *= values
    return mx.array(inner)


def silu_by_numpy(x: mx.array) -> mx.array:
    values = np.asarray(x)
    with np.errstate(over="ignore"):  # a large negative number gives 0
        return mx.array(values / (1 + np.exp(-values)))


def attend_fused(q: mx.array, k: mx.array, v: mx.array, bias: mx.array | None) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=bias)


def layer_norm_by_products(dimensions: int) -> Normalization:
    """Return a layer normalization that averages by matrix products, faster than mlx's sums."""
    average = mx.full((dimensions, 1), 1 / dimensions)
    mx.eval(average)  # now, because several streams read the array later

    # mx.compile would turn the broadcasts into loops that take twice as long.
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
    """Return a function that rotates heads, (…, tokens, size), by their positions / `factor`."""
    if device is Device.CPU:
        return partial(rotate_by_table, table=rotation_table(theta, size, positions, factor))
    return partial(
        mx.fast.rope, dims=size, traditional=False, base=theta, scale=1.0 / factor, offset=0
    )


def rotation_table(theta: float, size: int, positions: int, factor: float = 1.0) -> mx.array:
    """Return (2, positions, size): factors for a head, and for the head with halves swapped."""
    # RoFormer, arXiv:2104.09864: the halves of a head are the coordinates.
    frequencies = theta ** -(np.arange(0, size, 2) / size)
    angles = np.arange(positions)[:, None] / factor * frequencies
    cosine, sine = np.cos(angles), np.sin(angles)
    table = np.stack([np.hstack([cosine, cosine]), np.hstack([-sine, sine])])
    return mx.array(table.astype(np.float32))  # an evaluated array, because several streams read it


def rotate_by_table(x: mx.array, table: mx.array) -> mx.array:
    tokens, half = x.shape[-2], x.shape[-1] // 2
    swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
    cosine, sine = table[:, :tokens].astype(x.dtype)
    return x * cosine + swapped * sine
