"""Pieces of the prefix cache, encoded for files. Must run on the lane.

An encoded piece is a JSON header with the tokens, dtypes and shapes, then the bytes of all arrays.
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

PIECE_BYTES: Final = 64 << 20  # approximate limit of a piece; copying this much takes some 20 ms
NEAR: Final = 4  # more than the last blocks that a conversation's next prompt may drop
_LENGTH: Final = 8  # bytes of the header's length, an integer before the header
_DTYPES: Final = {str(kind): kind for kind in vars(mx).values() if isinstance(kind, mx.Dtype)}

Key: TypeAlias = tuple[int, ...]  # number of the preceding block, then the block's tokens
# The prompt's tokens up to the piece's end, the planes of each block, and the states after the last
# block, None if they are not cached.
Piece: TypeAlias = tuple[Sequence[int], Sequence[Any], Sequence[Any] | None]


def follow(
    key: Key, place: int, kept: Mapping[Key, Any], following: Mapping[int, Sequence[Key]]
) -> list[Key]:
    """Return the keys of a piece's blocks, given the first block's key.

    A piece ends at a fork, every PIECE_BYTES of its prompt, and at states near the prompt's end.
    `place` counts the prompt's blocks before the piece.
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
    """Return True if a prompt ends or forks within NEAR blocks after this block."""
    for _ in range(NEAR):
        if len(following[number]) != 1:
            return True
        number = kept[following[number][0]].number
    return False


def encode(piece: Piece) -> bytes:
    """Encode a piece as bytes; evaluate its arrays."""
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
    """Decode an encoded piece; tuples become lists. Raises any exception for other bytes."""
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
