"""Reads a model's weights, and counts the memory that they need."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import mlx.core as mx

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.counts import text_config
from gateway.engine.models.folder import Folder, Tensor, join_names
from gateway.engine.models.head_names import is_later, later_layers
from gateway.errors import ModelLoadFailed, Overloaded, Unavailable
from gateway.panics import as_exception

# A disk with 2.5 GB/s reads this in 0.1 s.
SLICE_BYTES: Final = 256 << 20
# mlx-lm's OLMo class calls sys.exit if a package is missing.
MISSING_PACKAGE: Final = "mlx-lm's class for this model_type needs a package that is not installed"
KV_GROUP_SIZES: Final = (64, 32)
# The drafters of Gemma 4, by model_type.
ASSISTANTS: Final = ("gemma4_assistant", "gemma4_unified_assistant")
# Names of weights for images, sound or drafts.
TOWER: Final = r"visual|(embed_)?(vision|audio)\w*|\w*(projector|tower|embedder)|mtp\w*"
_TOWER: Final = re.compile(rf"(^|.*\.)({TOWER})(\..*|$)")


class Listing(Protocol):
    """A model's folder or GGUF file, described before its weights are read."""

    def failed(self, reason: str) -> ModelLoadFailed: ...

    def config(self) -> Mapping[str, Any]:
        """Return config.json, or the equivalent of a GGUF file."""

    def tensors(self) -> Mapping[str, Tensor]:
        """List every array by its name in mlx-lm's model."""


class Checkpoint(Folder):
    """A model's folder with its weights. Its methods raise ModelLoadFailed for faulty files."""

    __slots__ = ()

    def inside(self, path: str) -> "Checkpoint":
        """Return the checkpoint of a subfolder. The path may not leave this folder."""
        folder = (self.folder / path).resolve()
        if not folder.is_relative_to(self.folder.resolve()):
            raise self.failed(f"modules.json points outside the model's folder: {path}")
        return Checkpoint(self.name, folder)

    def weights(self) -> dict[str, mx.array]:
        """Open the safetensors. Arrays are read when they are evaluated."""
        arrays: dict[str, mx.array] = {}
        for file in self._weight_files():
            try:
                loaded = mx.load(str(self.folder / file))
            except (RuntimeError, ValueError) as error:
                raise self.failed(f"{file} is not a whole safetensors file: {error}") from error
            assert isinstance(loaded, dict)
            arrays.update(loaded)
        return arrays

    def tensors(self) -> dict[str, Tensor]:
        """List the arrays, except weights for images, sound and drafts."""
        config = self.config()
        has_towers = config.get("model_type") == "muse_spark"  # only this class uses them
        later = later_layers(config)
        return {
            name: tensor
            for name, tensor in self.all_tensors().items()
            if (has_towers or not _TOWER.fullmatch(name)) and not is_later(name, later)
        }


def reads_target(checkpoint: Listing) -> bool:
    """Return True if a model only guesses tokens for another one, whose KV it reads."""
    return checkpoint.config().get("model_type") in ASSISTANTS


@contextlib.contextmanager
def reading_tokenizer(checkpoint: Listing) -> Iterator[None]:
    """Turn errors and panics of a tokenizer's loading into ModelLoadFailed."""
    try:
        yield
    except (ModelLoadFailed, Overloaded, Unavailable):
        raise
    except SystemExit as error:  # mlx-lm also imports the model's class, which may exit
        raise checkpoint.failed(MISSING_PACKAGE) from error
    except BaseException as error:
        noun = "tokenizer.json" if isinstance(checkpoint, Checkpoint) else "its tokenizer"
        raise checkpoint.failed(f"{noun} cannot be used: {as_exception(error)}") from error


def fit_weights(
    checkpoint: Checkpoint,
    arrays: Mapping[str, mx.array],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
) -> dict[str, mx.array]:
    """Return the arrays named in `shapes`. Raises ModelLoadFailed if names or shapes differ.

    Names that begin with one of `ignored` are skipped.
    """
    # Unknown weights are refused, since they belong to another architecture than the config's.
    skip = tuple(ignored)
    unknown = [n for n in arrays if n not in shapes and not n.startswith(skip)]
    missing = [n for n in shapes if n not in arrays]
    misshapen = [
        f"{n} is {tuple(arrays[n].shape)}, not {shape}"
        for n, shape in shapes.items()
        if n in arrays and tuple(arrays[n].shape) != shape
    ]
    for what, names in (
        ("weights are missing", missing),
        ("weights are unknown", unknown),
        ("weights have another shape than config.json says", misshapen),
    ):
        if names:
            raise checkpoint.failed(f"{what}: {join_names(names)}")
    return {n: arrays[n] for n in shapes}


def dequantize(
    checkpoint: Checkpoint, arrays: Mapping[str, mx.array], quantization: Mapping[str, Any]
) -> dict[str, mx.array]:
    """Dequantize the weights that have `scales`. Raises ModelLoadFailed."""
    unpacked = dict(arrays)
    for module in [n.removesuffix(".scales") for n in arrays if n.endswith(".scales")]:
        packed = _module_quantization(quantization, module)
        with checkpoint.blame(f"the quantized weights of {module:.60}: "):
            unpacked[f"{module}.weight"] = mx.dequantize(
                unpacked[f"{module}.weight"],
                unpacked.pop(f"{module}.scales"),
                unpacked.pop(f"{module}.biases", None),
                group_size=packed.get("group_size"),
                bits=packed.get("bits"),
                mode=packed.get("mode", "affine"),
            )
    return unpacked


def read_in_slices(
    checkpoint: Checkpoint, arrays: Iterable[mx.array], slice_bytes: int = SLICE_BYTES
) -> Iterator[None]:
    """Read arrays, one slice per step. Raises ModelLoadFailed. Must run on the lane."""
    for slice_arrays in slices(arrays, slice_bytes):
        with checkpoint.blame():
            mx.eval(slice_arrays)
        yield


def slices(arrays: Iterable[mx.array], slice_bytes: int) -> Iterator[list[mx.array]]:
    slice_arrays: list[mx.array] = []
    room = slice_bytes
    for array in arrays:
        if slice_arrays and array.nbytes > room:
            yield slice_arrays
            slice_arrays, room = [], slice_bytes
        slice_arrays.append(array)
        room -= array.nbytes
    if slice_arrays:
        yield slice_arrays


_FLOATING: Final = {
    "F64": mx.float32,
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
}


def weights_bytes(
    checkpoint: Listing,
    device: Device,
    dtype: str | None,
    *,
    is_packed: bool = False,
    tensors: Mapping[str, Tensor] | None = None,
) -> int:
    """Count the bytes that a model's weights, or only `tensors`, take in memory.

    Quantized weights count as dequantized on a CPU unless `is_packed`. Raises ModelLoadFailed.
    """
    if tensors is None:
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
            pass
        elif is_cast and tensor.dtype in _FLOATING:
            total += math.prod(tensor.shape) * itemsize
        else:
            total += tensor.nbytes
    return total


def must_stay_packed(
    checkpoint: Listing, device: Device, dtype: str | None, limit_bytes: int
) -> bool:
    """Return True if dequantized weights would exceed the limit on a CPU."""
    return (
        device is Device.CPU
        and any(name.endswith(".scales") for name in checkpoint.tensors())
        and weights_bytes(checkpoint, device, dtype) > limit_bytes
    )


def kv_bytes(
    checkpoint: Listing,
    device: Device,
    dtype: str | None,
    tokens: int,
    kv_bits: int | None = None,
) -> int:
    """Estimate the bytes of KV for `tokens` tokens, but at most for the model's context.

    Returns 0 if the config lacks the usual keys, or the model has no KV of its own.
    """
    config = text_config(checkpoint.config())
    if reads_target(checkpoint):
        return 0
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        layers = int(config["num_hidden_layers"])
        longest = int(config.get("max_position_embeddings") or tokens)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return 0
    itemsize = pick_dtype(device, dtype, _checkpoint_dtype(checkpoint.tensors())).size
    floating = packed = head * itemsize
    group = kv_group_size(head)
    # Sliding windows and states are never quantized.
    is_plain = set(config.get("layer_types") or ()) <= {"full_attention"}
    if kv_bits is not None and group and is_plain and not config.get("sliding_window"):
        packed = head * kv_bits // 8 + 2 * itemsize * head // group
    # One layer is added, since a layer's KV is copied while a sequence joins or leaves.
    return 2 * (layers * packed + floating) * kv_heads * min(tokens, longest)


def kv_group_size(head: int) -> int | None:
    """Return how many of a head's values share a scale in quantized KV; None if no size fits."""
    return next((size for size in KV_GROUP_SIZES if head % size == 0), None)


def _checkpoint_dtype(tensors: Mapping[str, Tensor]) -> mx.Dtype:
    floating = (_FLOATING[tensor.dtype] for tensor in tensors.values() if tensor.dtype in _FLOATING)
    return next(floating, mx.float32)


def _group_size(checkpoint: Listing, module: str) -> int:
    config = checkpoint.config()
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    size = _module_quantization(quantization, module).get("group_size")
    if not isinstance(size, int):
        raise checkpoint.failed("config.json does not say the group_size of its quantized weights")
    return size


def _module_quantization(quantization: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    stated = quantization.get(module)
    if isinstance(stated, Mapping):
        return stated
    return quantization
