"""How many bytes a model will hold, from its files' headers and its config: nothing is read.

What its rows hold is known better once the model is there: its own caches show their shapes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import CacheList, make_prompt_cache

from gateway.engine.backend import Device, pick_dtype
from gateway.engine.weights import Listing, Tensor
from gateway.jobs import KvCost

_FLOATING: Final = {
    "F64": mx.float32,
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
}


def weights_bytes(
    checkpoint: Listing, device: Device, dtype: str | None, *, is_packed: bool = False
) -> int:
    """Count what the weights take once cast: on a CPU quantised ones become floating, unless it
    `is_packed`.

    Raises ModelLoadFailed for files that are not whole.
    """
    tensors = checkpoint.tensors()
    itemsize = pick_dtype(device, dtype, _checkpoint_dtype(tensors)).size
    is_cast = device is Device.CPU or dtype is not None
    total = 0
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        is_unpacked = device is Device.CPU and not is_packed and f"{module}.scales" in tensors
        if is_unpacked and part == "weight":
            groups = math.prod(tensors[f"{module}.scales"].shape)
            total += groups * _group_size(checkpoint, module) * itemsize
        elif is_unpacked and part in ("scales", "biases"):
            pass  # they go with what they unpacked
        elif is_cast and tensor.dtype in _FLOATING:
            total += math.prod(tensor.shape) * itemsize
        else:
            total += tensor.nbytes
    return total


def must_stay_packed(
    checkpoint: Listing, device: Device, dtype: str | None, limit_bytes: int
) -> bool:
    """Return True if a CPU has no room for quantised weights as floating ones.

    Products with them are 10 to 50 times slower there, and better than none.
    """
    return (
        device is Device.CPU
        and any(name.endswith(".scales") for name in checkpoint.tensors())
        and weights_bytes(checkpoint, device, dtype) > limit_bytes
    )


def kv_bytes(checkpoint: Listing, device: Device, dtype: str | None, tokens: int) -> int:
    """Count the KV of so many tokens, at most the model's context, by what its config says.

    A layer more is counted than there is: the one that is copied while a row joins or leaves.
    0 where the config does not say it in the usual words.
    """
    whole = checkpoint.config()
    config = whole.get("text_config") or whole
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        layers = int(config["num_hidden_layers"])
        longest = int(config.get("max_position_embeddings") or tokens)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return 0
    itemsize = pick_dtype(device, dtype, _checkpoint_dtype(checkpoint.tensors())).size
    return 2 * (layers + 1) * kv_heads * head * itemsize * min(tokens, longest)


def measured_kv(model: Any) -> KvCost:
    """Return what the KV of a row costs, by the shapes that one token and two leave in the model's
    caches: the passes are never evaluated.

    A layer more is counted than there is, as by `kv_bytes`.
    """
    one, two = _read(model, 1), _read(model, 2)
    layers = [_layer_cost(*both) for both in zip(_plain(one), _plain(two), strict=True)]
    windows = list(chain.from_iterable(each.windows for each in layers))
    by_most: dict[int, int] = {}
    for token, most in [*windows, *([max(windows)] if windows else [])]:
        by_most[most] = by_most.get(most, 0) + token
    return KvCost(
        token=_and_one_more([each.token for each in layers]),
        windows=tuple((token, most) for most, token in by_most.items()),
        constant=_and_one_more([each.constant for each in layers]),
    )


def _read(model: Any, tokens: int) -> list[Any]:
    """Return the caches as they would be after so many tokens."""
    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
    return cache


def _plain(caches: Sequence[Any]) -> Iterator[Any]:
    """Walk the caches of the layers, those of layers with several among them."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _plain(cache.caches)
        else:
            yield cache


def _layer_cost(one: Any, two: Any) -> KvCost:
    """Compare a layer's caches after one token and two. There are three cases:

    1. Keys and values in steps of many tokens: their shapes tell what one takes. Those that rotate
       or are cut into chunks say how many they keep.
    2. Arrays that are larger after two tokens than after one grow with each.
    3. All others are states.
    """
    keys, values = getattr(one, "keys", None), getattr(one, "values", None)
    if isinstance(keys, mx.array) and isinstance(values, mx.array) and keys.ndim == 4:
        token = keys.nbytes // keys.shape[2] + values.nbytes // max(1, values.shape[2])
        most = getattr(one, "max_size", None) or getattr(one, "chunk_size", None)
        return KvCost(token) if most is None else KvCost(windows=((token, int(most)),))
    token = max(0, int(two.nbytes) - int(one.nbytes))
    return KvCost(token, constant=max(0, int(one.nbytes) - token))


def _and_one_more(layers: Sequence[int]) -> int:
    """Sum up the layers' bytes, the largest twice."""
    return sum(layers) + max(layers, default=0)


def _checkpoint_dtype(tensors: Mapping[str, Tensor]) -> mx.Dtype:
    floating = (_FLOATING[each.dtype] for each in tensors.values() if each.dtype in _FLOATING)
    return next(floating, mx.float32)


def _group_size(checkpoint: Listing, module: str) -> int:
    """Give how many weights share a scale: the model's number, or the module's own."""
    config = checkpoint.config()
    said: dict[str, Any] = config.get("quantization") or config.get("quantization_config") or {}
    own = said.get(module)
    size = own.get("group_size") if isinstance(own, dict) else said.get("group_size")
    if not isinstance(size, int):
        raise checkpoint.failed("config.json does not say the group_size of its quantised weights")
    return size
