"""A decoder that mlx-lm knows, opened to be fast on this device."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, _get_classes, dequantize_model, load_model

from gateway.engine.backend import Device, pick_dtype
from gateway.engine.weights import Checkpoint


def open_decoder(
    checkpoint: Checkpoint,
    *,
    device: Device,
    dtype: str | None,
    classes: Callable[[dict[str, Any]], tuple[Any, type]] = _get_classes,
) -> tuple[Any, dict[str, Any]]:
    """Give mlx-lm's model, whose weights are still to be read, and its config. On the lane.

    Quantised weights stay so on a GPU; on the CPU, where they are 10 to 50 times slower, they
    become float32. `classes` picks the model's class by its config. Raises ModelLoadFailed; a
    model's own code is never run.
    """
    checkpoint.weights()  # refuses a folder without whole safetensors, by name
    with checkpoint.blamed():
        model, config = load_model(checkpoint.folder, lazy=True, get_model_classes=classes)
        if device is Device.CPU:
            model = dequantize_model(model)
        if (target := pick_dtype(device, dtype, floating_dtype(model))) != floating_dtype(model):
            model.set_dtype(target)
    return model, config


def is_known(architecture: str) -> bool:
    """Tell whether mlx-lm has a model for a config's `model_type`."""
    module = MODEL_REMAPPING.get(architecture, architecture)
    return "." not in module and find_spec(f"mlx_lm.models.{module}") is not None


def parameters(model: Any) -> list[mx.array]:
    """List every array a model holds."""
    named: Any = tree_flatten(model.parameters())
    return [array for _, array in named]


def floating_dtype(model: Any) -> mx.Dtype:
    """Return the type of the model's floating weights."""
    dtypes = [array.dtype for array in parameters(model)]
    floating = [dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)]
    return floating[0] if floating else mx.float32
