"""Decode GGUF's blocks of quantized weights to floats, or to MLX's packed form.

Rows are cut into groups of 16 or 32 weights, each `scale · (code - zero) + bias`. Blocks have the
layout of ggml's src/ggml-common.h. Weights equal, bit for bit, those of
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
GROUP: Final = 32  # the smallest group that MLX packs


@dataclass(frozen=True, slots=True)
class Groups:
    """Decoded blocks: codes, with a scale and a bias for each group."""

    codes: npt.NDArray[Any]  # (blocks, groups, weights)
    scale: Floats  # (blocks, groups)
    zero: int = 0
    bias: Floats | None = None  # (blocks, groups)

    def weights(self) -> Floats:
        numbers = self.codes.astype(np.float32)
        if self.zero:
            numbers -= np.float32(self.zero)
        numbers *= self.scale[..., None]
        if self.bias is not None:
            numbers += self.bias[..., None]
        return numbers


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights in the affine form of `mlx.core.quantize`, in groups of 32.

    For (rows, columns) of weights, `weight` is (rows, columns · bits / 32); `scales` and `biases`
    are (rows, columns / 32).
    """

    weight: npt.NDArray[np.uint32]
    scales: Floats
    biases: Floats


def dequantize(kind: str, raw: Bytes) -> Floats:
    """Return weights, (rows, columns), from their bytes, (rows, bytes of a row)."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return _groups(kind, raw).weights().reshape(len(raw), -1)


def pack(kind: str, raw: Bytes) -> Packed:
    """Return weights in MLX's packed form, for a type in PACKED_BITS."""
    groups = _groups(kind, raw)
    rows, bits = len(raw), PACKED_BITS[kind]
    codes = groups.codes.reshape(rows, -1)
    if bits == 8:
        packed = codes
    elif bits == 4:
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
    else:  # eight codes of five bits in five bytes, the first in the lowest bits
        joined: npt.NDArray[Any] = codes.reshape(-1, 8)
        for width, wider in ((5, "<u2"), (10, "<u4"), (20, "<u8")):
            joined = joined.astype(wider)
            joined = joined[:, 0::2] | joined[:, 1::2] << width
        packed = joined.view(np.uint8)[:, :5].reshape(rows, -1)
    bias = groups.scale * np.float32(-groups.zero) if groups.bias is None else groups.bias
    return Packed(
        np.ascontiguousarray(packed).view("<u4"),
        groups.scale.reshape(rows, -1),
        bias.reshape(rows, -1),
    )


def _groups(kind: str, raw: Bytes) -> Groups:
    block, decode = _TYPES[kind]
    return decode(raw.reshape(-1).view(block))


def _f32(halves: npt.NDArray[Any]) -> Floats:
    """Return one float16 number per block as float32, (blocks, 1)."""
    return halves.astype(np.float32)[:, None]


def _nibbles(content: Bytes) -> Bytes:
    """Return (…, n) bytes as (…, 2, n) numbers: lower four bits, then upper four bits."""
    return np.stack([content & 15, content >> 4], axis=-2)


def _shift(content: Bytes, bits: int, mask: int) -> Bytes:
    """Return (…, n) bytes as (…, 8 / bits, n) numbers of `bits` bits, low bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (content[..., None, :] >> shifts) & np.uint8(mask)


def _fives(blocks: npt.NDArray[Any]) -> Bytes:
    high: Bytes = np.unpackbits(blocks["high"], axis=-1, bitorder="little")
    low: Bytes = _nibbles(blocks["codes"]).reshape(-1, 32)
    return (low | high << np.uint8(4))[:, None]


def _sixes(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack eight scales and eight minima of six bits each from the twelve bytes of a block."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (rest & 15) | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_0(blocks: npt.NDArray[Any]) -> Groups:
    return Groups(_nibbles(blocks["codes"]).reshape(-1, 1, 32), _f32(blocks["d"]), zero=8)


def _q4_1(blocks: npt.NDArray[Any]) -> Groups:
    codes = _nibbles(blocks["codes"]).reshape(-1, 1, 32)
    return Groups(codes, _f32(blocks["d"]), bias=_f32(blocks["m"]))


def _q5_0(blocks: npt.NDArray[Any]) -> Groups:
    return Groups(_fives(blocks), _f32(blocks["d"]), zero=16)


def _q5_1(blocks: npt.NDArray[Any]) -> Groups:
    return Groups(_fives(blocks), _f32(blocks["d"]), bias=_f32(blocks["m"]))


def _q8_0(blocks: npt.NDArray[Any]) -> Groups:
    # Flipping the highest bit maps the signed codes to 0 to 255.
    return Groups((blocks["codes"] ^ 128)[:, None], _f32(blocks["d"]), zero=128)


def _q2_k(blocks: npt.NDArray[Any]) -> Groups:
    codes = _shift(blocks["codes"].reshape(-1, 2, 32), 2, 3).reshape(-1, 16, 16)
    scales = blocks["scales"]
    return Groups(
        codes,
        _f32(blocks["d"]) * (scales & 15).astype(np.float32),
        bias=-(_f32(blocks["dmin"]) * (scales >> 4).astype(np.float32)),
    )


def _q3_k(blocks: npt.NDArray[Any]) -> Groups:
    low = _shift(blocks["codes"].reshape(-1, 2, 32), 2, 3).reshape(-1, 8, 32)
    codes = (low | _shift(blocks["high"], 1, 1) << 2).reshape(-1, 16, 16)
    packed = blocks["scales"]
    lower = _nibbles(packed[:, :8]).reshape(-1, 16)
    upper = _shift(packed[:, 8:], 2, 3).reshape(-1, 16)
    scales = (lower | upper << 4).astype(np.float32) - np.float32(32)
    return Groups(codes, _f32(blocks["d"]) * scales, zero=4)


def _q4_k(blocks: npt.NDArray[Any]) -> Groups:
    scales, minima = _sixes(blocks["scales"])
    codes = _nibbles(blocks["codes"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return Groups(codes, _f32(blocks["d"]) * scales, bias=-(_f32(blocks["dmin"]) * minima))


def _q5_k(blocks: npt.NDArray[Any]) -> Groups:
    four = _q4_k(blocks)
    codes = four.codes | _shift(blocks["high"], 1, 1) << 4
    return Groups(codes, four.scale, bias=four.bias)


def _q6_k(blocks: npt.NDArray[Any]) -> Groups:
    low = _nibbles(blocks["codes"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = _shift(blocks["high"].reshape(-1, 2, 32), 2, 3)
    codes = (low | high << 4).reshape(-1, 16, 16)
    return Groups(codes, _f32(blocks["d"]) * blocks["scales"].astype(np.float32), zero=32)


# The values of IQ4's codes: kvalues_iq4nl in ggml-common.h.
_UNEVEN: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def _iq4_nl(blocks: npt.NDArray[Any]) -> Groups:
    codes = _nibbles(blocks["codes"]).reshape(-1, 1, 32)
    return Groups(_UNEVEN[codes], _f32(blocks["d"]))


def _iq4_xs(blocks: npt.NDArray[Any]) -> Groups:
    lower = blocks["low"][..., None] >> np.array([0, 4], np.uint8) & 15
    upper = blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (lower.reshape(-1, 8) | upper << 4).astype(np.float32) - np.float32(32)
    codes = _nibbles(blocks["codes"].reshape(-1, 8, 16)).reshape(-1, 8, 32)
    return Groups(_UNEVEN[codes], _f32(blocks["d"]) * scales)


_Field = tuple[str, str] | tuple[str, str, int]


def _block(*fields: _Field) -> np.dtype[np.void]:
    return np.dtype(list(fields))


_D: Final = ("d", "<f2")
_M: Final = ("m", "<f2")
_DMIN: Final = ("dmin", "<f2")
_TYPES: Final[Mapping[str, tuple[np.dtype[np.void], Callable[[npt.NDArray[Any]], Groups]]]] = {
    "Q4_0": (_block(_D, ("codes", "u1", 16)), _q4_0),
    "Q4_1": (_block(_D, _M, ("codes", "u1", 16)), _q4_1),
    "Q5_0": (_block(_D, ("high", "u1", 4), ("codes", "u1", 16)), _q5_0),
    "Q5_1": (_block(_D, _M, ("high", "u1", 4), ("codes", "u1", 16)), _q5_1),
    "Q8_0": (_block(_D, ("codes", "u1", 32)), _q8_0),
    "Q2_K": (_block(("scales", "u1", 16), ("codes", "u1", 64), _D, _DMIN), _q2_k),
    "Q3_K": (
        _block(("high", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), _D),
        _q3_k,
    ),
    "Q4_K": (_block(_D, _DMIN, ("scales", "u1", 12), ("codes", "u1", 128)), _q4_k),
    "Q5_K": (
        _block(_D, _DMIN, ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)),
        _q5_k,
    ),
    "Q6_K": (
        _block(("codes", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D),
        _q6_k,
    ),
    "IQ4_NL": (_block(_D, ("codes", "u1", 16)), _iq4_nl),
    "IQ4_XS": (
        _block(_D, ("high", "<u2"), ("low", "u1", 4), ("codes", "u1", 128)),
        _iq4_xs,
    ),
}
FLOATS: Final = frozenset({"F32", "F16", "BF16"})
READ: Final = FLOATS | _TYPES.keys()
PACKED_BITS: Final[Mapping[str, int]] = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q5_K": 5,
    "Q8_0": 8,
}
