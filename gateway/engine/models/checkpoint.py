"""Reads a model's folder, its JSON files and safetensors, and counts the memory they need.

Pickled weights are never opened, because unpickling runs the code in them.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import mlx.core as mx

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.counts import check_counts, text_config
from gateway.errors import ModelLoadFailed, Overloaded, Unavailable
from gateway.panics import as_exception
from gateway.registry import is_gguf

_INDEX = "model.safetensors.index.json"
# A disk with 2.5 GB/s reads this in 0.1 s.
SLICE_BYTES: Final = 256 << 20
# The longest header that the format allows.
HEADER_BYTES: Final = 100_000_000
# mlx-lm's OLMo class calls sys.exit if a package is missing.
MISSING_PACKAGE: Final = "mlx-lm's class for this model_type needs a package that is not installed"
KV_GROUP_SIZES: Final = (64, 32)
# Names of weights for images, sound or drafts.
TOWER: Final = r"visual|(embed_)?(vision|audio)\w*|\w*(projector|tower|embedder)|mtp\w*"
_TOWER: Final = re.compile(rf"(^|.*\.)({TOWER})(\..*|$)")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array in a safetensors file."""

    dtype: str  # as the file names it, such as `BF16`
    shape: tuple[int, ...]
    nbytes: int


class Listing(Protocol):
    """A model's folder or GGUF file, described before its weights are read."""

    def failed(self, reason: str) -> ModelLoadFailed: ...

    def config(self) -> Mapping[str, Any]:
        """Return config.json, or the equivalent of a GGUF file."""

    def tensors(self) -> Mapping[str, Tensor]:
        """List every array by its name in mlx-lm's model."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, and the name that callers know the model by.

    Its methods raise ModelLoadFailed for faulty files.
    """

    name: str
    folder: Path

    def failed(self, reason: str) -> ModelLoadFailed:
        return ModelLoadFailed(self.name, reason)

    @contextlib.contextmanager
    def blame(self, about: str = "") -> Iterator[None]:
        """Turn any exception raised inside into ModelLoadFailed."""
        try:
            yield
        except BaseException as error:
            reason = as_exception(error)
            raise self.failed(f"{about}{type(reason).__name__}: {reason}") from error

    def inside(self, path: str) -> "Checkpoint":
        """Return the checkpoint of a subfolder. The path may not leave this folder."""
        folder = (self.folder / path).resolve()
        if not folder.is_relative_to(self.folder.resolve()):
            raise self.failed(f"modules.json points outside the model's folder: {path}")
        return Checkpoint(self.name, folder)

    def read_json(self, file: str) -> Any:
        """Return the content of a JSON file, or None if there is no file."""
        path = self.folder / file
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise self.failed(f"{file} is not valid JSON: {error}") from error

    def read_object(self, file: str) -> dict[str, Any]:
        content = self.read_json(file)
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise self.failed(f"{file} holds no JSON object")
        if file == "config.json":
            try:
                check_counts(content)
            except (ValueError, RecursionError) as error:
                raise self.failed(f"{file}: {error}") from error
        return content

    def config(self) -> dict[str, Any]:
        config = self.read_object("config.json")
        if not isinstance(config.get("text_config") or {}, dict):
            raise self.failed("config.json: text_config is no object")
        return config

    @contextlib.contextmanager
    def reading_config(self) -> Iterator[None]:
        """Turn errors from reading config.json's keys into ModelLoadFailed."""
        try:
            yield
        except KeyError as error:
            raise self.failed(f"config.json has no {error.args[0]}") from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.failed(f"config.json has an invalid value: {error}") from error

    def read_modules(self) -> list[tuple[str, str]] | None:
        """Return each module's class name and path in sentence-transformers' modules.json."""
        listing = self.read_json("modules.json")
        if listing is None:
            return None
        try:
            return [(str(part["type"]).rpartition(".")[2], str(part["path"])) for part in listing]
        except (TypeError, KeyError) as error:
            raise self.failed("modules.json is no list of modules with type and path") from error

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
        has_towers = self.config().get("model_type") == "muse_spark"  # only this class uses them
        return {
            name: tensor
            for name, tensor in self.all_tensors().items()
            if has_towers or not _TOWER.fullmatch(name)
        }

    def all_tensors(self) -> dict[str, Tensor]:
        files = self._weight_files()
        return {name: tensor for file in files for name, tensor in self.header(file).items()}

    def header(self, file: str) -> dict[str, Tensor]:
        """Read one file's header: https://huggingface.co/docs/safetensors/index#format."""
        path = self.folder / file
        try:
            with path.open("rb") as content:
                length = int.from_bytes(content.read(8), "little")
                there = path.stat().st_size
                if length > min(there, HEADER_BYTES):
                    raise ValueError("its header is cut off or missing")
                arrays = json.loads(content.read(length))
            arrays.pop("__metadata__", None)
            tensors = {name: _tensor(array) for name, array in arrays.items()}
            expected_size = 8 + length + max(array["data_offsets"][1] for array in arrays.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.failed(f"{file} is not a whole safetensors file: {error}") from error
        if there < expected_size:
            size = f"it has {there:,} of {expected_size:,} bytes"
            raise self.failed(f"{file} is not a whole safetensors file: {size}")
        return tensors

    def _weight_files(self) -> list[str]:
        if (self.folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        index = self.read_object(_INDEX)
        if index:
            shards = sorted(set(index.get("weight_map", {}).values()))
            absent = [shard for shard in shards if not (self.folder / shard).is_file()]
            if absent or not shards:
                raise self.failed(f"{_INDEX} names missing shards: {join_names(absent)}")
            return shards
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt") for p in self.folder.glob(pattern))
        if pickled:
            raise self.failed(
                f"only safetensors weights are loaded, and the folder has {join_names(pickled)}: "
                "convert it to model.safetensors"
            )
        files = sorted(p.name for p in self.folder.glob("*") if is_gguf(p.name))
        if files:
            raise self.failed(f"its folder has {files[0]}: `source:` must name the file itself")
        raise self.failed(f"no model.safetensors in {self.folder}")


def _tensor(array: Mapping[str, Any]) -> Tensor:
    shape, (start, end) = array["shape"], array["data_offsets"]
    numbers = [*shape, start, end - start]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(
            f"it places an array of shape {shape!r:.60} at bytes {start!r:.20} to {end!r:.20}"
        )
    return Tensor(array["dtype"], tuple(shape), end - start)


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


def join_names(names: Iterable[str], limit: int = 5) -> str:
    names = sorted(names)
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


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

    Returns 0 if the config lacks the usual keys.
    """
    config = text_config(checkpoint.config())
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
