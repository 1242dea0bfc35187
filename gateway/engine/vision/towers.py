"""Loading of a checkpoint's vision tower."""

from collections.abc import Generator, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.checkpoint import (
    Checkpoint,
    Tensor,
    dequantize,
    fit_weights,
    read_in_slices,
)
from gateway.engine.vision.families import FAMILIES, TOWER
from gateway.engine.vision.qwen import QwenTower, QwenVision


def tower_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a tower's arrays by name, none for an unsupported family."""
    if checkpoint.config().get("model_type") not in FAMILIES:
        return {}
    return {name: each for name, each in checkpoint.all_tensors().items() if TOWER.match(name)}


def open_tower(
    checkpoint: Checkpoint, *, device: Device, dtype: str | None, is_packed: bool = False
) -> Generator[None, None, QwenTower]:
    """Read a checkpoint's tower on the lane, in steps. Raises ModelLoadFailed.

    On a CPU, quantized weights are dequantized unless `is_packed`.
    """
    config = checkpoint.config()
    with checkpoint.reading_config():
        numbers = QwenVision.read(config["vision_config"])
    arrays = {
        TOWER.sub("", name): array
        for name, array in checkpoint.weights().items()
        if TOWER.match(name)
    }
    blocks = {name.split(".")[1] for name in arrays if name.startswith("blocks.")}
    if numbers.depth > len(blocks):
        raise checkpoint.failed(
            f"config.json has a tower of {numbers.depth} layers, and the files have {len(blocks)}"
        )
    arrays = _as_products(arrays, numbers)
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    stated = {TOWER.sub("", name): each for name, each in quantization.items()}
    tower = QwenTower(numbers)
    if device is Device.CPU and not is_packed:
        arrays = dequantize(checkpoint, arrays, stated)
    elif any(name.endswith(".scales") for name in arrays):
        with checkpoint.blame("the quantized weights of its tower: "):
            _quantize(tower, arrays, stated)
    shapes = {name: tuple(array.shape) for name, array in _named(tower)}
    tower.load_weights(list(fit_weights(checkpoint, arrays, shapes).items()))
    floating = next(
        (each.dtype for each in arrays.values() if mx.issubdtype(each.dtype, mx.floating)),
        mx.float32,
    )
    tower.set_dtype(pick_dtype(device, dtype, floating))
    if device is Device.CPU and tower.dtype == mx.float32:
        tower.compute_on_cpu()
    tower.eval()
    yield from read_in_slices(checkpoint, [array for _, array in _named(tower)])
    return tower


def _named(tower: QwenTower) -> list[tuple[str, mx.array]]:
    named: Any = tree_flatten(tower.parameters())  # type: ignore[no-untyped-call]
    return list(named)


def _as_products(arrays: Mapping[str, mx.array], numbers: QwenVision) -> dict[str, mx.array]:
    """Return a tower's arrays with the projection of patches as a matrix."""
    old, new = "patch_embed.proj.", "patch_embed."
    products = {name.replace(old, new): each for name, each in arrays.items()}
    name = "patch_embed.weight"
    projection = products.get(name)
    # (hidden, channels, frames, rows, columns), but mlx-vlm has channels last.
    if projection is not None and projection.ndim == 5:
        if projection.shape[1] != numbers.in_channels:
            projection = projection.transpose(0, 4, 1, 2, 3)
        products[name] = projection.reshape(len(projection), -1)
    return products


def _quantize(
    tower: QwenTower, arrays: Mapping[str, mx.array], quantization: Mapping[str, Any]
) -> None:
    """Quantize the modules that have scales in the files."""

    def numbers_of(path: str, _: Any) -> bool | dict[str, Any]:
        if f"{path}.scales" not in arrays:
            return False
        stated = quantization.get(path)
        numbers = stated if isinstance(stated, Mapping) else quantization
        known = ("group_size", "bits", "mode")
        return {name: numbers[name] for name in known if name in numbers}

    quantize(tower, class_predicate=numbers_of)
