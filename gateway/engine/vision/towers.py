"""Loading of a checkpoint's vision tower."""

from collections.abc import Generator, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.checkpoint import Checkpoint, dequantize, fit_weights, read_in_slices
from gateway.engine.models.folder import Tensor
from gateway.engine.vision.families import family_of
from gateway.engine.vision.image_setup import reads_images
from gateway.engine.vision.kinds import Tower, kind_of
from gateway.engine.vision.tower_numbers import read_numbers


def tower_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a tower's arrays by name, none for a model that reads no images."""
    family = family_of(checkpoint.config())
    if family is None or not reads_images(checkpoint.folder):
        return {}
    named = checkpoint.all_tensors().items()
    return {name: each for name, each in named if family.tower.match(name)}


def open_tower(
    checkpoint: Checkpoint, *, device: Device, dtype: str | None, is_packed: bool = False
) -> Generator[None, None, Tower]:
    """Read a checkpoint's tower on the lane, in steps. Raises ModelLoadFailed.

    On a CPU, quantized weights are dequantized unless `is_packed`.
    """
    config = checkpoint.config()
    kind, family = kind_of(config), family_of(config)
    assert family is not None
    with checkpoint.reading_config():
        numbers = read_numbers(config, family)
    weights = checkpoint.weights().items()
    arrays = {family.tower.sub("", name): x for name, x in weights if family.tower.match(name)}
    named = [name.partition(kind.layers)[2] for name in arrays if kind.layers in name]
    layers = len({name.split(".")[0] for name in named})
    if numbers.layers > layers:
        raise checkpoint.failed(
            f"vision_config has a tower of {numbers.layers} layers, and the files have {layers}"
        )
    tower = kind.tower(numbers)
    arrays = tower.arrange(arrays)
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    with checkpoint.blame("the quantization of its tower: "):
        stated: Any = {family.tower.sub("", name): x for name, x in quantization.items()}
        if not all(type(x) is not dict or name not in arrays for name, x in stated.items()):
            raise ValueError("it names an array, not a module")
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
    tower.dtype = pick_dtype(device, dtype, floating)
    tower.set_dtype(tower.dtype)
    if device is Device.CPU and tower.dtype == mx.float32:
        tower.compute_on_cpu()
    tower.eval()
    yield from read_in_slices(checkpoint, [array for _, array in _named(tower)])
    opened: Tower = tower
    return opened


def _named(tower: Any) -> list[tuple[str, mx.array]]:
    named: Any = tree_flatten(tower.parameters())
    return list(named)


def _quantize(tower: Any, arrays: Mapping[str, mx.array], quantization: Mapping[str, Any]) -> None:
    """Quantize the modules that have scales in the files."""

    def numbers_of(path: str, _: Any) -> bool | dict[str, Any]:
        if f"{path}.scales" not in arrays:
            return False
        stated = quantization.get(path)
        numbers = stated if isinstance(stated, Mapping) else quantization
        known = ("group_size", "bits", "mode")
        return {name: numbers[name] for name in known if name in numbers}

    quantize(tower, class_predicate=numbers_of)
