"""Damages a tiny GGUF file in many ways and opens each; a process of its own, whose end tells.

    python -m tests.engine.models.gguf.fuzzing <folder> <seed> <headers> <loads>

Whatever is thrown but errors of ours ends it with a traceback, and a crash with a signal.
"""

import json
import random
import struct
import sys
from collections import Counter
from pathlib import Path

import mlx.core as mx

from gateway.engine import device
from gateway.engine.device import Device
from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.models.gguf.header import GgufError, read_header
from gateway.errors import ModelLoadFailed
from tests.engine.models.gguf.opening import open_decoder_of
from tests.gguf_files import write_model

EXTREMES = [
    *(1 << bits for bits in (0, 1, 8, 15, 16, 24, 31, 32, 40, 62, 63)),
    *((1 << bits) - 1 for bits in (7, 8, 15, 16, 31, 32, 63, 64)),
    0,
]


def damaged(content: bytes, header_bytes: int, draw: random.Random) -> bytes:
    """Return a file with something wrong in it, mostly in its header."""
    out = bytearray(content)
    at = draw.randrange(header_bytes)
    match draw.randrange(7):
        case 0:
            for _ in range(draw.randint(1, 4)):
                out[draw.randrange(header_bytes)] ^= 1 << draw.randrange(8)
        case 1:
            out[at : at + 8] = struct.pack("<Q", draw.choice(EXTREMES))
        case 2:
            out[at : at + 4] = struct.pack("<I", draw.choice(EXTREMES) & 0xFFFFFFFF)
        case 3:
            del out[draw.randrange(len(out)) :]
        case 4:
            del out[at : at + draw.randint(1, 64)]
        case 5:
            out[at:at] = draw.randbytes(draw.randint(1, 64))
        case 6:
            for _ in range(draw.randint(1, 2000)):
                out[draw.randrange(header_bytes, len(out))] = draw.randrange(256)
    return bytes(out)


def load(path: Path) -> ChatSetup:
    """Open a model and ask it for one token."""
    setup = read_chat_setup(path, name="m", max_context=None)
    checkpoint = setup.checkpoint
    model = open_decoder_of(checkpoint, is_packed=path.stat().st_size % 2 == 0)  # type: ignore[arg-type]
    mx.eval(model(mx.array([[1, 2, 3]])))
    return setup


def main() -> None:
    """Print how often each way of ending was seen."""
    folder, seed, headers, loads = Path(sys.argv[1]), *map(int, sys.argv[2:])
    device.configure(Device.CPU)
    whole = write_model(folder / "whole.gguf", "llama")
    content = whole.read_bytes()
    header_bytes = min(each.offset for each in read_header(whole).tensors.values())
    load(whole)
    draw, ends = random.Random(seed), Counter[str]()
    path = folder / "damaged.gguf"
    for _ in range(headers):
        path.write_bytes(damaged(content, header_bytes, draw))
        try:
            header = read_header(path)
            for key in header.metadata:
                header.metadata[key]
            ends["read"] += 1
        except GgufError:
            ends["refused"] += 1
    for _ in range(loads):
        path.write_bytes(damaged(content, header_bytes, draw))
        try:
            load(path)
            ends["loaded"] += 1
        except ModelLoadFailed:
            ends["failed"] += 1
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
