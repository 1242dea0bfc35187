"""A decoder that mlx-lm knows, opened to be fast on this device."""

from collections.abc import Callable, Generator
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, _get_classes, load_model

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices
from gateway.engine.models.decoder_kernels import use_cpu_kernels
from gateway.engine.models.fused import fuse_projections
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint
from gateway.engine.models.gguf.decoder import read_gguf_decoder
from gateway.engine.models.missing_kernels import Report, replace_missing, widen
from gateway.engine.models.sharding import Share, shard


def open_decoder(
    checkpoint: Checkpoint,
    *,
    device: Device,
    dtype: str | None,
    is_packed: bool = False,
    classes: Callable[[dict[str, Any]], tuple[Any, type]] = _get_classes,
) -> tuple[Any, dict[str, Any]]:
    """Return mlx-lm's model, its weights not read yet, and its config. On the lane.

    Quantised weights stay quantised on a GPU; on the CPU, where they are 10 to 50 times slower,
    they become float32, unless the model `is_packed`. `classes` picks the model's class by its
    config. Raises ModelLoadFailed. Code from the model's folder is never run.
    """
    checkpoint.weights()  # refuses a folder without whole safetensors, by name
    with checkpoint.blame():
        model, config = load_model(checkpoint.folder, lazy=True, get_model_classes=classes)
        if device is Device.CPU and not is_packed:
            widen(model, floating_dtype(model))
        target = pick_dtype(device, dtype, floating_dtype(model))
        if target != floating_dtype(model):
            model.set_dtype(target)
    if device is Device.CPU:
        use_cpu_kernels(model)
    return model, config


def read_decoder(
    checkpoint: Checkpoint | GgufCheckpoint,
    *,
    device: Device,
    dtype: str | None,
    is_packed: bool,
    is_fused: bool = False,
    share: Share | None = None,
    report: Report | None = None,
) -> Generator[None, None, Any]:
    """Read mlx-lm's model of a folder or a GGUF file, in steps; of a shared one, this rank's part.
    On the lane.

    If it `is_fused`, projections of one input become one product. Quantised weights that the device
    has no kernel for become floating; `report` is called with them. Raises ModelLoadFailed.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        if share is not None:
            raise checkpoint.failed("a GGUF file's model cannot be divided by `parallel:`")
        model = yield from read_gguf_decoder(
            checkpoint, device=device, dtype=dtype, is_packed=is_packed
        )
    else:
        model, _ = open_decoder(checkpoint, device=device, dtype=dtype, is_packed=is_packed)
        if share is not None:
            shard(checkpoint, model, share)
        yield from read_in_slices(checkpoint, parameters(model))
    yield from replace_missing(checkpoint.name, model, device, floating_dtype(model), report)
    if is_fused:
        yield from fuse_projections(model)
    return model


def is_known(architecture: str) -> bool:
    """Return True if mlx-lm has a model for a config's `model_type`."""
    module = MODEL_REMAPPING.get(architecture, architecture)
    return "." not in module and find_spec(f"mlx_lm.models.{module}") is not None


def parameters(model: Any) -> list[mx.array]:
    """List every array a model holds."""
    named: Any = tree_flatten(model.parameters())
    return [array for _, array in named]


def floating_dtype(model: Any) -> mx.Dtype:
    """Return the type of the model's floating weights."""
    dtypes = (array.dtype for array in parameters(model))
    return next((dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)), mx.float32)
