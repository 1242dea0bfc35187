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

PIECE_BYTES: Final = 64 << 20  # of blocks at most, about: copied in some 20 ms
_LENGTH: Final = 8  # bytes of the header's length
_DTYPES: Final = {str(each): each for each in vars(mx).values() if isinstance(each, mx.Dtype)}

# A prompt's tokens, and how many of them are before the piece; the plain layers' planes of each of
# its blocks; the states of the other layers' caches after the last one, if there are any.
Piece: TypeAlias = tuple[Sequence[int], int, Sequence[Any], Sequence[Any] | None]


def encode(piece: Piece) -> bytes:
    """Return what `decode` reads; the arrays are evaluated."""
    arrays: list[mx.array] = []
    header = json.dumps(_outline(piece, arrays)).encode()
    numbers: Any = [mx.contiguous(array).reshape(-1).view(mx.uint8) for array in arrays]
    parts = [memoryview(each) for each in numbers]
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *parts])


def decode(content: bytes) -> Piece:
    """Return what `encode` was given, with lists for tuples. Raises anything for what does not come
    from there.
    """
    file = io.BytesIO(content)
    outline = json.loads(file.read(int.from_bytes(file.read(_LENGTH), "little")))
    tokens, first, blocks, states = _fill(outline, file)
    return tokens, first, blocks, states


def _outline(tree: Any, arrays: list[mx.array]) -> Any:
    """Return a tree with types and shapes in place of its arrays, which are appended in order."""
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"dtype": str(tree.dtype), "shape": tree.shape}
    if isinstance(tree, list | tuple):
        return [_outline(leaf, arrays) for leaf in tree]
    return tree


def _fill(outline: Any, file: io.BytesIO) -> Any:
    """Return the tree of an outline, with the file's next arrays."""
    if isinstance(outline, list):
        return [_fill(leaf, file) for leaf in outline]
    if not isinstance(outline, dict):
        return outline
    dtype, shape = _DTYPES[outline["dtype"]], outline["shape"]
    numbers = np.frombuffer(file.read(dtype.size * math.prod(shape)), np.uint8)
    return mx.array(numbers).view(dtype).reshape(shape)
