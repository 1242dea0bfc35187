"""A GGUF file → mlx-lm's model of it: built by its config, read a chunk a step. On the lane."""

import math
from collections.abc import Generator, Iterator, Mapping
from io import RawIOBase
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.decoder_kernels import use_cpu_kernels
from gateway.engine.models.gguf.architectures import ROPE_FACTORS
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint
from gateway.engine.models.gguf.header import GgufError, TensorInfo, stamp_of
from gateway.engine.models.gguf.quants import GROUP, PACKED_BITS, Bytes, dequantize, pack

# A million weights are decoded in some 5 ms, and more at once do not stay in the processor's cache.
# Others may have the lane between two chunks.
CHUNK_WEIGHTS: Final = 1 << 20
_DTYPES: Final = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


class SlowedRoPE:
    """Rotary positions whose every frequency is divided by a factor of its own.

    So are Llama 3.1's, of which GGUF files keep the factors and not the rule behind them.
    """

    def __init__(self, dims: int, base: float, factors: mx.array) -> None:
        self.dims = dims
        self._freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims) * factors

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate (…, tokens, dims), the first token being the `offset`th."""
        return mx.fast.rope(
            x, self.dims, traditional=True, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def read_gguf_decoder(
    checkpoint: GgufCheckpoint, *, device: Device, dtype: str | None, is_packed: bool
) -> Generator[None, None, Any]:
    """Build a model and read its weights, in steps; return it.

    Weights that MLX can hold quantised stay so on a GPU, and on a CPU if it `is_packed`. Raises
    ModelLoadFailed where the file no longer has what its header listed.
    """
    is_packed = is_packed or device is not Device.CPU
    target = pick_dtype(device, dtype, _DTYPES[checkpoint.dtype])
    with checkpoint.blame():
        model = _build(checkpoint, is_packed)
    if device is Device.CPU:
        use_cpu_kernels(model)
    # Unbuffered: what is read goes straight to where it is decoded.
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
    """Make the model, whose arrays are promises until they are replaced: nothing is computed."""
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
    if built != listed:  # which the metadata was checked for
        odd = sorted(name for name in built.keys() | listed if built.get(name) != listed.get(name))
        raise GgufError(f"mlx-lm's model has other weights: {', '.join(odd[:5])}")
    return model


def _floating(
    file: RawIOBase, info: TensorInfo, target: mx.Dtype
) -> Generator[None, None, mx.array]:
    """Read a tensor as floating numbers, a chunk a step."""
    numbers = np.empty((_rows(info), info.shape[-1]), _numpy(target))
    for rows, raw in _chunks(file, info):
        with np.errstate(all="ignore"):  # what a broken file makes infinite is seen in its answers
            numbers[rows] = dequantize(info.type.name, raw)
        yield
    return mx.array(numbers.reshape(info.shape)).astype(target)


def _pack(
    file: RawIOBase, info: TensorInfo, target: mx.Dtype, module: str
) -> Generator[None, None, dict[str, mx.array]]:
    """Read a matrix as MLX quantises them, a chunk a step: three arrays by their names."""
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
    """Read a tensor's rows, some at a time: which they are, and their bytes, a row each."""
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
    """Return what numbers are decoded into on their way to MLX, which alone has bfloat16."""
    if target == mx.float16:
        return np.float16
    return np.float32


def _slow_down(model: Any, config: Mapping[str, Any], factors: mx.array) -> None:
    """Put rotations by a file's own factors in the place of the model's."""
    rope = SlowedRoPE(config["head_dim"], config["rope_theta"], factors)
    for layer in model.layers:
        layer.self_attn.rope = rope


def _factors(file: RawIOBase, info: TensorInfo, dims: int) -> mx.array:
    """Read the factors of the frequencies, one for each pair of dimensions."""
    if info.type.name != "F32" or info.shape != (dims // 2,):
        raise GgufError(f"{info.name} is {info.type.name} {info.shape}, not F32 ({dims // 2},)")
    ((_, raw),) = _chunks(file, info)
    factors = dequantize("F32", raw).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise GgufError(f"{info.name} has factors that make no sense")
    return mx.array(factors)
