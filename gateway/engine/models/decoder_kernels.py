"""Faster SwiGLU and attention for CPUs, and fused projections for all devices.

On a CPU, mlx computes exp, and products with quantized keys, one element at a time.
"""

import sys
from collections.abc import Generator, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models import activations, base

from gateway.engine.models.encoder_kernels import LOG2_E, exp2
from gateway.engine.models.missing_kernels import quantization_of
from gateway.engine.models.rotations import rotate

_own_swiglu: Final[Any] = activations.swiglu
_own_attention: Final[Any] = base.scaled_dot_product_attention

# The most rows for the compiled SwiGLU, because mx.compile keeps a trace for each shape.
_ROWS: Final = 64
# The queries in a block of attention, whose scores stay in the processor's cache.
_QUERIES: Final = 64
_FEWEST_QUERIES: Final = 16  # mlx's attention is as fast for fewer
_Packed: TypeAlias = tuple[mx.array, mx.array, mx.array]  # codes, scales, biases
# The score of a masked position. With -inf, a row that is all padding would become NaN.
_MASKED: Final = mx.finfo(mx.float32).min


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x with an error below 3e-7 * max(|gate|, 1) for float32."""
    if gate.dtype != mx.float32 or x.dtype != mx.float32 or gate.shape != x.shape:
        product: mx.array = _own_swiglu(gate, x)
        return product
    width = gate.shape[-1]
    if gate.size <= _ROWS * width:
        return _gated(gate, x)
    gates, xs = gate.reshape(-1, width), x.reshape(-1, width)
    starts = range(0, len(gates), _ROWS)
    blocks = [_gated(gates[at : at + _ROWS], xs[at : at + _ROWS]) for at in starts]
    return mx.concatenate(blocks).reshape(gate.shape)


@mx.compile
def _gated(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1.0 + exp2(gate * -LOG2_E)) * x


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return attention as mlx-lm's `scaled_dot_product_attention` does.

    Queries are (rows, heads, tokens, size); keys and values are (rows, KV heads, places, size), or
    quantized as in `attend_packed`. mlx-lm's function serves short passes, sinks and additive
    masks.
    """
    is_ours = sinks is None and _is_plain(mask)
    if is_ours and hasattr(cache, "bits"):
        return attend_packed(queries, keys, values, scale, mask, cache.bits, cache.group_size)
    tokens = queries.shape[2]
    is_long = tokens >= _FEWEST_QUERIES and queries.dtype == mx.float32
    if not is_long or not is_ours or hasattr(cache, "bits"):
        attended: mx.array = _own_attention(queries, keys, values, cache, scale, mask, sinks)
        return attended
    queries = queries * (scale * LOG2_E)
    places, blocks = keys.shape[2], []
    for start in range(0, tokens, _QUERIES):
        stop = min(start + _QUERIES, tokens)
        seen, allowed = places, None
        if isinstance(mask, mx.array):
            allowed = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
        elif mask == "causal":
            seen = places - tokens + stop
            allowed = mx.arange(seen) <= mx.arange(seen - (stop - start), seen)[:, None]
        block = queries[:, :, start:stop]
        blocks.append(_attend_block(block, keys[:, :, :seen], values[:, :, :seen], allowed))
    return mx.concatenate(blocks, axis=2)


def _is_plain(mask: mx.array | str | None) -> bool:
    if isinstance(mask, mx.array):
        return mask.dtype == mx.bool_ and mask.ndim >= 2
    return mask in (None, "causal")


def _attend_block(
    queries: mx.array, keys: mx.array, values: mx.array, allowed: mx.array | None
) -> mx.array:
    """Return attention for queries that are already multiplied by the scale and by log2(e)."""
    rows, heads, tokens, size = queries.shape
    shared = keys.shape[1]
    scores = queries.reshape(rows, shared, -1, size) @ keys.swapaxes(-1, -2)
    if allowed is not None:
        by_head = scores.reshape(rows, heads, tokens, -1)
        scores = mx.where(allowed, by_head, _MASKED).reshape(scores.shape)
    weights = exp2(scores - mx.max(scores, axis=-1, keepdims=True))
    attended = (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
    return attended.reshape(rows, heads, tokens, -1)


def attend_packed(
    queries: mx.array,
    keys: _Packed,
    values: _Packed,
    scale: float,
    mask: mx.array | str | None,
    bits: int,
    group_size: int,
) -> mx.array:
    """Return attention for keys and values that are quantized to 8 or 4 bits.

    Codes are multiplied as floats, because mlx's quantized products are slow on a CPU. Queries are
    (rows, heads, tokens, size). Keys and values are codes, (rows, KV heads, places, size * bits /
    32) uint32, then scales and biases, (rows, KV heads, places, size / group_size).
    """
    rows, heads, tokens, size = queries.shape
    shared, places = keys[0].shape[1:3]
    scaled = (queries.astype(mx.float32) * scale).reshape(rows, shared, -1, size)
    terms = []
    for group in range(size // group_size):
        part = scaled[..., group * group_size : (group + 1) * group_size]
        products = [
            part[..., first :: 8 // bits] @ codes.swapaxes(-1, -2)
            for first, codes in enumerate(_codes(keys[0], group, bits, group_size))
        ]
        terms.append(reduce(mx.add, products) * keys[1][..., None, :, group])
        terms.append(part.sum(axis=-1, keepdims=True) * keys[2][..., None, :, group])
    scores = reduce(mx.add, terms)
    if mask is not None:
        if isinstance(mask, str):
            mask = mx.arange(places) <= mx.arange(places - tokens, places)[:, None]
        by_head = scores.reshape(rows, heads, tokens, places)
        scores = mx.where(mask, by_head, _MASKED).reshape(scores.shape)
    weights = mx.softmax(scores, axis=-1, precise=True)
    outputs = []
    for group in range(size // group_size):
        scaled = weights * values[1][..., None, :, group]
        parts = [scaled @ codes for codes in _codes(values[0], group, bits, group_size)]
        sums = parts[0] if bits == 8 else mx.stack(parts, axis=-1).flatten(-2)
        outputs.append(sums + weights @ values[2][..., group : group + 1])
    attended = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)
    return attended.reshape(rows, heads, tokens, size).astype(queries.dtype)


def _codes(packed: mx.array, group: int, bits: int, group_size: int) -> list[mx.array]:
    """Return a group's codes as float arrays, (rows, heads, places, n).

    For 4 bits, there are two arrays: the codes at even indices, and those at odd indices.
    """
    words = group_size * bits // 32
    codes = mx.view(packed[..., group * words : (group + 1) * words], mx.uint8)
    halves = [codes] if bits == 8 else [codes & 15, codes >> 4]
    return [half.astype(mx.float32) for half in halves]


def use_cpu_kernels(model: Any) -> None:
    """Use `swiglu` and `attend` in a model's mlx-lm modules, and `rotate` everywhere.

    The modules import the original functions by name, so the names are replaced in each module.
    """
    mlx: Any = mx
    mlx.fast.rope = rotate
    names = {
        "swiglu": (_own_swiglu, swiglu),
        "scaled_dot_product_attention": (_own_attention, attend),
    }
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, (original, ours) in names.items():
            if getattr(module, name, None) is original:
                setattr(module, name, ours)


# Projections that mlx-lm's attention and MLP modules call with the same input array.
_GROUPS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ARRAYS: Final = ("weight", "bias", "scales", "biases")  # their first axis is the outputs


class _Product:
    """A matrix product for several projections. Each projection takes its part once."""

    def __init__(self, linear: Module, widths: Sequence[int]) -> None:
        self._linear: Any = linear
        self._stops = [*accumulate(widths)][:-1]
        self._input: mx.array | None = None
        self._parts: dict[int, mx.array] = {}

    def take(self, index: int, x: mx.array) -> mx.array:
        if x is not self._input or index not in self._parts:
            parts = mx.split(self._linear(x), self._stops, axis=-1)
            self._input, self._parts = x, dict(enumerate(parts))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


class FusedProjection(Module):
    """One of several fused projections. The first holds all weights, as `fused`."""

    def __init__(self, product: _Product, index: int, fused: Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        self._product = product
        self._index = index
        if fused is not None:
            self.fused = fused

    def __call__(self, x: mx.array) -> mx.array:
        """Project (…, inputs) → (…, outputs)."""
        return self._product.take(self._index, x)


def fuse_projections(model: Any) -> Generator[None, None, int]:
    """Fuse projections of the same input, one group per step; return the number of groups.

    Must run on the lane. Results differ by rounding.
    """
    count = 0
    for module in model.modules():
        for group in _GROUPS:
            for names in _alike(module, group):
                parts = [module[name] for name in names]
                widths = [part.weight.shape[0] for part in parts]
                fused = _concatenate(parts)
                product = _Product(fused, widths)
                for index, name in enumerate(names):
                    module[name] = FusedProjection(product, index, None if index else fused)
                count += 1
                yield
    return count


def _alike(module: Module, group: Sequence[str]) -> list[list[str]]:
    forms: dict[tuple[Any, ...], list[str]] = {}
    for name in group:
        part = module.get(name)
        if type(part) in (Linear, QuantizedLinear):
            forms.setdefault(_form(part), []).append(name)
    return [names for names in forms.values() if len(names) > 1]


def _form(part: Any) -> tuple[Any, ...]:
    arrays = [(name, part[name].dtype, part[name].shape[1:]) for name in _ARRAYS if name in part]
    return type(part), *arrays, *quantization_of(part)


def _concatenate(parts: Sequence[Any]) -> Module:
    fused: Module = parts[0]
    for name in _ARRAYS:
        if name in fused:
            fused[name] = mx.concatenate([part[name] for part in parts])
    mx.eval(dict(fused))
    return fused
