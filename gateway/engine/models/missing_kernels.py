"""Replace the layers whose products a device has no kernel for.

MLX reports a missing kernel only when a product is evaluated, so the load tries each kind of
product.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from gateway.engine.device import Device
from gateway.engine.device_faults import classify
from gateway.engine.models.checkpoint import SLICE_BYTES, slices
from gateway.errors import Fault

_ROWS: Final = (1, 9)  # tokens in a short and in a long pass, which use different kernels
_SORTED_ROWS: Final = 64  # mlx-lm sorts this many rows or more by expert
# The most choices per expert for which the chosen experts' weights are copied.
_COPIED_SHARE: Final = 1 / 4
_FLOATING_KINDS: Final[Mapping[Any, Any]] = {
    QuantizedLinear: Linear,
    QuantizedEmbedding: Embedding,
    QuantizedMultiLinear: MultiLinear,
    QuantizedSwitchLinear: SwitchLinear,
}
_SwitchLinear: Any = SwitchLinear  # untyped in mlx-lm
_Layers = dict[str, Any]  # by path


@dataclass(frozen=True, slots=True)
class WidenedWeights:
    """Quantized layers that are dequantized for lack of a kernel."""

    model: str
    layers: int
    shapes: tuple[str, ...]
    stored_bytes: int  # quantized
    bytes: int  # dequantized
    total_bytes: int  # the whole model's, dequantized


Report = Callable[[WidenedWeights], None]


class LoopedExperts(_SwitchLinear):  # type: ignore[misc]
    """One projection of a mixture's experts, computed without mx.gather_mm."""

    def __init__(self, layer: Any) -> None:
        super(_SwitchLinear, self).__init__()
        for name, array in layer.parameters().items():
            self[name] = array

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Multiply x, (…, 1, in), with the experts in `indices`, (…), to (…, 1, out)."""
        weight: mx.array = self["weight"].swapaxes(-1, -2)
        if indices.size <= _COPIED_SHARE * self.num_experts:
            product = x @ weight[indices]
        else:
            product = mx.zeros((*indices.shape, x.shape[-2], self.output_dims), x.dtype)
            for expert in range(self.num_experts):
                is_chosen = (indices == expert)[..., None, None]
                product = mx.where(is_chosen, x @ weight[expert], product)
        if "bias" in self:
            product = product + mx.expand_dims(self["bias"][indices], -2)
        return product


def replace_missing(
    name: str, model: Any, device: Device, dtype: mx.Dtype, report: Report | None = None
) -> Generator[None]:
    """Try each shape of product once, in steps, and replace the layers without a kernel.

    `report` is called before the dequantized weights take memory, and may raise an error to stop.
    Must run on the lane.
    """
    if device is not Device.CPU:  # a CPU has kernels for all quantized layers
        layers = yield from _find_missing(model, dtype, *_FLOATING_KINDS)
        if layers:
            widened = widen(model, dtype, layers)
            if report is not None:
                report(_describe(name, model, layers, widened))
            layers.clear()  # frees each layer once its replacement is evaluated
            for arrays in slices(_arrays(widened), SLICE_BYTES):
                mx.eval(arrays)
                yield
    mixtures = yield from _find_missing(model, dtype, SwitchLinear)
    _put(model, {path: LoopedExperts(layer) for path, layer in mixtures.items()})


def widen(model: Any, dtype: mx.Dtype, layers: _Layers | None = None) -> _Layers:
    """Replace layers by dequantized ones that are not evaluated yet; return the new layers.

    None means all quantized layers, whose weights may be unread.
    """
    is_read = layers is not None
    if layers is None:
        layers = {path: layer for path, layer in _named(model) if type(layer) in _FLOATING_KINDS}
    widened = {path: _float(layer, dtype, is_read=is_read) for path, layer in layers.items()}
    _put(model, widened)
    return widened


def has_kernel(product: Callable[[], mx.array]) -> bool:
    """Evaluate a product; return False if the device has no kernel for it."""
    try:
        mx.eval(product())
    except RuntimeError as error:
        if classify(error) is not Fault.ROW:
            raise
        return False
    return True


def can_gather(dtype: mx.Dtype) -> bool:
    """Return True if mx.gather_mm supports a type. Evaluates, so it must not run in a pass."""
    factors, index = mx.zeros((2, 8, 8), dtype), mx.array([0])
    return has_kernel(lambda: mx.gather_mm(factors[:1], factors, rhs_indices=index))


def _find_missing(model: Any, dtype: mx.Dtype, *kinds: Any) -> Generator[None, None, _Layers]:
    verdicts: dict[tuple[Any, ...], bool] = {}
    missing: _Layers = {}
    for path, layer in _named(model):
        if type(layer) not in kinds:
            continue
        shape = (type(layer), layer.weight.shape, layer.weight.dtype, *quantization_of(layer))
        if shape not in verdicts:
            verdicts[shape] = all(map(has_kernel, _trials(layer, dtype)))
            yield
        if not verdicts[shape]:
            missing[path] = layer
    return missing


def _trials(layer: Any, dtype: mx.Dtype) -> Iterator[Callable[[], mx.array]]:
    columns, rows = dimensions(layer)
    kind, dtype = type(layer), _number_type(layer, dtype)
    for count in _ROWS:
        x, ids = mx.zeros((1, count, columns), dtype), mx.zeros((1, count), mx.uint32)
        if kind is QuantizedEmbedding:
            yield partial(layer, ids)
            yield partial(layer.as_linear, x)
        elif kind is QuantizedMultiLinear:
            heads = layer.weight.shape[0]
            yield partial(layer, mx.zeros((1, heads, count, columns), dtype))
            yield partial(layer, mx.zeros((1, heads, count, rows), dtype), transpose=False)
        elif kind is QuantizedLinear:
            yield partial(layer, x)
        else:
            yield partial(layer, x[:, :, None, None], ids[:, :, None])
    if kind in (QuantizedSwitchLinear, SwitchLinear):
        x, ids = mx.zeros((_SORTED_ROWS, 1, columns), dtype), mx.zeros(_SORTED_ROWS, mx.uint32)
        yield partial(layer, x, ids, sorted_indices=True)


def _float(layer: Any, dtype: mx.Dtype, *, is_read: bool) -> Any:
    kind, dtype = _FLOATING_KINDS[type(layer)], _number_type(layer, dtype)
    packed = [layer[part] for part in ("weight", "scales")]
    packed.append(layer.get("biases"))
    # The CPU dequantizes the layer if the device cannot.
    stream = None
    few = [part if part is None else part[..., :1, :] for part in packed]
    if is_read and not has_kernel(lambda: _unpack(layer, few, dtype, None)):
        stream = mx.cpu
    scales = layer.get("global_scale")
    if scales is not None:  # one global scale for each expert
        experts = zip(*packed[:2], scales, strict=True)
        weight = mx.stack([_unpack(layer, [*of, None], dtype, stream, s) for *of, s in experts])
    else:
        weight = _unpack(layer, packed, dtype, stream)
    has_bias = {"bias": "bias" in layer} if kind in (Linear, SwitchLinear) else {}
    floating = kind(*weight.shape[::-1], **has_bias)
    floating.weight = weight
    if "bias" in layer:
        floating.bias = layer.bias
    return floating


def _unpack(
    layer: Any,
    packed: list[mx.array | None],
    dtype: mx.Dtype,
    stream: Any,
    scale: mx.array | None = None,
) -> mx.array:
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    unpack: Any = mx.dequantize
    weight: mx.array = unpack(*packed, **how, global_scale=scale, dtype=dtype, stream=stream)
    return weight


def _describe(name: str, model: Any, layers: _Layers, widened: _Layers) -> WidenedWeights:
    shapes = {
        f"{type(layer).__name__} {'x'.join(map(str, dimensions(layer)))} of {layer.bits} bits, "
        f"group {layer.group_size}, {layer.mode}"
        for layer in layers.values()
    }
    stored, after = (sum(array.nbytes for array in _arrays(part)) for part in (layers, widened))
    total = sum(array.nbytes for array in _arrays({"": model}))
    return WidenedWeights(name, len(layers), tuple(sorted(shapes)), stored, after, total)


def _number_type(layer: Any, default: mx.Dtype) -> mx.Dtype:
    """Return the type of a layer's results: `default` if its scales are exponents."""
    dtype: mx.Dtype = layer.get("scales", layer.weight).dtype
    if mx.issubdtype(dtype, mx.floating):
        return dtype
    return default


def quantization_of(layer: Any) -> tuple[Any, ...]:
    return tuple(getattr(layer, part, None) for part in ("group_size", "bits", "mode"))


def dimensions(layer: Any) -> tuple[int, int]:
    """Return a layer's numbers of inputs and outputs."""
    rows, columns = layer.weight.shape[-2:]
    if "scales" in layer:
        columns = layer.scales.shape[-1] * layer.group_size
    return columns, rows


def _named(model: Any) -> list[tuple[str, Any]]:
    named: Any = model.named_modules()
    return list(named)


def _put(model: Any, layers: _Layers) -> None:
    model.update_modules(tree_unflatten(list(layers.items())))


def _arrays(layers: _Layers) -> list[mx.array]:
    named: Any = tree_flatten([layer.parameters() for layer in layers.values()])
    return [array for _, array in named]
