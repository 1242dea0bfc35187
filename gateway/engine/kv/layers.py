"""A model's caches, one a layer: the operations on rows that go through all layers.

Each row goes back to before its tokens that were read ahead and not chosen. Plain KV drops a row's
last tokens. A sliding window can drop them right after a pass of several tokens, which keeps the
tokens that they push out. States cannot: their row goes back to before the whole pass, and reads
the chosen tokens again with its next ones.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, KVCache, make_prompt_cache

from gateway.engine.kv.cache import RaggedKVCache
from gateway.engine.models.rotations import sharing_rotations

_Base: Any = ArraysCache  # untyped in mlx-lm


class StatesCache(_Base):  # type: ignore[misc]
    """States of rows. Those from before the last pass are held while they may be needed."""

    def __init__(self, size: int, left_padding: list[int] | None = None) -> None:
        super().__init__(size, left_padding)
        self.cache: list[mx.array | None]
        self.earlier: list[mx.array | None] | None = None

    @property
    def nbytes(self) -> int:
        arrays = [*self.cache, *(self.earlier or ())]
        return sum(array.nbytes for array in arrays if array is not None)

    def hold(self) -> None:
        """Hold the states before a pass; MLX writes a pass's states to new arrays."""
        self.earlier = list(self.cache)

    def go_back(self, rows: Sequence[bool]) -> None:
        """Replace these rows' states by those from before the pass, and hold these no longer."""
        assert self.earlier is not None
        if any(rows):
            pairs = zip(self.earlier, self.cache, strict=True)
            self.cache = [_choose_rows(rows, before, now) for before, now in pairs]
        self.earlier = None

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        super().filter(batch_indices)
        if self.earlier is not None:
            self.earlier = [
                None if state is None else state[batch_indices] for state in self.earlier
            ]

    def extend(self, other: "StatesCache") -> None:
        """Add the rows of another cache of the same layer."""
        if self.earlier is not None or other.earlier is not None:
            before: Any = ArraysCache(0)
            joining: Any = ArraysCache(0)
            before.cache = self.earlier or self.cache
            joining.cache = other.earlier or other.cache
            before.extend(joining)
            self.earlier = before.cache
        super().extend(other)

    def extract(self, idx: int) -> "StatesCache":
        """Return a copy of one row."""
        row = StatesCache(len(self.cache))
        row.cache = [None if state is None else state[idx : idx + 1] for state in self.cache]
        return row


def _choose_rows(
    rows: Sequence[bool], chosen: mx.array | None, other: mx.array | None
) -> mx.array | None:
    """Return an array with the rows of `chosen` that `rows` marks, and the rest of `other`."""
    if chosen is None or other is None:
        return other
    return mx.where(mx.array(list(rows)).reshape(-1, *[1] * (other.ndim - 1)), chosen, other)


def can_batch(model: Any) -> bool:
    """Return True if mlx-lm can put rows of this model side by side."""
    return all(hasattr(layer, "merge") for layer in make_prompt_cache(model))


def make_batch_caches(model: Any) -> list[Any]:
    """Return the empty caches of one sequence, for merging with others'."""
    return [for_batch(layer) for layer in make_prompt_cache(model)]


def batch_of_one(layers: Sequence[Any]) -> list[Any]:
    """Return the caches of one sequence as those of a batch."""
    return [layer.merge([layer]) for layer in layers]


def is_plain(layer: Any) -> bool:
    """Return True for mlx-lm's cache of all tokens' keys and values, and for its successors."""
    return isinstance(for_batch(layer), RaggedKVCache)


def for_batch(layer: Any) -> Any:
    """Return the empty cache that replaces mlx-lm's in a batch."""
    if type(layer) is KVCache:
        return RaggedKVCache()
    if type(layer) is ArraysCache:
        return StatesCache(len(layer.cache))
    return layer


def can_go_back(layers: Sequence[Any]) -> bool:
    """Return True if the rows of these caches can read tokens ahead of their choice."""
    kinds = RaggedKVCache, StatesCache, BatchRotatingKVCache
    # Only plain KV knows the number of tokens in each row.
    has_lengths = any(isinstance(layer, RaggedKVCache) for layer in layers)
    return has_lengths and all(isinstance(layer, kinds) for layer in layers)


def row_lengths(layers: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of tokens of each row in these caches, which can go back."""
    plain = next(layer for layer in layers if isinstance(layer, RaggedKVCache))
    return plain.lengths.counts


@contextmanager
def padded(layers: Sequence[Any], width: int, padding: Sequence[int]) -> Iterator[None]:
    """While entered, build a pass of `width` tokens a row. `padding` has the number of padding
    tokens at each row's end.
    """
    if width > 1:
        windows: list[Any] = [layer for layer in layers if isinstance(layer, BatchRotatingKVCache)]
        for window in windows:
            window._temporal_order()  # mlx-lm's mask for several tokens relies on it
    if not any(padding):
        with sharing_rotations():
            yield
        return
    for layer in layers:
        layer.prepare(lengths=[width - count for count in padding], right_padding=padding)
    with sharing_rotations():
        yield
    for layer in layers:
        layer.finalize()


def hold_states(layers: Sequence[Any]) -> None:
    """Hold the states that the next pass replaces, and that rows may go back to."""
    for layer in layers:
        if isinstance(layer, StatesCache):
            layer.hold()


def hold_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Copy, by place, the caches that cannot drop the tokens of single-token passes again."""
    held = {}
    for place, layer in enumerate(layers):
        if not isinstance(layer, RaggedKVCache):
            held[place] = copy.copy(layer)
            # MLX may write in place to an array that both hold; a view is an array of its own.
            held[place].state = tree_map(_view, layer.state)
    return held


def _view(leaf: Any) -> Any:
    return leaf.reshape(leaf.shape) if isinstance(leaf, mx.array) else leaf


def go_back(layers: Sequence[Any], dropped: Sequence[int], read: Sequence[int]) -> None:
    """Take the last `dropped` tokens off each row's end, after a pass that has read `read` tokens
    of each. If there are states, a row that drops any drops all of the pass.
    """
    states = [layer for layer in layers if isinstance(layer, StatesCache)]
    goes_back = [count > 0 for count in dropped]
    counts = tuple(dropped)
    if states:
        counts = tuple(n if gone else 0 for n, gone in zip(read, goes_back, strict=True))
    for layer in states:
        layer.go_back(goes_back)
    if not any(counts):
        return
    for layer in layers:
        if isinstance(layer, RaggedKVCache):
            layer.rewind(counts)
        elif isinstance(layer, BatchRotatingKVCache):
            # The tokens leave as padding does.
            layer.prepare(lengths=[-count for count in counts], right_padding=counts)
            layer.finalize()
