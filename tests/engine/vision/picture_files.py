"""Image files made byte by byte, and by Pillow."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def png(
    width: int,
    height: int,
    rows: bytes = b"",
    *,
    depth: int = 8,
    colour: int = 2,
    interlace: int = 0,
    more: bytes = b"",
) -> bytes:
    """Make a PNG of any header, with chunks before its pixels; `rows` are compressed already."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    chunks = chunk(b"IHDR", header) + more + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def interlaced_png(pixels: NDArray[np.uint8]) -> bytes:
    """Write pixels (height, width, 3) in the seven passes of Adam7."""
    steps = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2))
    passes = [pixels[top::down, left::right] for top, left, down, right in (*steps, (1, 0, 2, 1))]
    rows = b"".join(b"\0" + row.tobytes() for each in passes for row in each)
    return png(pixels.shape[1], pixels.shape[0], zlib.compress(rows), interlace=1)


def zeros(width: int, height: int, channels: int = 3) -> bytes:
    """Compress the rows of a black image, without making them at once."""
    deflate = zlib.compressobj(9)
    row = bytes(1 + width * channels)
    return b"".join([*(deflate.compress(row) for _ in range(height)), deflate.flush()])


def plain_png(width: int = 8, height: int = 8, **more: Any) -> bytes:
    return png(width, height, zeros(width, height), **more)


def bmp(
    width: int, height: int, bits: int = 24, compression: int = 0, pixels: bytes = b""
) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 1, 1, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + info + pixels


def gif(width: int, height: int, blocks: bytes = b"") -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + blocks + b";"


def webp(kind: bytes, content: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


def vp8x(width: int, height: int) -> bytes:
    """Make the header of a WEBP whose canvas has this size, and no picture."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp(b"VP8X", b"\x02\0\0\0" + sizes)


def jpeg_size(data: bytes, width: int, height: int) -> bytes:
    """Write another size into a JPEG's header."""
    start = data.index(b"\xff\xc0")
    return data[: start + 5] + struct.pack(">HH", height, width) + data[start + 9 :]


def segment(marker: int, content: bytes) -> bytes:
    """Make a segment of a JPEG."""
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def with_segments(data: bytes, *segments: bytes) -> bytes:
    return data[:2] + b"".join(segments) + data[2:]


def with_orientation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif
