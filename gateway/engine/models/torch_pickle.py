"""Reads the tensors of a file that torch.save wrote, without unpickling it.

Such a file is a zip archive: `data.pkl` names the tensors, and other entries hold their bytes. Only
the opcodes of a dict of tensors are followed, and nothing that they name is imported or called.
Source: torch, serialization.py and _utils.py, _rebuild_tensor_v2.
"""

import io
import math
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from zipfile import ZIP_STORED, ZipFile

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.models.folder import Folder

MOST_TENSORS: Final = 8  # a head has a weight and a bias; each name is a copy in memory
PICKLE_BYTES: Final = 1 << 16
DIRECTORY_BYTES: Final = 1 << 14  # about ten entries have 1 KiB; zipfile lists them all at once
TUPLE_PARTS: Final = 16  # a tensor's arguments are at most seven, its storage's five
_ORDERED: Final = "collections OrderedDict"
_REBUILD: Final = "torch._utils _rebuild_tensor_v2"
# The types in the file, and the types of the arrays.
_STORAGES: Final[Mapping[str, tuple[type, mx.Dtype]]] = {
    "torch FloatStorage": (np.float32, mx.float32),
    "torch HalfStorage": (np.float16, mx.float16),
    "torch BFloat16Storage": (np.uint16, mx.bfloat16),
}
_LITERALS: Final = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_CONSTANTS: Final = {"EMPTY_TUPLE": (), "NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or a function that the pickle names."""

    text: str


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor's place in the archive."""

    storage: str
    entry: str
    start: int  # elements before it
    shape: tuple[int, ...]


def read_tensors(folder: Folder, file: str, most_bytes: int) -> dict[str, mx.array]:
    """Return the tensors by name. Raises ModelLoadFailed for all but a dict of plain tensors."""
    path = folder.folder / file
    try:
        if path.stat().st_size > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        content = path.read_bytes()
        _check_directory(content)
        with ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            [listing] = [name for name in names if re.fullmatch(r"[^/]+/data\.pkl", name)]
            root = listing.removesuffix("data.pkl")
            order = f"{root}byteorder"
            if order in names and _entry(archive, order, 16) != b"little":
                raise ValueError("its numbers are not little-endian")
            tensors = _follow(_entry(archive, listing, PICKLE_BYTES))
            if len(tensors) > MOST_TENSORS:
                raise ValueError(f"it has {len(tensors)} tensors, more than {MOST_TENSORS}")
            return {
                name: _array(_entry(archive, f"{root}data/{at.entry}", most_bytes), at)
                for name, at in tensors.items()
            }
    except Exception as error:  # zipfile and pickletools raise many kinds
        new = f"{path.stem}.safetensors"
        script = (
            "import torch, safetensors.torch as s; "
            f"s.save_file(torch.load('{file}', weights_only=True), '{new}')"
        )
        raise folder.failed(
            f"{file} is not read, since it is not only a dict of tensors as torch.save writes it: "
            f'{error!s:.200}. To convert it, run in its folder: python -c "{script}"'
        ) from error


def _check_directory(content: bytes) -> None:
    """Raise ValueError for a long list of entries, by the end records that zipfile trusts.

    Source: PKWARE, APPNOTE.TXT, 4.3.14 to 4.3.16.
    """
    wide, locator, end = content[-98:-42], content[-42:-22], content[-22:]
    if len(end) < 22 or not end.startswith(b"PK\5\6") or not end.endswith(b"\0\0"):
        raise ValueError("it is no zip archive, or one with a comment")
    size = int.from_bytes(end[12:16], "little")
    if locator.startswith(b"PK\6\7"):
        place = int.from_bytes(locator[8:16], "little")
        if not wide.startswith(b"PK\6\6") or place != len(content) - 98:
            raise ValueError("its zip archive has its end records apart")
        size = int.from_bytes(wide[40:48], "little")
    if size > DIRECTORY_BYTES:
        raise ValueError(f"the list of its entries has more than {DIRECTORY_BYTES:,} bytes")


def _entry(archive: ZipFile, name: str, most_bytes: int) -> bytes:
    about = archive.getinfo(name)
    if about.compress_type != ZIP_STORED or about.file_size > most_bytes:
        raise ValueError(f"{name:.60} is compressed, or has more than {most_bytes:,} bytes")
    return archive.read(about)


def _follow(pickled: bytes) -> dict[str, _Stored]:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name == "MARK":
            marks.append(len(stack))
        elif name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            named = argument if name == "GLOBAL" else " ".join(_pop(stack, 2))
            if named not in (_ORDERED, _REBUILD, *_STORAGES):
                raise ValueError(f"it names {named!r:.60}")
            stack.append(_Name(named))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "TUPLE" or name in _TUPLES:
            count = _TUPLES.get(name) or len(stack) - marks.pop()
            if count > TUPLE_PARTS:
                raise ValueError(f"a tuple has {count} parts")
            stack.append(tuple(_pop(stack, count)))
        elif name == "REDUCE":
            stack.append(_rebuild(*_pop(stack, 2)))
        elif name in ("SETITEM", "SETITEMS"):
            count = 2 if name == "SETITEM" else len(stack) - marks.pop()
            items = _pop(stack, count)
            stack[-1].update(_pairs(items))
        elif name == "BUILD":  # the state of an OrderedDict: versions of modules
            stack.pop()
        elif name not in ("PROTO", "FRAME", "BINPERSID", "STOP"):
            raise ValueError(f"its pickle has the opcode {name}")
    [tensors] = stack
    if not all(isinstance(at, _Stored) for at in tensors.values()):
        raise ValueError("not all of its values are tensors")
    return dict(tensors)


def _pop(stack: list[Any], count: int) -> list[Any]:
    if not 0 <= count <= len(stack):
        raise ValueError("its pickle takes more than it has put down")
    popped = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return popped


def _pairs(items: list[Any]) -> dict[str, Any]:
    names, values = items[::2], items[1::2]
    if not all(isinstance(name, str) for name in names):  # a deep tuple's hash would recurse
        raise ValueError("a key is no text")
    return dict(zip(names, values, strict=True))


def _rebuild(function: Any, arguments: Any) -> Any:
    if function == _Name(_ORDERED) and arguments == ():
        return {}
    if function != _Name(_REBUILD):
        raise ValueError("it calls something else")
    storage, start, shape, strides, *_ = arguments
    kind, named, entry, *_ = storage  # torch's persistent id
    numbers = [start, *shape, *strides]
    if kind != "storage" or named.text not in _STORAGES or not isinstance(entry, str):
        raise ValueError("a tensor's storage is not of floating numbers")
    if len(shape) > 2 or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a tensor's shape is not of one or two counts")
    if list(strides) != [math.prod(shape[index + 1 :]) for index in range(len(shape))]:
        raise ValueError("a tensor's rows do not follow one another")
    return _Stored(named.text, entry, start, tuple(shape))


def _array(content: bytes, at: _Stored) -> mx.array:
    held, dtype = _STORAGES[at.storage]
    start = at.start * np.dtype(held).itemsize
    numbers: npt.NDArray[Any] = np.frombuffer(
        content, held, count=math.prod(at.shape), offset=start
    )
    array = mx.array(numbers.reshape(at.shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array
