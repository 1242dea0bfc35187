"""How many bytes a model will hold, from its files' headers and its config: nothing is read."""

import math
from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx

from gateway.engine.backend import Device, pick_dtype
from gateway.engine.weights import Checkpoint, Tensor

_FLOATING: Final = {
    "F64": mx.float32,
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
}


def weights_bytes(checkpoint: Checkpoint, device: Device, dtype: str | None) -> int:
    """Count what the weights take once cast: on a CPU quantised ones become floating.

    Raises ModelLoadFailed for files that are not whole.
    """
    tensors = checkpoint.tensors()
    itemsize = pick_dtype(device, dtype, _checkpoint_dtype(tensors)).size
    is_cast = device is Device.CPU or dtype is not None
    total = 0
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if device is Device.CPU and (scales := tensors.get(f"{module}.scales")) is not None:
            if part == "weight":  # scales and biases go with what they unpacked
                total += math.prod(scales.shape) * _group_size(checkpoint, module) * itemsize
        elif is_cast and tensor.dtype in _FLOATING:
            total += math.prod(tensor.shape) * itemsize
        else:
            total += tensor.nbytes
    return total


def kv_bytes(checkpoint: Checkpoint, device: Device, dtype: str | None, tokens: int) -> int:
    """Count the KV of so many tokens, at most the model's context, by what its config says.

    A layer more is counted than there is: the one that is copied while a row joins or leaves.
    0 where the config does not say it in the usual words.
    """
    whole = checkpoint.read_object("config.json")
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


def _checkpoint_dtype(tensors: Mapping[str, Tensor]) -> mx.Dtype:
    floating = (_FLOATING[each.dtype] for each in tensors.values() if each.dtype in _FLOATING)
    return next(floating, mx.float32)


def _group_size(checkpoint: Checkpoint, module: str) -> int:
    """Give how many weights share a scale: the model's number, or the module's own."""
    config = checkpoint.read_object("config.json")
    said: dict[str, Any] = config.get("quantization") or config.get("quantization_config") or {}
    own = said.get(module)
    size = own.get("group_size") if isinstance(own, dict) else said.get("group_size")
    if not isinstance(size, int):
        raise checkpoint.failed("config.json does not say the group_size of its quantised weights")
    return size
