"""Arrays that are kept of prompts as bytes, for a file, and back. On the lane.

A header in JSON has the prompt's tokens, and the arrays' types and shapes where they stand among
lists and numbers; the arrays follow it.
"""

import io
import json
import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

PIECE_BYTES: Final = 64 << 20  # of blocks at most, about: copied in some 20 ms
_LENGTH: Final = 8  # bytes of the header's length
_DTYPES: Final = {str(each): each for each in vars(mx).values() if isinstance(each, mx.Dtype)}

# A prompt's tokens; the plain layers' planes of each of its last blocks; the states of the other
# layers' caches after the last one, if there are any.
Piece: TypeAlias = tuple[Sequence[int], Sequence[Any], Sequence[Any] | None]


def encode(piece: Piece) -> bytes:
    """Return what `decode` reads; the arrays are evaluated."""
    tokens, *layers = piece
    arrays: list[mx.array] = []

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, mx.array):
            return leaf
        arrays.append(leaf)
        return {"dtype": str(leaf.dtype), "shape": leaf.shape}

    header = json.dumps([tokens, tree_map(note, layers)]).encode()
    numbers: Any = [mx.contiguous(array).reshape(-1).view(mx.uint8) for array in arrays]
    parts = [memoryview(each) for each in numbers]
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *parts])


def decode(content: bytes) -> Piece:
    """Return what `encode` was given, with lists for tuples. Raises anything for what does not come
    from there.
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
