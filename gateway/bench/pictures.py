"""Images to send, made without a library."""

import struct
import zlib
from functools import cache
from random import Random
from typing import Final

SQUARE: Final = 32  # pixels
_COLOURS: Final = 256


def draw_png(seed: int, width: int, height: int) -> bytes:
    """Draw squares of random colours, the same for the same seed. The sides are multiples of 32.

    Images of one size differ in their palettes alone, so a load tool can draw them while it
    measures: only the first takes milliseconds.
    """
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    palette = _chunk(b"PLTE", Random(seed).randbytes(3 * _COLOURS))
    start = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
    return start + palette + _squares(width, height) + _chunk(b"IEND", b"")


@cache
def _squares(width: int, height: int) -> bytes:
    """Return the pixels, as indices of a palette."""
    random = Random(0)
    rows = []
    for _ in range(height // SQUARE):
        colours = [random.randbytes(1) for _ in range(width // SQUARE)]
        # Each row of pixels begins with the number of its filter: none.
        rows.append((b"\0" + b"".join(colour * SQUARE for colour in colours)) * SQUARE)
    return _chunk(b"IDAT", zlib.compress(b"".join(rows), 1))


def _chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)
