"""What decoders compute in place of mlx-lm's functions on a CPU: mlx's exp goes one by one there.

SwiGLU and softmax take a third to a half of a prefill so. Metal and CUDA have fast kernels of
their own, and keep mlx-lm's functions.
"""

import sys
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import activations, base

from gateway.engine.exponential import LOG2_E, exp2

_own_swiglu: Final[Any] = activations.swiglu
_own_attention: Final[Any] = base.scaled_dot_product_attention

# Rows of one compiled product: a function is traced anew for each shape, and traces are kept.
_ROWS: Final = 64
# Queries that attend at a time: their scores stay in the processor's cache, and under a causal mask
# the keys after them are left out. Below the second number mlx's own attention is as fast.
_QUERIES: Final = 64
_FEWEST_QUERIES: Final = 16
# The score of what is masked: the lowest, but for -inf, which would make NaN of a row that is all
# padding.
_MASKED: Final = mx.finfo(mx.float32).min


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x, as mlx-lm's `swiglu` does: its own for all but float32.

    The error is below 3e-7 times |gate|, or times one if that is more.
    """
    if gate.dtype != mx.float32 or x.dtype != mx.float32 or gate.shape != x.shape:
        own: mx.array = _own_swiglu(gate, x)
        return own
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
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return attention as mlx-lm's `scaled_dot_product_attention` does, of long float32 passes.

    Queries are (rows, heads, tokens, size), keys and values (rows, heads of their own, places,
    size). Few queries, quantised keys, sinks and masks that are added are left to mlx-lm's own.
    """
    tokens = queries.shape[2]
    is_long = tokens >= _FEWEST_QUERIES and queries.dtype == mx.float32
    if not is_long or sinks is not None or hasattr(cache, "bits") or not _is_plain(mask):
        own: mx.array = _own_attention(queries, keys, values, cache, scale, mask, sinks)
        return own
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
    """Attend with queries that log2(e) and the scale are in.

    Heads that share keys are one product. The division by the sum waits until after the product
    with the values, where there is less to divide.
    """
    rows, heads, tokens, size = queries.shape
    shared = keys.shape[1]
    scores = queries.reshape(rows, shared, -1, size) @ keys.swapaxes(-1, -2)
    if allowed is not None:
        by_head = scores.reshape(rows, heads, tokens, -1)
        scores = mx.where(allowed, by_head, _MASKED).reshape(scores.shape)
    weights = exp2(scores - mx.max(scores, axis=-1, keepdims=True))
    attended = (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
    return attended.reshape(rows, heads, tokens, -1)


def use_cpu_kernels(model: Any) -> None:
    """Let `swiglu` and `attend` compute in a model of mlx-lm's, and in all others of its class.

    mlx-lm's modules import the two functions by name, so the names are set in those modules.
    """
    names = {
        "swiglu": (_own_swiglu, swiglu),
        "scaled_dot_product_attention": (_own_attention, attend),
    }
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, (own, ours) in names.items():
            if getattr(module, name, None) is own:
                setattr(module, name, ours)
