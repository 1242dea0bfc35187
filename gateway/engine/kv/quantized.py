"""Quantized KV: the keys and values of a model's plain layers, in 8 or 4 bits.

MLX quantizes along the head dimension, so tokens can be added and removed as in unquantized KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import ref

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from gateway.engine.device_faults import classify
from gateway.engine.kv.cache import RaggedKVCache
from gateway.engine.models.checkpoint import KV_GROUP_SIZES, Listing, kv_group_size
from gateway.errors import Fault

# Passes of up to this many tokens per row attend to packed keys, which are smaller to read. Longer
# passes dequantize a layer's KV: packed attention would write 4 GB of scores for 2,048 tokens after
# 32,768 (32 heads, 16 bits). Not tuned on Metal.
MOST_PACKED: Final = 8
_TRIED: Final = (1, 2, MOST_PACKED + 1)


@dataclass(frozen=True, slots=True)
class Packing:
    """The parameters of one layer's quantized KV."""

    bits: int
    group_size: int
    most_packed: int = MOST_PACKED  # passes of more tokens per row dequantize; 0: all passes do


class PackedKVCache(RaggedKVCache):
    """The quantized KV of one layer: codes, scales and biases, with the keys' heads first."""

    def __init__(self, packing: Packing, counts: Sequence[int] = (0,)) -> None:
        super().__init__(counts)
        self._packing = packing
        self._gives_packed = False

    def with_rows(self, counts: Sequence[int]) -> RaggedKVCache:
        return PackedKVCache(self._packing, counts)

    @property
    def bits(self) -> int:
        """Return the bits of the keys fetched last. Raises AttributeError if they are dequantized.

        mlx-lm's attention tests this with `hasattr`.
        """
        if not self._gives_packed:
            raise AttributeError("the keys fetched last are dequantized")
        return self._packing.bits

    @property
    def group_size(self) -> int:
        return self._packing.group_size

    @property
    def unpacked_token_bytes(self) -> int:
        codes, scales, _ = self.planes
        return codes.shape[1] * codes.shape[3] * 32 // self._packing.bits * scales.dtype.size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._gives_packed = keys.shape[2] <= self._packing.most_packed
        return super().update_and_fetch(keys, values)

    def floating(self) -> tuple[mx.array, mx.array]:
        self._gives_packed = False
        return super().floating()

    def pack(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        both, how = mx.concatenate([keys, values], axis=1), self._packing
        packed: Any = mx.quantize(both, group_size=how.group_size, bits=how.bits)
        codes, scales, biases = packed
        # `mx.quantize` makes NaN and infinity finite, so NaN is added to the biases.
        zeros = (both * 0).reshape(*scales.shape, how.group_size).sum(axis=-1)
        return [codes, scales, biases + zeros]

    def unpack(self, planes: Sequence[mx.array]) -> tuple[Any, Any]:
        heads, how = planes[0].shape[1] // 2, self._packing
        if self._gives_packed:
            keys, values = (
                tuple(plane[:, part] for plane in planes)
                for part in (slice(heads), slice(heads, None))
            )
            return keys, values
        codes, scales, biases = planes
        both = mx.dequantize(codes, scales, biases, group_size=how.group_size, bits=how.bits)
        return both[:, :heads], both[:, heads:]


def quantize_kv(checkpoint: Listing, model: Any, bits: int, *, is_shared: bool = False) -> None:
    """Make a model quantize the KV of its plain layers to `bits` bits. Must run on the lane.

    A few passes try the quantized caches. They are not evaluated if several ranks share the model,
    because all ranks would have to run them. Raises ModelLoadFailed if quantization is impossible.
    """
    make_plain = _own_caches(model)
    layers = _read(model, make_plain(), (1,))
    packings = [_choose_packing(checkpoint, layer, bits) for layer in layers]
    if not any(packings):
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise checkpoint.failed(
            f"`kv_bits` needs layers with plain KV, and this model's have only {', '.join(kinds)}"
        )
    # The model's attention may not accept packed keys, or the device may lack a kernel for them.
    for tokens in (MOST_PACKED, 0):
        tried = [packing and replace(packing, most_packed=tokens) for packing in packings]
        _set_caches(model, make_plain, tried)
        try:
            _read(model, make_prompt_cache(model), _TRIED, is_evaluated=not is_shared)
        except Exception as error:
            if classify(error) is not Fault.ROW:
                raise
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            return
    raise checkpoint.failed(f"its attention cannot read KV of `kv_bits`: {problem}")


def _choose_packing(checkpoint: Listing, layer: Any, bits: int) -> Packing | None:
    """Return a layer's parameters, given its cache after a token; None if it stays unquantized."""
    if type(layer) is not KVCache or layer.keys is None:
        return None
    size, other = (plane.shape[-1] for plane in layer.keys_and_values())  # type: ignore[no-untyped-call]
    if size != other:
        raise checkpoint.failed(
            f"its keys have {size} numbers a head and its values {other}, as in latent attention; "
            "`kv_bits` needs keys and values of equal size"
        )
    group = kv_group_size(size)
    if group is None:
        raise checkpoint.failed(
            f"its heads have {size} numbers; `kv_bits` needs a multiple of {min(KV_GROUP_SIZES)}"
        )
    return Packing(bits, group)


def _own_caches(model: Any) -> Callable[[], list[Any]]:
    """Return the function with which mlx-lm makes a model's caches."""
    # A strong reference would make a cycle, because the model will refer to the function.
    kind: Any = type(model)
    plain: Any = KVCache  # untyped in mlx-lm
    model_ref: Callable[[], Any] = ref(model)
    if hasattr(kind, "make_cache"):
        return lambda: list(kind.make_cache(model_ref()))
    return lambda: [plain() for _ in model_ref().layers]


def _set_caches(
    model: Any, make_plain: Callable[[], list[Any]], packings: Sequence[Packing | None]
) -> None:
    def make_cache() -> list[Any]:
        pairs = zip(make_plain(), packings, strict=True)
        return [layer if how is None else PackedKVCache(how) for layer, how in pairs]

    model.make_cache = make_cache


def _read(
    model: Any, caches: list[Any], lengths: Sequence[int], *, is_evaluated: bool = False
) -> list[Any]:
    for length in lengths:
        logits = model(mx.zeros((1, length), dtype=mx.int32), cache=caches)
        if is_evaluated:
            mx.eval(logits)
    return caches
