"""A model's caches, one per layer, and operations on rows that involve all layers.

The main operation is rollback: rejected draft tokens are removed from each row. Plain KV drops the
row's last tokens. A sliding window can drop them right after a pass of several tokens, while it
still has the tokens that the pass pushed out. Recurrent states cannot drop tokens: the row is
restored to its state before the pass, and its next pass reads the accepted tokens again.
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
    """Recurrent states of rows. `earlier` are the states before the last pass, while a rollback may
    still need them.
    """

    def __init__(self, size: int, left_padding: list[int] | None = None) -> None:
        super().__init__(size, left_padding)
        self.cache: list[mx.array | None]
        self.earlier: list[mx.array | None] | None = None

    @property
    def nbytes(self) -> int:
        arrays = [*self.cache, *(self.earlier or ())]
        return sum(array.nbytes for array in arrays if array is not None)

    def hold(self) -> None:
        """Keep the current states for `go_back`. No copy is needed: a pass makes new arrays."""
        self.earlier = list(self.cache)

    def go_back(self, rows: Sequence[bool]) -> None:
        """Restore the states before the pass in rows where `rows` is True. Release `earlier`."""
        assert self.earlier is not None
        if any(rows):
            pairs = zip(self.earlier, self.cache, strict=True)
            self.cache = [_choose_rows(rows, before, now) for before, now in pairs]
        self.earlier = None

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        super().filter(batch_indices)
        if self.earlier is not None:
            self.earlier = [
                None if state is None else state[batch_indices] for state in self.earlier
            ]

    def extend(self, other: "StatesCache") -> None:
        """Append the rows of another cache of the same layer."""
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
    """Return an array with `chosen`'s rows where `rows` is True, and `other`'s elsewhere."""
    if chosen is None or other is None:
        return other
    return mx.where(mx.array(list(rows)).reshape(-1, *[1] * (other.ndim - 1)), chosen, other)


def can_batch(model: Any) -> bool:
    """Return True if mlx-lm can batch this model's caches."""
    return all(hasattr(layer, "merge") for layer in make_prompt_cache(model))


def make_batch_caches(model: Any) -> list[Any]:
    """Return empty caches for one sequence, which can be merged into a batch."""
    return [for_batch(layer) for layer in make_prompt_cache(model)]


def batch_of_one(layers: Sequence[Any]) -> list[Any]:
    """Return the caches of a batch of one, made from one sequence's caches."""
    return [layer.merge([layer]) for layer in layers]


def is_plain(layer: Any) -> bool:
    """Return True if a cache keeps the keys and values of all tokens, as mlx-lm's KVCache and our
    RaggedKVCache do.
    """
    return isinstance(for_batch(layer), RaggedKVCache)


def for_batch(layer: Any) -> Any:
    """Return an empty cache to use for a batch in place of mlx-lm's empty `layer`."""
    if type(layer) is KVCache:
        return RaggedKVCache()
    if type(layer) is ArraysCache:
        return StatesCache(len(layer.cache))
    return layer


def can_go_back(layers: Sequence[Any]) -> bool:
    """Return True if rejected tokens can be rolled back in these caches."""
    kinds = RaggedKVCache, StatesCache, BatchRotatingKVCache
    # At least one layer must have plain KV, which alone knows each row's number of tokens.
    has_lengths = any(isinstance(layer, RaggedKVCache) for layer in layers)
    return has_lengths and all(isinstance(layer, kinds) for layer in layers)


def row_lengths(layers: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of tokens in each row of these caches, at least one of which is plain."""
    plain = next(layer for layer in layers if isinstance(layer, RaggedKVCache))
    return plain.lengths.counts


@contextmanager
def padded(layers: Sequence[Any], width: int, padding: Sequence[int]) -> Iterator[None]:
    """Prepare the caches for a pass of `width` tokens per row. Call the model inside the context.
    `padding` has the number of padding tokens at each row's end; they are removed afterwards.
    """
    if width > 1:
        windows: list[Any] = [layer for layer in layers if isinstance(layer, BatchRotatingKVCache)]
        for window in windows:
            window._temporal_order()  # mlx-lm's mask for several tokens needs tokens in order
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
    """Keep the states that the next pass replaces, so that rows can be rolled back."""
    for layer in layers:
        if isinstance(layer, StatesCache):
            layer.hold()


def hold_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Return copies, by index, of the caches that cannot drop tokens which several passes read."""
    held = {}
    for place, layer in enumerate(layers):
        if not isinstance(layer, RaggedKVCache):
            held[place] = copy.copy(layer)
            # MLX may write in place to an array that the cache and its copy share, so the copy
            # gets views.
            held[place].state = tree_map(_view, layer.state)
    return held


def _view(leaf: Any) -> Any:
    return leaf.reshape(leaf.shape) if isinstance(leaf, mx.array) else leaf


def go_back(layers: Sequence[Any], dropped: Sequence[int], read: Sequence[int]) -> None:
    """Remove the last `dropped[i]` tokens of each row i, after a pass that read `read[i]` tokens of
    it. If a layer has states, a row that drops any tokens drops all tokens of the pass.
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
            # The tokens are removed in the same way as padding.
            layer.prepare(lengths=[-count for count in counts], right_padding=counts)
            layer.finalize()
