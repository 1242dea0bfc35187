"""Read a GGUF file's header: its metadata and its list of tensors.

Every number is compared with the file's size before use, because the file may be malicious. The
file is not mapped, because truncating a mapped file kills its reader. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import IOBase
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

# The bound of safetensors' headers; Qwen's GGUF header has 6 MB.
HEADER_BYTES: Final = 100_000_000
MOST_ITEMS: Final = 1 << 22
MOST_KEYS: Final = 1 << 16
MOST_TENSORS: Final = 1 << 14
# The next three bounds are the format's.
MOST_DIMENSIONS: Final = 4
KEY_BYTES: Final = 65_535
NAME_BYTES: Final = 64
_FIRST_BYTES: Final = 1 << 20
_ALIGNMENT: Final = 32
_MOST_ALIGNMENT: Final = 1 << 20


class GgufError(ValueError):
    """A fault of a GGUF file."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type of weights: each block of `nbytes` bytes holds `weights` weights."""

    name: str
    weights: int
    nbytes: int


# ggml.h's enum ggml_type, with the block sizes of ggml-common.h.
TYPES: Final[Mapping[int, TensorType]] = {
    number: TensorType(name, weights, nbytes)
    for number, name, weights, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header lists it."""

    name: str
    type: TensorType
    shape: tuple[int, ...]  # rows before columns, as in numpy
    offset: int  # from the beginning of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Array:
    type: int
    count: int
    start: int


class Metadata(Mapping[str, Any]):
    """A file's metadata, whose lists are made anew at each look-up."""

    def __init__(self, values: Mapping[str, Any], content: bytes) -> None:
        self._values = values
        self._content = content

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, _Array):
            return value
        if value.type == _STRING:
            return list(self._texts(key, value))
        if value.type == _BOOL:
            return [bool(byte) for byte in self._content[value.start : value.start + value.count]]
        return np.frombuffer(
            self._content, _NUMBERS[value.type].format, value.count, value.start
        ).tolist()

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _texts(self, key: str, array: _Array) -> Iterator[str]:
        at = array.start
        for _ in range(array.count):
            (length,) = _LENGTH.unpack_from(self._content, at)
            at += _LENGTH.size + length
            yield _text(self._content[at - length : at], key)


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a GGUF file before its weights."""

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    stamp: tuple[int, ...]  # `stamp_of` the file


def read_header(path: Path) -> Header:
    """Read the header of a file of version 2 or 3, and check that every tensor is in the file.

    Raises GgufError for any fault, and OSError if the file cannot be read.
    """
    if not path.is_file():  # opening a pipe would wait
        raise GgufError("there is no such file")
    with path.open("rb") as file:
        stamp = stamp_of(file)
        cursor = _Cursor(file, os.fstat(file.fileno()).st_size)
        tensors, keys = _counts(cursor)
        values = _metadata(cursor, keys)
        infos = _tensors(cursor, tensors, _alignment(values))
        return Header(Metadata(values, cursor.content()), infos, stamp)


def stamp_of(file: IOBase) -> tuple[int, ...]:
    """Return numbers that change if a file is changed or replaced."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _Cursor:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.read = bytearray()
        self.at = 0

    def need(self, end: int) -> None:
        if end <= len(self.read):
            return
        if end > self.size:
            raise GgufError("it is cut off or no GGUF file: its header would end after the file")
        if end > HEADER_BYTES:
            raise GgufError(f"its header is longer than {HEADER_BYTES:,} bytes")
        stop = min(self.size, max(end, 2 * len(self.read), _FIRST_BYTES))
        self.read += self._file.read(stop - len(self.read))
        if end > len(self.read):
            raise GgufError("it was cut off while it was read")

    def skip(self, nbytes: int) -> None:
        self.need(self.at + nbytes)
        self.at += nbytes

    def take(self, form: struct.Struct) -> Any:
        self.skip(form.size)
        (value,) = form.unpack_from(self.read, self.at - form.size)
        return value

    def text(self, what: str, limit: int = HEADER_BYTES) -> str:
        length = self.take(_LENGTH)
        if length > limit:
            raise GgufError(f"{what} has {length:,} bytes, where {limit:,} are allowed")
        self.skip(length)
        return _text(self.read[self.at - length : self.at], what)

    def skip_texts(self, count: int) -> None:
        at, there, length = self.at, len(self.read), _LENGTH
        for _ in range(count):
            if at + 8 > there:
                self.need(at + 8)
                there = len(self.read)
            at += 8 + length.unpack_from(self.read, at)[0]
        self.need(at)
        self.at = at

    def content(self) -> bytes:
        return bytes(memoryview(self.read)[: self.at])


_LENGTH: Final = struct.Struct("<Q")
_TYPE: Final = struct.Struct("<I")
_NUMBERS: Final = {
    number: struct.Struct(f"<{form}")
    for number, form in ((0, "B"), (1, "b"), (2, "H"), (3, "h"), (4, "I"), (5, "i"), (6, "f"))
} | {number: struct.Struct(f"<{form}") for number, form in ((10, "Q"), (11, "q"), (12, "d"))}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9


def _counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.size < 24:
        raise GgufError("it is no GGUF file: it is too short")
    cursor.need(24)
    if cursor.read[:4] != b"GGUF":
        raise GgufError("it is no GGUF file: it does not begin with GGUF")
    cursor.at = 4
    version = cursor.take(_TYPE)
    if version & 0xFFFF == 0:
        raise GgufError("its numbers are big-endian, which is not read here")
    if version not in (2, 3):
        raise GgufError(f"its GGUF version is {version}; only 2 and 3 are read here")
    tensors, keys = cursor.take(_LENGTH), cursor.take(_LENGTH)
    if tensors > MOST_TENSORS:
        raise GgufError(f"it lists {tensors:,} tensors, where {MOST_TENSORS:,} are allowed")
    if keys > MOST_KEYS:
        raise GgufError(f"its metadata has {keys:,} keys, where {MOST_KEYS:,} are allowed")
    return tensors, keys


def _metadata(cursor: _Cursor, keys: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.text("a key of its metadata", KEY_BYTES)
        if key in values:
            raise GgufError(f"its metadata has {quote(key)} twice")
        values[key] = _value(cursor, key, cursor.take(_TYPE))
    return values


def _value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind in _NUMBERS:
        return cursor.take(_NUMBERS[kind])
    if kind == _STRING:
        return cursor.text(quote(key))
    if kind == _BOOL:
        start = cursor.at
        cursor.skip(1)
        return _booleans(cursor, key, start)[0] == 1
    if kind == _ARRAY:
        return _array(cursor, key)
    raise GgufError(f"{quote(key)} is of type {kind}, which GGUF does not have")


def _array(cursor: _Cursor, key: str) -> _Array:
    kind, count = cursor.take(_TYPE), cursor.take(_LENGTH)
    array = _Array(kind, count, cursor.at)
    if count > MOST_ITEMS:
        raise GgufError(f"{quote(key)} has {count:,} items, where {MOST_ITEMS:,} are allowed")
    if kind == _STRING:
        cursor.skip_texts(count)
    elif kind in _NUMBERS:
        cursor.skip(count * _NUMBERS[kind].size)
    elif kind == _BOOL:
        cursor.skip(count)
        _booleans(cursor, key, array.start)
    elif kind == _ARRAY:
        raise GgufError(f"{quote(key)} is an array of arrays, which is not read here")
    else:
        raise GgufError(f"{quote(key)} has items of type {kind}, which GGUF does not have")
    return array


def _booleans(cursor: _Cursor, key: str, start: int) -> bytearray:
    content = cursor.read[start : cursor.at]
    if content.strip(b"\0\1"):
        raise GgufError(f"{quote(key)} is neither true nor false")
    return content


def _alignment(values: Mapping[str, Any]) -> int:
    alignment = values.get("general.alignment", _ALIGNMENT)
    is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not is_number or not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise GgufError(f"general.alignment is {alignment!r:.60}, not a power of two of at least 8")
    return int(alignment)


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Read the list of tensors. The file's offsets count from the first aligned byte after the
    list.
    """
    listed: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = _tensor(cursor, alignment)
        if info.name in listed:
            raise GgufError(f"it lists the tensor {quote(info.name)} twice")
        listed[info.name] = info
    first = -(-cursor.at // alignment) * alignment
    infos = {name: replace(info, offset=first + info.offset) for name, info in listed.items()}
    _check_places(infos.values(), cursor.size)
    return infos


def _tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    name = cursor.text("a tensor's name", NAME_BYTES)
    called, dimensions = quote(name), cursor.take(_TYPE)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise GgufError(f"{called} has {dimensions} dimensions, and 1 to 4 are allowed")
    sizes = [cursor.take(_LENGTH) for _ in range(dimensions)]
    number, offset = cursor.take(_TYPE), cursor.take(_LENGTH)
    kind = TYPES.get(number)
    if kind is None:
        raise GgufError(f"{called} is of type {number}, which is not known here")
    if 0 in sizes or sizes[0] % kind.weights:
        raise GgufError(f"{called} has rows of {sizes[0]}, which {kind.name} cannot hold")
    if offset % alignment:
        raise GgufError(f"{called} does not begin at a multiple of {alignment} bytes")
    nbytes = math.prod(sizes) // kind.weights * kind.nbytes
    return TensorInfo(name, kind, tuple(reversed(sizes)), offset, nbytes)


def _check_places(infos: Iterable[TensorInfo], size: int) -> None:
    end = 0
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset < end:
            raise GgufError(f"{quote(info.name)} overlaps another tensor")
        end = info.offset + info.nbytes
        if end > size:
            raise GgufError(f"it is cut off: {quote(info.name)} ends at byte {end:,} of {size:,}")


def _text(content: bytes | bytearray, what: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise GgufError(f"{quote(what)} is not UTF-8 text") from None


def quote(name: str) -> str:
    """Return a name from a file on one line of a message, cut if it is long."""
    if len(name) <= 64 and name.isprintable():
        return name
    return f"{name[:64]!r}…"
