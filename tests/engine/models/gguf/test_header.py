"""The header of a GGUF file: its entries are read, and its faults are named."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.engine.models.gguf.header import MOST_ITEMS, GgufError, read_header
from tests.gguf_files import Number, Stored, blocks, floats, text, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.true": True,
    "a.float": 0.5,
    "a.byte": Number("B", 255),
    "a.negative": Number("q", -(2**60)),
    "a.double": Number("d", 1e300),
    "texts": ["one", "", "dræi"],
    "numbers": [Number("i", -1), Number("i", 2)],
    "floats": [0.25, 0.5],
    "truths": [True, False],
    "none": [],
}
SMALL = floats("F32", np.arange(6, dtype=np.float32).reshape(2, 3))
HUGE = (1 << 64) - 1


def written(tmp_path: Path, **changed: Any) -> Path:
    return write_gguf(
        tmp_path / "a.gguf", {**METADATA, **changed}, {"small": SMALL, "other": SMALL}
    )


def field(name: str, layout: str, old: tuple[int, ...], new: tuple[int, ...]) -> list[bytes]:
    """Give the bytes of a name and its old value in the file, and those with the new value."""
    return [text(name) + struct.pack(layout, *values) for values in (old, new)]


def changed(path: Path, old: bytes, new: bytes) -> Path:
    """Replace some bytes that the file has once."""
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_are_plain_values(tmp_path: Path, version: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", METADATA, {}, version=version)
    metadata = read_header(path).metadata
    assert list(metadata) == list(METADATA)
    assert len(metadata) == len(METADATA)
    plain = {
        **METADATA,
        "a.byte": 255,
        "a.negative": -(2**60),
        "a.double": 1e300,
        "numbers": [-1, 2],
    }
    assert dict(metadata) == plain
    assert "texts" in metadata
    assert metadata.get("nowhere") is None


def test_tensors_have_rows_before_columns_and_places_in_the_file(tmp_path: Path) -> None:
    """numpy has this order; the file itself has columns first."""
    wide = blocks("Q4_K", (2, 3, 512), np.random.default_rng(0))
    path = write_gguf(tmp_path / "a.gguf", METADATA, {"small": SMALL, "wide": wide})
    tensors = read_header(path).tensors
    assert [each.name for each in tensors.values()] == ["small", "wide"]
    assert tensors["small"].shape == (2, 3)
    assert tensors["wide"].shape == (2, 3, 512)
    content = path.read_bytes()
    for name, stored in (("small", SMALL), ("wide", wide)):
        info = tensors[name]
        assert info.type.name == stored.kind
        assert content[info.offset : info.offset + info.nbytes] == stored.content


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_another_alignment_is_followed(tmp_path: Path, alignment: int) -> None:
    path = write_gguf(
        tmp_path / "a.gguf",
        {**METADATA, "general.alignment": alignment},
        {"small": SMALL, "other": SMALL},
        alignment=alignment,
    )
    for info in read_header(path).tensors.values():
        assert info.offset % alignment == 0
        assert path.read_bytes()[info.offset :][: info.nbytes] == SMALL.content


def test_a_header_of_many_megabytes_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    tokens = [f"token {number}" for number in range(120_000)]
    path = write_gguf(tmp_path / "a.gguf", {"tokens": tokens, "after": 7}, {"small": SMALL})
    header = read_header(path)
    assert header.metadata["tokens"] == tokens
    assert header.metadata["after"] == 7
    assert list(header.tensors) == ["small"]


class TestWhatIsWrongIsSaid:
    """Each in its own words, and before anything is believed."""

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "too short"),
            (b"GGUF", "too short"),
            (b"GGML" + bytes(40), "does not begin with GGUF"),
            (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version is 1"),
            (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version is 4"),
            (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
            (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensors"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "keys"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "cut off"),
            (b"GGUF" + struct.pack("<IQQ", 3, 1, 0), "cut off"),
        ],
    )
    def test_a_beginning_that_is_none(self, tmp_path: Path, content: bytes, reason: str) -> None:
        path = tmp_path / "a.gguf"
        path.write_bytes(content)
        with pytest.raises(GgufError, match=reason):
            read_header(path)

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            # Lengths and counts.
            (text("a.true"), struct.pack("<Q", HUGE) + b"a.true", "a key of its metadata has"),
            (text("a.true"), struct.pack("<Q", 65_535) + b"a.true", "cut off"),
            (text("dræi"), struct.pack("<Q", HUGE - 7) + "dræi".encode(), "cut off"),
            (text("one"), struct.pack("<Q", 1 << 62) + b"one", "cut off"),
            (*field("texts", "<IIQ", (9, 8, 3), (9, 8, HUGE)), "items"),
            (*field("floats", "<IIQ", (9, 6, 2), (9, 6, MOST_ITEMS)), "cut off"),
            # Types and values.
            (*field("a.true", "<I", (7,), (13,)), "a.true is of type 13"),
            (*field("a.true", "<IB", (7, 1), (7, 2)), "a.true is neither true nor false"),
            (*field("truths", "<IIQBB", (9, 7, 2, 1, 0), (9, 7, 2, 1, 9)), "neither true nor f"),
            (*field("texts", "<II", (9, 8), (9, 9)), "array of arrays"),
            (*field("texts", "<II", (9, 8), (9, 77)), "items of type 77"),
            (text("a.true"), text("a.byte"), "a.byte twice"),
            (text("a.true"), struct.pack("<Q", 6) + b"a.\xfftru", "not UTF-8"),
            # Tensors.
            (text("small"), text("other"), "tensor other twice"),
            (text("small"), struct.pack("<Q", 65) + b"small", "a tensor's name has 65 bytes"),
            (*field("small", "<I", (2,), (5,)), "small has 5 dimensions"),
            (*field("small", "<I", (2,), (0,)), "small has 0 dimensions"),
            (*field("small", "<IQQ", (2, 3, 2), (2, 3, HUGE)), "cut off: small"),
            (*field("small", "<IQQ", (2, 3, 2), (2, 0, 2)), "rows of 0"),
            (*field("small", "<IQQI", (2, 3, 2, 0), (2, 3, 2, 4)), "type 4, which is not known"),
            (*field("small", "<IQQI", (2, 3, 2, 0), (2, 3, 2, 12)), "of 3, which Q4_K cannot hold"),
            (*field("other", "<IQQIQ", (2, 3, 2, 0, 32), (2, 3, 2, 0, 8)), "multiple of 32"),
            (*field("other", "<IQQIQ", (2, 3, 2, 0, 32), (2, 3, 2, 0, 0)), "overlaps another"),
            (*field("other", "<IQQIQ", (2, 3, 2, 0, 32), (2, 3, 2, 0, 1 << 63)), "cut off: other"),
        ],
    )
    def test_a_header_that_lies(self, tmp_path: Path, old: bytes, new: bytes, reason: str) -> None:
        with pytest.raises(GgufError, match=reason):
            read_header(changed(written(tmp_path), old, new))

    @pytest.mark.parametrize("alignment", [0, 4, 24, 1 << 31, -8.0, "32", True])
    def test_an_alignment_that_is_none(self, tmp_path: Path, alignment: Any) -> None:
        """A power of two from 8 on, and no more than a megabyte."""
        with pytest.raises(GgufError, match=r"general\.alignment"):
            read_header(written(tmp_path, **{"general.alignment": alignment}))

    def test_a_text_that_is_none_when_it_is_asked_for(self, tmp_path: Path) -> None:
        """Lists are made late, and checked then."""
        path = changed(written(tmp_path), text("one"), struct.pack("<Q", 3) + b"o\xffe")
        metadata = read_header(path).metadata
        with pytest.raises(GgufError, match="texts is not UTF-8"):
            metadata["texts"]

    def test_every_file_that_is_cut_off(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf", METADATA, {"small": SMALL})
        content = path.read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            with pytest.raises(GgufError, match=r"cut off|too short"):
                read_header(path)

    @pytest.mark.parametrize("make", [Path.mkdir, lambda path: None], ids=["folder", "nothing"])
    def test_what_is_no_file(self, tmp_path: Path, make: Callable[[Path], None]) -> None:
        """A pipe would be waited for, and a folder cannot be read."""
        make(tmp_path / "a.gguf")
        with pytest.raises(GgufError, match="no such file"):
            read_header(tmp_path / "a.gguf")

    def test_names_out_of_the_file_are_shown_on_one_line(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "a.gguf", {}, {"a\nb": Stored("I8", (0,), b"")})
        with pytest.raises(GgufError) as caught:
            read_header(path)
        assert "\n" not in str(caught.value)
