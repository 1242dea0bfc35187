"""Images to send, made without a library."""

import struct
import zlib
from random import Random
from typing import Final

SQUARE: Final = 32  # pixels


def draw_png(seed: int, width: int, height: int) -> bytes:
    """Draw squares of random colours, the same for the same seed. The sides are multiples of 32."""
    random = Random(seed)
    rows = []
    for _ in range(height // SQUARE):
        colours = [random.randbytes(3) for _ in range(width // SQUARE)]
        # Each row of pixels begins with the number of its filter: none.
        rows.append((b"\0" + b"".join(colour * SQUARE for colour in colours)) * SQUARE)
    pixels = b"".join(rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 1)), (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + kind + data
        content += struct.pack(">I", zlib.crc32(kind + data))
    return content
