"""A LoRA adapter's folder, as mlx-lm's trainer writes it: read, or refused with a reason.

adapter_config.json has the rank and the scale; adapters.safetensors has, for each projection, the
two low-rank factors: `<module>.lora_a`, (in, rank), and `<module>.lora_b`, (rank, out).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from gateway.engine.models.checkpoint import Checkpoint, Tensor, join_names

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapters.safetensors"
_PEFT_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_DTYPES: Final = ("F32", "F16", "BF16")
_FACTORS: Final = ("lora_a", "lora_b")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter whose headers are read."""

    folder: Checkpoint  # names the adapter in errors, too
    rank: int
    scale: float
    # Of its factors, by module.
    shapes: Mapping[str, tuple[Shape, Shape]]

    @property
    def weights(self) -> int:
        """Count the numbers of all factors."""
        return sum(math.prod(shape) for both in self.shapes.values() for shape in both)

    def factors(self) -> dict[str, tuple[mx.array, mx.array]]:
        """Open the factors of each module; they are read when evaluated. On the lane."""
        with self.folder.blame():
            arrays = mx.load(str(self.folder.folder / WEIGHTS))
            assert isinstance(arrays, dict)  # what mx.load gives for safetensors
            return {
                module: (arrays[f"{module}.lora_a"], arrays[f"{module}.lora_b"])
                for module in self.shapes
            }


def read_adapter(name: str, folder: Path) -> AdapterFiles:
    """Read an adapter's config and the header of its weights; none of the weights' bytes.

    Whether they fit a base is found when they meet it. Raises ModelLoadFailed.
    """
    files = Checkpoint(name, folder)
    if not (folder / WEIGHTS).is_file():
        if any((folder / file).is_file() for file in _PEFT_WEIGHTS):
            raise files.failed(
                f"{folder} has an adapter in PEFT's format; mlx-lm's is read, whose weights are "
                f"in {WEIGHTS}"
            )
        raise files.failed(f"no {WEIGHTS} in {folder}")
    config = files.read_object(CONFIG)
    if not config:
        raise files.failed(f"no {CONFIG} in {folder}")
    rank, scale = _read_config(files, config)
    return AdapterFiles(files, rank, scale, _pair(files, files.header(WEIGHTS), rank))


def _read_config(files: Checkpoint, config: Mapping[str, Any]) -> tuple[int, float]:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise files.failed(f"{CONFIG} has fine_tune_type {kind!r}; only 'lora' is served")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        raise files.failed(f"{CONFIG} has no lora_parameters")
    rank: object = parameters.get("rank")
    scale: object = parameters.get("scale")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise files.failed(f"{CONFIG} has the rank {rank!r}, not a whole number from 1 on")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
        raise files.failed(f"{CONFIG} has the scale {scale!r}, not a number")
    return rank, float(scale)


def _pair(
    files: Checkpoint, tensors: Mapping[str, Tensor], rank: int
) -> dict[str, tuple[Shape, Shape]]:
    """Return the shapes of each module's two factors, or raise naming the first that is wrong."""
    if not tensors:
        raise files.failed(f"{WEIGHTS} has no weights")
    unknown = [name for name in tensors if name.rpartition(".")[2] not in _FACTORS]
    if unknown:
        is_dora = any(name.endswith(".m") for name in unknown)
        kind = "DoRA's magnitudes" if is_dora else "weights that are no lora_a or lora_b"
        raise files.failed(f"{WEIGHTS} has {kind}: {join_names(unknown)}")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise files.failed(f"{name} is of type {tensor.dtype}, not F32, F16 or BF16")
        if len(tensor.shape) != 2 or not all(type(n) is int and n > 0 for n in tensor.shape):
            raise files.failed(
                f"{name} is {tensor.shape}, not a matrix: only linear projections are adapted"
            )
        expected = (rank, tensor.shape[1])
        if name.endswith(".lora_a"):
            expected = (tensor.shape[0], rank)
        if tensor.shape != expected:
            raise files.failed(
                f"{name} is {tensor.shape}, not {expected}, as the rank in {CONFIG} is {rank}"
            )
    modules = {name.rpartition(".")[0] for name in tensors}
    names = [f"{module}.{factor}" for module in sorted(modules) for factor in _FACTORS]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise files.failed(f"{WEIGHTS} lacks {join_names(missing)}")
    return {
        module: (tensors[f"{module}.lora_a"].shape, tensors[f"{module}.lora_b"].shape)
        for module in sorted(modules)
    }
