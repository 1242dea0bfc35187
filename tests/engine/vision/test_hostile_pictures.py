"""Whatever a file holds, it is refused by name or decoded; the sandbox lives, and so does this.

The files are made here: bombs, files that are cut, other formats, headers that lie.
"""

import random
import resource
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from gateway.engine.vision.pictures import decode, measure
from gateway.errors import BadRequest
from gateway.serving.sandbox import Sandbox
from tests.engine.vision.picture_files import (
    bmp,
    chunk,
    gif,
    interlaced_png,
    jpeg_size,
    noise,
    plain_png,
    png,
    saved,
    segment,
    vp8x,
    webp,
    with_orientation,
    with_segments,
    zeros,
)
from tests.sandboxes import sandbox

PLACE: Final = "messages[0].content[0]"
OTHER: Final = "none of PNG, JPEG, WEBP, GIF and BMP"
CUT: Final = "it is cut off"
BROKEN: Final = "it is broken"
LARGE: Final = "over 64,000,000"
SIDE: Final = "a side may have 16,384"
SMALL: Final = "a side has 4 at least"
THIN: Final = "200 times"
KINDS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
HEADER: Final = 48  # bytes, before those of any pixel
GROWN: Final = 60 << 20  # bytes, the most that this process may grow by


@cache
def text_bomb() -> bytes:
    return zlib.compress(bytes(200 << 20), 9)


@cache
def real(kind: str) -> bytes:
    return saved(noise().quantize(64) if kind == "GIF" else noise(), kind)


def cut(kind: str) -> Callable[[], bytes]:
    return lambda: real(kind)[: len(real(kind)) * 2 // 3]


def shuffled(start: bytes) -> Callable[[], bytes]:
    return lambda: start + random.Random(1).randbytes(5000)


def huge_restart() -> bytes:
    """Make a JPEG that promises a restart marker every 65,535 blocks, and has one now."""
    data = with_segments(real("JPEG"), segment(0xDD, b"\xff\xff"))
    middle = len(data) * 3 // 4
    return data[:middle] + b"\xff\xd7" + data[middle:]


def many_scans() -> bytes:
    """Repeat the last scan of a progressive JPEG, each of which goes through all its pixels."""
    data = saved(Image.new("RGB", (3000, 3000)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * 5000 + data[-2:]


def many_frames() -> bytes:
    frames = [Image.new("P", (16, 16), i % 7) for i in range(1000)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


REFUSED: Final[dict[str, tuple[Callable[[], bytes], str]]] = {
    "nothing": (lambda: b"", OTHER),
    "text": (lambda: b"hello", OTHER),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", OTHER),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), OTHER),
    "AVIF": (lambda: b"\0\0\0\x1cftypavif\0\0\0\0mif1avif" + bytes(64), OTHER),
    "PDF": (lambda: b"%PDF-1.7\n", OTHER),
    "EPS": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", OTHER),
    "TIFF": (lambda: saved(noise(), "TIFF"), OTHER),
    "ICO": (lambda: saved(noise(), "ICO"), OTHER),
    "a PNG's first bytes": (lambda: b"\x89PNG\r\n\x1a\n", BROKEN),
    "a PNG and noise": (shuffled(b"\x89PNG\r\n\x1a\n"), BROKEN),
    "a JPEG and noise": (shuffled(b"\xff\xd8\xff\xe0"), CUT),
    "a WEBP and noise": (shuffled(b"RIFF\xff\0\0\0WEBPVP8 "), BROKEN),
    "a GIF and noise": (shuffled(b"GIF89a"), LARGE),
    "a BMP and noise": (shuffled(b"BM"), CUT),
    "PNG of 900 million pixels": (lambda: png(30000, 30000, zeros(30000, 4)), LARGE),
    "PNG of 2^62 pixels": (lambda: png((1 << 31) - 1, (1 << 31) - 1), LARGE),
    "PNG a pixel too large": (lambda: png(8000, 8001), LARGE),
    "JPEG of 65,000 a side": (lambda: jpeg_size(real("JPEG"), 65000, 65000), LARGE),
    "GIF of 65,535 a side": (lambda: gif(65535, 65535, b",\0\0\0\0\1\0\1\0\0\2\0"), LARGE),
    "WEBP of 16,383 a side": (lambda: vp8x(16383, 16383), LARGE),
    "BMP of 2^31 a side": (lambda: bmp((1 << 31) - 1, (1 << 31) - 1), LARGE),
    "a long side": (lambda: plain_png(16385, 100), SIDE),
    "1 × 10,000": (lambda: saved(Image.new("RGB", (1, 10_000)), "PNG"), SMALL),
    "201 to 1": (lambda: plain_png(1005, 5), THIN),
    "PNG of no width": (lambda: png(0, 10), BROKEN),
    "JPEG of no height": (lambda: jpeg_size(real("JPEG"), 64, 0), BROKEN),
    "BMP of no height": (lambda: bmp(10, 0), BROKEN),
    "GIF without a frame": (lambda: gif(16, 16), BROKEN),
    "GIF that ends in a frame": (lambda: gif(16, 16, b",\0\0\0\0\x10\0\x10\0\0\2"), CUT),
    "WEBP without a picture": (lambda: vp8x(64, 64), BROKEN),
    "WEBP of an empty chunk": (lambda: webp(b"VP8 ", b""), BROKEN),
    "BMP of unknown compression": (lambda: bmp(16, 16, compression=77), BROKEN),
    "PNG of 3 bits": (lambda: png(16, 16, zeros(16, 16), depth=3), BROKEN),
    "PNG of no rows": (lambda: png(64, 64), CUT),
    "PNG of broken rows": (lambda: png(64, 64, b"\x78\x9c" + b"\xff" * 90), BROKEN),
    "PNG with a text bomb": (
        lambda: plain_png(more=chunk(b"zTXt", b"a\0\0" + text_bomb())),
        BROKEN,
    ),
    "PNG with a profile bomb": (
        lambda: plain_png(more=chunk(b"iCCP", b"a\0\0" + text_bomb())),
        BROKEN,
    ),
    "PNG with a chunk of 2 GB": (lambda: plain_png()[:33] + b"\x7f\xff\xff\xffzTXta\0\0", CUT),
    "PNG with a wrong checksum": (lambda: plain_png().replace(b"IHDR", b"IHDR\0", 1), BROKEN),
    **{f"cut {kind}": (cut(kind), CUT if kind != "WEBP" else BROKEN) for kind in KINDS},
    "cut interlaced PNG": (lambda: interlaced_png(np.asarray(noise()))[:6000], CUT),
    "cut progressive JPEG": (lambda: saved(noise(), "JPEG", progressive=True)[:900], CUT),
}
DECODED: Final[dict[str, tuple[Callable[[], bytes], tuple[int, int]]]] = {
    "64 million pixels of zeros": (lambda: plain_png(8000, 8000), (8000, 8000)),
    "as long as may be": (lambda: plain_png(16384, 100), (16384, 100)),
    "as thin as may be": (lambda: plain_png(1000, 5), (1000, 5)),
    "as small as may be": (lambda: plain_png(4, 4), (4, 4)),
    "PNG whose last rows are missing": (lambda: png(64, 64, zeros(64, 9)), (64, 64)),
    "many frames": (many_frames, (16, 16)),
    "EXIF of noise": (
        lambda: with_segments(real("JPEG"), segment(0xE1, b"Exif\0\0" + bytes(range(256)))),
        (64, 48),
    ),
    "EXIF of 2 MB": (
        lambda: with_segments(
            real("JPEG"), *[segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08" + b"\xff" * 65_000)] * 32
        ),
        (64, 48),
    ),
    "EXIF of no known turn": (
        lambda: saved(noise(), "JPEG", exif=with_orientation(77)),
        (64, 48),
    ),
    "EXIF that loops": (
        lambda: with_segments(
            real("JPEG"), segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0\x08\0\0\0" * 3)
        ),
        (64, 48),
    ),
    "JPEG with a huge restart": (huge_restart, (64, 48)),
    "bytes after the end": (lambda: real("PNG") + bytes(100_000), (64, 48)),
}


def resident() -> int:
    """Return the most bytes that this process has held since it was last reset."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read(box: Sandbox, data: bytes) -> tuple[int, int]:
    size = measure(box, data, PLACE)
    shown = decode(box, data, 56, 28, "bicubic", PLACE)
    assert shown.shape == (28, 56, 3)
    return size


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(box: Sandbox, name: str) -> None:
    make, why = REFUSED[name]
    data = make()
    with pytest.raises(BadRequest, match=why) as raised:
        read(box, data)
    assert PLACE in raised.value.message
    assert read(box, real("PNG")) == (64, 48)


@pytest.mark.parametrize("name", DECODED)
def test_it_is_decoded(box: Sandbox, name: str) -> None:
    make, size = DECODED[name]
    assert read(box, make()) == size


@pytest.mark.parametrize("name", ["PNG of 900 million pixels", "WEBP of 16,383 a side"])
def test_a_bomb_is_refused_by_its_header(box: Sandbox, name: str) -> None:
    header = REFUSED[name][0]()[:HEADER]
    with pytest.raises(BadRequest, match=LARGE):
        measure(box, header, PLACE)


def test_a_file_that_takes_too_long_is_not_tried_again() -> None:
    """A progressive JPEG may go through all its pixels thousands of times."""
    data = many_scans()
    with sandbox("image", 1) as box:
        assert measure(box, data, PLACE) == (3000, 3000)
        for _ in range(2):
            with pytest.raises(BadRequest, match="1 seconds of processor time"):
                decode(box, data, 56, 28, "bicubic", PLACE)
        with pytest.raises(BadRequest, match="1 seconds of processor time"):
            measure(box, data, PLACE)
        assert read(box, real("PNG")) == (64, 48)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is reset through /proc")
def test_this_process_does_not_grow_with_a_bomb(box: Sandbox) -> None:
    data = plain_png(8000, 8000)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident()
    assert read(box, data) == (8000, 8000)
    assert resident() - before < GROWN


@pytest.mark.generator
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_a_spoilt_file_is_refused_or_decoded(
    box: Sandbox, kind: str, chance: random.Random
) -> None:
    """Bytes are changed, taken out, put in or swapped: no other error is raised."""
    data = bytearray(real(kind))
    for _ in range(chance.randint(1, 8)):
        # Headers decide more than pixels do.
        at = chance.randrange(min(len(data), chance.choice((16, 64, 512, len(data)))))
        few = chance.randint(1, 6)
        match chance.randrange(4):
            case 0:
                data[at] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
            case 1 if len(data) > few + 1:
                del data[at : at + few]
            case 2:
                data[at:at] = chance.randbytes(few)
            case _:
                data[at : at + few] = data[at : at + few][::-1]
    try:
        width, height = measure(box, bytes(data), PLACE)
        shown = decode(box, bytes(data), 28, 28, "bilinear", PLACE)
    except BadRequest:
        return
    assert min(width, height) >= 4
    assert shown.dtype == np.uint8
