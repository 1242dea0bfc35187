import contextlib
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.models.folder import Folder
from gateway.engine.models.torch_pickle import read_tensors
from gateway.errors import ModelLoadFailed

HEAD = Path(__file__).parents[2] / "golden" / "bge-m3" / "colbert_linear.pt"
HALF = HEAD.with_name("sparse_linear.pt")
WHOLE = HEAD.read_bytes()
MOST = 1 << 20


def read(path: Path, content: bytes, most: int = MOST) -> dict[str, mx.array]:
    (path / "head.pt").write_bytes(content)
    return read_tensors(Folder("tiny", path), "head.pt", most)


def refusal(path: Path, content: bytes, most: int = MOST) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        read(path, content, most)
    return str(caught.value)


def entries(content: bytes = WHOLE) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(parts: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


def with_pickle(pickled: bytes) -> bytes:
    return zipped(entries() | {"colbert_linear/data.pkl": pickled})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def test_tensors_are_those_that_torch_saved(path: Path) -> None:
    """Their bytes lie in the archive in torch's order: the weight's rows, then the bias."""
    tensors = read(path, WHOLE)
    assert {name: (a.shape, a.dtype) for name, a in tensors.items()} == {
        "weight": ((24, 32), mx.float32),
        "bias": ((24,), mx.float32),
    }
    weight = np.frombuffer(entries()["colbert_linear/data/0"], np.float32)
    assert np.array_equal(np.array(tensors["weight"]), weight.reshape(24, 32))
    assert {a.dtype for a in read(path, HALF.read_bytes()).values()} == {mx.float16}


def test_bfloat16_is_read(path: Path) -> None:
    pickled = entries()["colbert_linear/data.pkl"]
    content = with_pickle(pickled.replace(b"FloatStorage", b"BFloat16Storage"))
    weight = read(path, content)["weight"]
    held = np.frombuffer(entries()["colbert_linear/data/0"], np.uint16)[: 24 * 32]
    assert weight.dtype == mx.bfloat16
    expected = (held.astype(np.uint32) << 16).view(np.float32).reshape(24, 32)
    assert np.array_equal(np.array(weight.astype(mx.float32)), expected, equal_nan=True)


class Bomb:
    """What a hostile file holds: its unpickling would run a command."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_file_is_called_or_imported(path: Path, protocol: int) -> None:
    ran = path / "ran"
    for bomb in (Bomb(os.system, f"touch {ran}"), Bomb(eval, f"open({str(ran)!r}, 'w')")):
        for content in (bomb, {"weight": bomb}, OrderedDict(weight=bomb)):
            reason = refusal(path, with_pickle(pickle.dumps(content, protocol)))
            assert "head.pt is not read" in reason
            assert "torch.load('head.pt', weights_only=True)" in reason
    assert not ran.exists()
    named = refusal(path, with_pickle(pickle.dumps(Bomb(os.system, "true"), 2)))
    assert "it names 'posix system'" in named


def test_the_format_before_zip_archives_is_refused(path: Path) -> None:
    reason = refusal(path, pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2))
    assert "it is no zip archive" in reason
    assert "s.save_file(torch.load(" in reason


def test_a_compressed_or_a_large_file_is_refused(path: Path) -> None:
    """A small archive may hold gigabytes of zeros."""
    bomb = entries() | {"colbert_linear/data.pkl": b"\0" * (1 << 24)}
    assert "is compressed" in refusal(path, zipped(bomb, zipfile.ZIP_DEFLATED))
    assert "more than 65,536 bytes" in refusal(path, zipped(bomb), 1 << 25)
    assert "more than 1,000 bytes" in refusal(path, WHOLE, 1000)


@pytest.mark.parametrize("size", [0xFFFFFFFE, 1 << 30])
def test_a_size_that_an_archive_only_states_is_not_trusted(path: Path, size: int) -> None:
    whole = bytearray(WHOLE)
    at = whole.rindex(b"PK\1\2", 0, whole.rindex(b"data/0"))
    whole[at + 20 : at + 28] = struct.pack("<II", size, size)  # both sizes of the entry
    assert "more than" in refusal(path, bytes(whole))


def listed(count: int, name: bytes, *, is_wide: bool) -> bytes:
    """Write an archive that has only a list of entries without bytes, as short as it can be."""
    entry = b"PK\1\2" + bytes(24) + struct.pack("<H", len(name)) + bytes(16) + name
    size = count * len(entry)
    wide = b"PK\6\6" + struct.pack("<Q28xQQ", 44, size, 0)
    wide += b"PK\6\7" + struct.pack("<LQL", 0, size, 1)
    end = b"PK\5\6" + struct.pack("<8xLLH", 0 if is_wide else size, 0, 0)
    return entry * count + (wide if is_wide else b"") + end


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_long_list_of_entries_is_refused_before_it_is_read(path: Path, is_wide: bool) -> None:
    """A file of 8 MB could list as many entries as zipfile reads in seconds."""
    for name in (b"", b"a/data.pkl"):
        reason = refusal(path, listed(2000, name, is_wide=is_wide))
        assert "the list of its entries has more than 16,384 bytes" in reason
        short = refusal(path, listed(2, name, is_wide=is_wide))
        assert "values to unpack" in short  # zipfile found 2 entries, and not one data.pkl


def test_an_archive_with_a_comment_or_with_end_records_apart_is_refused(path: Path) -> None:
    """A comment may hold end records, of which each program finds other ones."""
    assert "with a comment" in refusal(path, WHOLE[:-2] + b"\5\0hello")
    assert "with a comment" in refusal(path, WHOLE[:-2] + b"\x16\0" + WHOLE[-22:-1] + b"x")
    for at in (-98, -30):  # the signature of one record, and its place in the other
        apart = bytearray(WHOLE)
        apart[at] ^= 1
        assert "end records apart" in refusal(path, bytes(apart))


def test_memoized_tuples_are_never_walked(path: Path) -> None:
    """Each tuple holds the one before twice: the last one would have 2 ** 200 parts."""
    bomb = b"\x80\2)q\0" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(200))
    name = b"ctorch._utils\n_rebuild_tensor_v2\n"
    last = b"h\xc8"
    for end in (b"R.", b".", b"}X\1\0\0\0a" + last + b"s.", name + last + b"R."):
        refusal(path, with_pickle(bomb + end))
    long = b"\x80\2(" + b"N" * 30_000 + b"t"  # copied at each of thousands of calls
    assert "a tuple has 30000 parts" in refusal(path, with_pickle(long + b"q\1" + b"h\1" * 9999))
    in_storage = b"(" + last + b"K\0K\1\x85K\1\x85tR."
    refusal(path, with_pickle(bomb + name + in_storage))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"K\x18K \x86", b"K\x18K!\x86", "rows do not follow one another"),
        (b"K\x18K \x86", b"K\xffK \x86", "buffer is smaller"),
        (b"K\x18K \x86", b"J\xff\xff\xff\xffK \x86", "not of one or two counts"),
        (b"K\x18K \x86", b"J\xff\xff\xff\x7fK \x86", "buffer is smaller"),
        (b"FloatStorage", b"LongStorage", "names 'torch LongStorage'"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", "names 'torch._utils _rebuild_tensor_v3'"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x009", "no item named"),
        (b"X\x06\x00\x00\x00weight", b"K\x07", "a key is no text"),
        (b"\x80\x02", b"\x80\x02r\xff\xff\xff\xff", "list index out of range"),
    ],
)
def test_a_wrong_part_is_named(path: Path, old: bytes, new: bytes, reason: str) -> None:
    pickled = entries()["colbert_linear/data.pkl"]
    assert old in pickled
    assert reason in refusal(path, with_pickle(pickled.replace(old, new, 1)))


def test_numbers_of_the_other_byte_order_are_refused(path: Path) -> None:
    content = zipped(entries() | {"colbert_linear/byteorder": b"big"})
    assert "not little-endian" in refusal(path, content)


def tried(path: Path, content: bytes) -> None:
    """Any other error than a refusal fails the test."""
    with contextlib.suppress(ModelLoadFailed):
        read(path, content)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_by_name(path: Path, content: bytes) -> None:
    refusal(path, content)
    refusal(path, with_pickle(content))


@given(st.data())
def test_any_change_of_a_file_is_read_or_refused(path: Path, data: st.DataObject) -> None:
    """Changes are in the archive, where its checksums find most, and in its pickle."""
    pickled = entries()["colbert_linear/data.pkl"]
    for whole, wrap in ((WHOLE, bytes), (pickled, with_pickle)):
        changed = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(changed) - 1))
            changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        tried(path, wrap(bytes(changed)))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_truncated_file_is_refused(path: Path, length: int) -> None:
    refusal(path, WHOLE[:length])


def named(count: int) -> bytes:
    """Write a file that has one tensor of 64 numbers under as many names."""

    def text(words: bytes) -> bytes:
        return b"X" + struct.pack("<I", len(words)) + words

    storage = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu")
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x40tQ"
    tensor += b"K\x00K\x40\x85K\x01\x85\x89NtRq\x01"  # its place, shape, strides; memoized
    more = b"".join(text(b"%d" % number) + b"h\x01" for number in range(1, count))
    pickled = b"\x80\x02}(" + text(b"0") + tensor + more + b"u."
    return zipped({"a/data.pkl": pickled, "a/data/0": b"\0" * 256})


def test_a_tensor_under_many_names_is_refused_before_it_is_copied_for_each(path: Path) -> None:
    assert len(read(path, named(8))) == 8
    assert "it has 9 tensors" in refusal(path, named(9))


def test_a_deep_pickle_is_refused(path: Path) -> None:
    """Hashing or comparing a tuple in a tuple in a tuple … would overflow the stack."""
    deep = b"\x80\x02)" + b"\x85" * 60_000
    for end in (b".", b"}" + deep[2:] + b"Ns.", b")R.", deep[2:] + b"R."):
        refusal(path, with_pickle(deep + end))
