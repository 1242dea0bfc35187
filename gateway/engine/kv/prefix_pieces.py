"""Pieces of the KV of prompts for files: their ends, and their form as bytes. On the lane.

A header in JSON has the prompt's tokens, and the arrays' types and shapes at their places among
lists and numbers; the arrays follow it.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from gateway.engine.device import evaluate

PIECE_BYTES: Final = 64 << 20  # bytes of blocks, at most about: copied in some 20 ms
NEAR: Final = 4  # blocks: longer than the answer's opening and the part of it that a template drops
_LENGTH: Final = 8  # bytes of the header's length
_DTYPES: Final = {str(kind): kind for kind in vars(mx).values() if isinstance(kind, mx.Dtype)}

Key: TypeAlias = tuple[int, ...]  # the number of the block before, then a block's own tokens
# A prompt's tokens; the plain layers' planes of each of its last blocks; the states of the other
# layers' caches after the last one, None if they are not kept.
Piece: TypeAlias = tuple[Sequence[int], Sequence[Any], Sequence[Any] | None]


def follow(
    key: Key, place: int, kept: Mapping[Key, Any], following: Mapping[int, Sequence[Key]]
) -> list[Key]:
    """Return a kept block, with `place` blocks before it, and the following blocks of its piece.

    `kept` has all blocks, and `following` the keys of those after a block, by its number.
    """
    most = max(1, PIECE_BYTES // kept[key].nbytes)
    run = [key]
    while (place + len(run)) % most:
        last = kept[run[-1]].number
        has_states = (last,) in kept
        if len(following[last]) != 1 or (has_states and _is_near_end(last, kept, following)):
            break
        run += following[last]
    return run


def _is_near_end(
    number: int, kept: Mapping[Key, Any], following: Mapping[int, Sequence[Key]]
) -> bool:
    """Return True if prompts end or part within a few blocks of one."""
    for _ in range(NEAR):
        if len(following[number]) != 1:
            return True
        number = kept[following[number][0]].number
    return False


def encode(piece: Piece) -> bytes:
    """Return the bytes that `decode` reads; the arrays are evaluated."""
    tokens, *layers = piece
    arrays: list[mx.array] = []

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, mx.array):
            return leaf
        arrays.append(leaf)
        return {"dtype": str(leaf.dtype), "shape": leaf.shape}

    header = json.dumps([tokens, tree_map(note, layers)]).encode()
    numbers: Any = [mx.contiguous(array).reshape(-1).view(mx.uint8) for array in arrays]
    evaluate(numbers)
    parts = [memoryview(array) for array in numbers]
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *parts])


def decode(content: bytes) -> Piece:
    """Return the piece that `encode` was given, with lists for tuples. Raises any exception for
    bytes of other origin.
    """
    file = io.BytesIO(content)

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, dict):
            return leaf
        dtype, shape = _DTYPES[leaf["dtype"]], leaf["shape"]
        numbers = np.frombuffer(file.read(dtype.size * math.prod(shape)), np.uint8)
        return mx.array(numbers).view(dtype).reshape(shape)

    tokens, layers = json.loads(file.read(int.from_bytes(file.read(_LENGTH), "little")))
    blocks, states = tree_map(read, layers, is_leaf=lambda leaf: isinstance(leaf, dict))
    return tokens, blocks, states
