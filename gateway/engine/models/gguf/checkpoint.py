"""Describes a GGUF file as a `Listing`, and reads it in chunks as an mlx-lm model.

Weights stay quantized if MLX can pack their type, except on a CPU without `is_packed`. All other
weights are dequantized.
"""

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoder_kernels import use_cpu_kernels
from gateway.engine.models.folder import Tensor
from gateway.engine.models.gguf.architectures import ROPE_FACTORS, TensorPlace, places, read_config
from gateway.engine.models.gguf.header import GgufError, Header, TensorInfo, read_header, stamp_of
from gateway.engine.models.gguf.quants import (
    FLOATS,
    GROUP,
    PACKED_BITS,
    READ,
    Bytes,
    dequantize,
    pack,
)
from gateway.errors import ModelLoadFailed
from gateway.registry import is_gguf

_ITEMSIZE: Final = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Widened:
    """The types of weights that must be dequantized, and their bytes before and after."""

    types: tuple[str, ...]
    stored_bytes: int
    bytes: int


class GgufCheckpoint:
    """A chat model's GGUF file, and the name that callers know the model by."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        with self.blame():
            self.header: Header = read_header(path)
            config = read_config(self.header)
            self.places: Mapping[str, TensorPlace] = places(config, self.header)
            self._check_types()
        self._config = {**config, **self._quantization()}
        self.dtype = self._floating()

    def failed(self, reason: str) -> ModelLoadFailed:
        return ModelLoadFailed(self.name, f"{self.path.name}: {reason}")

    @contextlib.contextmanager
    def blame(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise self.failed(str(error)) from error
        except Exception as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error

    def config(self) -> dict[str, Any]:
        return self._config

    def kind(self, name: str) -> str:
        return self.header.tensors[self.places[name].tensor].type.name

    def packed_bits(self, name: str) -> int | None:
        """Return a weight's bits if MLX can hold the weight quantized, or else None."""
        if len(self.places[name].shape) != 2:
            return None
        return PACKED_BITS.get(self.kind(name))

    def tensors(self) -> dict[str, Tensor]:
        listed: dict[str, Tensor] = {}
        for name, place in self.places.items():
            bits = self.packed_bits(name)
            if bits is None:
                listed[name] = self._floats(place.shape)
                continue
            rows, columns = place.shape
            module = name.removesuffix(".weight")
            listed[name] = Tensor("U32", (rows, columns * bits // 32), rows * columns * bits // 8)
            for part in ("scales", "biases"):
                listed[f"{module}.{part}"] = self._floats((rows, columns // GROUP))
        return listed

    def widen_types(self) -> Widened | None:
        """Describe the weights that no device can hold quantized; None if there are none."""
        grown = [
            name
            for name in self.places
            if self.packed_bits(name) is None and self.kind(name) not in FLOATS
        ]
        if not grown:
            return None
        stored = [self.header.tensors[self.places[name].tensor].nbytes for name in grown]
        floats = [self._floats(self.places[name].shape).nbytes for name in grown]
        types = sorted({self.kind(name) for name in grown})
        return Widened(tuple(types), sum(stored), sum(floats))

    def _quantization(self) -> dict[str, Any]:
        bits = {name: self.packed_bits(name) for name in self.places}
        modules = {
            name.removesuffix(".weight"): {"group_size": GROUP, "bits": count}
            for name, count in bits.items()
            if count is not None
        }
        if not modules:
            return {}
        return {"quantization": {"group_size": GROUP, "bits": 4, **modules}}

    def _floats(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self.dtype, shape, math.prod(shape) * _ITEMSIZE[self.dtype])

    def _floating(self) -> str:
        """Choose one type for all floating weights, because a mixture would be slower.

        Norms don't count: they are always float32. float16 cannot hold bfloat16's range.
        """
        kinds = {self.kind(name) for name, place in self.places.items() if len(place.shape) > 1}
        if "BF16" in kinds:
            return "BF16"
        if kinds == {"F32"}:
            return "F32"
        return "F16"

    def _check_types(self) -> None:
        unread = sorted({self.kind(name) for name in self.places} - READ)
        if unread:
            raise GgufError(
                f"it has weights of types that are not read here: {', '.join(unread)}; "
                f"those that are read: {', '.join(sorted(READ))}"
            )


def open_checkpoint(name: str, path: Path) -> Checkpoint | GgufCheckpoint:
    """Return the checkpoint of a folder or a GGUF file. Raises ModelLoadFailed."""
    if is_gguf(path.name):
        return GgufCheckpoint(name, path)
    return Checkpoint(name, path)


# Weights in a chunk. A chunk takes about 5 ms, and fits into the processor's cache.
CHUNK_WEIGHTS: Final = 1 << 20
_DTYPES: Final = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


class SlowedRoPE:
    """Rotary positions whose frequencies are divided by factors, as in Llama 3.1."""

    def __init__(self, dims: int, base: float, factors: mx.array) -> None:
        self.dims = dims
        self._freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims) * factors

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate `x`, (…, tokens, dims), whose first token has the position `offset`."""
        return mx.fast.rope(
            x, self.dims, traditional=True, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def read_gguf_decoder(
    checkpoint: GgufCheckpoint, *, device: Device, dtype: str | None, is_packed: bool
) -> Generator[None, None, Any]:
    """Build a model, read its weights in steps, and return it.

    Raises ModelLoadFailed if the file has changed since its header was read.
    """
    is_packed = is_packed or device is not Device.CPU
    target = pick_dtype(device, dtype, _DTYPES[checkpoint.dtype])
    with checkpoint.blame():
        model = _build(checkpoint, is_packed)
    if device is Device.CPU:
        use_cpu_kernels(model)
    # The file is unbuffered, so bytes are read straight into arrays.
    with checkpoint.blame(), checkpoint.path.open("rb", buffering=0) as file:
        if stamp_of(file) != checkpoint.header.stamp:
            raise GgufError("it has changed since its header was read")
        tensors = checkpoint.header.tensors
        if ROPE_FACTORS in tensors:
            config = checkpoint.config()
            factors = _factors(file, tensors[ROPE_FACTORS], config["head_dim"])
            _slow_down(model, config, factors)
        for name, place in checkpoint.places.items():
            info = tensors[place.tensor]
            if is_packed and checkpoint.packed_bits(name) is not None:
                arrays = yield from _pack(file, info, target, name.removesuffix(".weight"))
            else:
                arrays = {name: (yield from _floating(file, info, target))}
            mx.eval(arrays)
            model.load_weights(list(arrays.items()), strict=False)
    return model


def _build(checkpoint: GgufCheckpoint, is_packed: bool) -> Any:
    """Build the model with lazy arrays, which are replaced before they are computed."""
    config = checkpoint.config()
    model_class, args_class = _get_classes(config)
    model: Any = model_class(args_class.from_dict(config))
    modules = config.get("quantization")
    if is_packed and modules:
        quantize(model, class_predicate=lambda path, _: modules.get(path, False))
    named: Any = tree_flatten(model.parameters())
    built = {name: tuple(array.shape) for name, array in named}
    if is_packed:
        listed = {name: tensor.shape for name, tensor in checkpoint.tensors().items()}
    else:
        listed = {name: place.shape for name, place in checkpoint.places.items()}
    if built != listed:
        odd = sorted(name for name in built.keys() | listed if built.get(name) != listed.get(name))
        raise GgufError(f"mlx-lm's model has other weights than the file: {', '.join(odd[:5])}")
    return model


def _floating(
    file: RawIOBase, info: TensorInfo, target: mx.Dtype
) -> Generator[None, None, mx.array]:
    numbers = np.empty((_rows(info), info.shape[-1]), _numpy(target))
    for rows, raw in _chunks(file, info):
        with np.errstate(all="ignore"):  # broken files may hold infinities
            numbers[rows] = dequantize(info.type.name, raw)
        yield
    return mx.array(numbers.reshape(info.shape)).astype(target)


def _pack(
    file: RawIOBase, info: TensorInfo, target: mx.Dtype, module: str
) -> Generator[None, None, dict[str, mx.array]]:
    rows, columns = info.shape
    words = columns * PACKED_BITS[info.type.name] // 32
    weight = np.empty((rows, words), np.uint32)
    scales, biases = (np.empty((rows, columns // GROUP), _numpy(target)) for _ in range(2))
    for chunk, raw in _chunks(file, info):
        with np.errstate(all="ignore"):
            packed = pack(info.type.name, raw)
            weight[chunk], scales[chunk], biases[chunk] = (
                packed.weight,
                packed.scales,
                packed.biases,
            )
        yield
    return {
        f"{module}.weight": mx.array(weight),
        f"{module}.scales": mx.array(scales).astype(target),
        f"{module}.biases": mx.array(biases).astype(target),
    }


def _chunks(file: RawIOBase, info: TensorInfo) -> Iterator[tuple[slice, Bytes]]:
    """Yield slices of a tensor's rows, and the bytes of each slice, (rows, bytes of a row)."""
    rows = _rows(info)
    chunk_rows = max(1, CHUNK_WEIGHTS // info.shape[-1])
    file.seek(info.offset)
    for start in range(0, rows, chunk_rows):
        stop = min(start + chunk_rows, rows)
        raw = np.empty((stop - start, info.nbytes // rows), np.uint8)
        _fill(file, raw)
        yield slice(start, stop), raw


def _fill(file: RawIOBase, raw: Bytes) -> None:
    left = memoryview(raw.reshape(-1))  # type: ignore[arg-type]  # numpy's stubs know no Buffer
    while left:
        count = file.readinto(left)
        if not count:
            raise GgufError("it was cut off while it was read")
        left = left[count:]


def _rows(info: TensorInfo) -> int:
    return math.prod(info.shape[:-1])


def _numpy(target: mx.Dtype) -> type[np.floating[Any]]:
    if target == mx.float16:
        return np.float16
    return np.float32


def _slow_down(model: Any, config: Mapping[str, Any], factors: mx.array) -> None:
    rope = SlowedRoPE(config["head_dim"], config["rope_theta"], factors)
    for layer in model.layers:
        layer.self_attn.rope = rope


def _factors(file: RawIOBase, info: TensorInfo, dims: int) -> mx.array:
    if info.type.name != "F32" or info.shape != (dims // 2,):
        raise GgufError(f"{info.name} is {info.type.name} {info.shape}, not F32 ({dims // 2},)")
    ((_, raw),) = _chunks(file, info)
    factors = dequantize("F32", raw).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise GgufError(f"{info.name} has factors that are not positive and finite")
    return mx.array(factors)
