"""A model's caches, one per layer, and operations on all layers.

A rollback removes rejected draft tokens. Plain KV drops a row's last tokens, and so do sliding
windows, but only right after the pass. Recurrent states are restored to those before the pass, and
the row's accepted tokens are read again.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import sub
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, KVCache, make_prompt_cache

from gateway.engine.kv.cache import RaggedKVCache
from gateway.engine.models.rotations import sharing_rotations

_Base: Any = ArraysCache  # untyped in mlx-lm


class StatesCache(_Base):  # type: ignore[misc]
    """The recurrent states of rows."""

    def __init__(self, size: int, left_padding: list[int] | None = None) -> None:
        super().__init__(size, left_padding)
        self.cache: list[mx.array | None]
        # The states before the last pass, while a rollback may need them.
        self.earlier: list[mx.array | None] | None = None
        # A model whose hidden states drafts are made from sets `recent`: those of a pass that may
        # be undone, (rows, n, width). After a rollback by which tokens are read again, the first
        # `known[i]` of row i are of accepted tokens.
        self.recent: mx.array | None = None
        self.known: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        arrays = [*self.cache, *(self.earlier or ()), self.recent]
        return sum(array.nbytes for array in arrays if array is not None)

    def hold(self) -> None:
        self.earlier = list(self.cache)  # a pass makes new arrays
        self.known = ()  # rows may have joined since it was set

    def go_back(self, rows: Sequence[bool]) -> None:
        """Restore the earlier states of rows where `rows` is True, and release `earlier`."""
        assert self.earlier is not None
        if any(rows):
            pairs = zip(self.earlier, self.cache, strict=True)
            self.cache = [_choose_rows(rows, before, now) for before, now in pairs]
        self.earlier = None

    def choose(self, places: Sequence[int | None]) -> None:
        """Set each row's state to the one at its place of `recent`, if it is not None."""
        assert self.recent is not None
        chosen = mx.array([place or 0 for place in places])[:, None, None]
        state = mx.take_along_axis(self.recent, chosen, axis=1)
        self.cache = [_choose_rows([p is not None for p in places], state, self.cache[0])]
        self.earlier = self.recent = None

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(batch_indices)
        if self.recent is not None:
            self.recent = self.recent[batch_indices]
            self.known = tuple(self.known[i] for i in batch_indices if self.known)
        if self.earlier is not None:
            self.earlier = [
                None if state is None else state[batch_indices] for state in self.earlier
            ]

    def extend(self, other: "StatesCache") -> None:
        self.recent = _join_rows(self, other) if self.earlier or other.earlier else None
        if self.earlier is not None or other.earlier is not None:
            before: Any = ArraysCache(0)
            joining: Any = ArraysCache(0)
            before.cache = self.earlier or self.cache
            joining.cache = other.earlier or other.cache
            before.extend(joining)
            self.earlier = before.cache
        super().extend(other)

    def extract(self, idx: int) -> "StatesCache":
        row = StatesCache(len(self.cache))
        row.cache = [None if state is None else state[idx : idx + 1] for state in self.cache]
        return row


def _join_rows(one: StatesCache, other: StatesCache) -> mx.array | None:
    """Return the `recent` of both; what a row has none of is never looked at."""
    given = [each.recent for each in (one, other) if each.recent is not None]
    if not given:
        return None
    width, joined = max(each.shape[1] for each in given), list[Any]()
    for cache in (one, other):
        recent: Any = cache.cache[0] if cache.recent is None else cache.recent
        joined.append(mx.pad(recent, [(0, 0), (0, width - recent.shape[1]), (0, 0)]))
    return mx.concatenate(joined)


def _choose_rows(
    rows: Sequence[bool], chosen: mx.array | None, other: mx.array | None
) -> mx.array | None:
    if chosen is None or other is None:
        return other
    return mx.where(mx.array(list(rows)).reshape(-1, *[1] * (other.ndim - 1)), chosen, other)


def can_batch(model: Any) -> bool:
    return all(hasattr(layer, "merge") for layer in make_prompt_cache(model))


def make_batch_caches(model: Any) -> list[Any]:
    """Return empty caches for one sequence, which can be merged into a batch."""
    return [for_batch(layer) for layer in make_prompt_cache(model)]


def batch_of_one(layers: Sequence[Any]) -> list[Any]:
    return [layer.merge([layer]) for layer in layers]


def is_plain(layer: Any) -> bool:
    """Return True if a cache keeps the keys and values of all tokens."""
    return isinstance(for_batch(layer), RaggedKVCache)


def for_batch(layer: Any) -> Any:
    """Return an empty cache to use for a batch in place of mlx-lm's empty `layer`."""
    if type(layer) is KVCache:
        return RaggedKVCache()
    if type(layer) is ArraysCache:
        return StatesCache(len(layer.cache))
    return layer


def can_go_back(layers: Sequence[Any]) -> bool:
    kinds = RaggedKVCache, StatesCache, BatchRotatingKVCache
    # Only plain KV knows each row's number of tokens.
    has_lengths = any(isinstance(layer, RaggedKVCache) for layer in layers)
    return has_lengths and all(isinstance(layer, kinds) for layer in layers)


def row_lengths(layers: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of tokens in each row, from a plain cache."""
    plain = next(layer for layer in layers if isinstance(layer, RaggedKVCache))
    return plain.lengths.counts


@contextmanager
def padded(layers: Sequence[Any], width: int, padding: Sequence[int]) -> Iterator[None]:
    """Prepare a pass of `width` tokens per row; remove each row's padding tokens afterwards."""
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
    for layer in layers:
        if isinstance(layer, StatesCache):
            layer.hold()


def hold_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Return copies, by layer index, of the caches that can't drop the tokens of several passes."""
    held = {}
    for place, layer in enumerate(layers):
        if not isinstance(layer, RaggedKVCache):
            held[place] = copy.copy(layer)
            # MLX may write to a shared array in place, so the copy gets views.
            held[place].state = tree_map(_view, layer.state)
    return held


def _view(leaf: Any) -> Any:
    return leaf.reshape(leaf.shape) if isinstance(leaf, mx.array) else leaf


def go_back(layers: Sequence[Any], dropped: Sequence[int], read: Sequence[int]) -> None:
    """Remove the last `dropped[i]` of the `read[i]` tokens that a pass read of each row i.

    If a layer has states, a row that drops any tokens drops all tokens of the pass. Hidden states
    that drafts are made from are chosen from those of the pass, if no layer has other states.
    """
    states = [layer for layer in layers if isinstance(layer, StatesCache)]
    goes_back = [count > 0 for count in dropped]
    counts = tuple(dropped)
    is_reread = any(layer.recent is None for layer in states)
    if is_reread:
        counts = tuple(n if gone else 0 for n, gone in zip(read, goes_back, strict=True))
    for layer in states:
        if is_reread:
            layer.known = tuple(map(sub, counts, dropped))
            layer.go_back(goes_back)
        else:
            pairs = zip(read, dropped, strict=True)
            layer.choose([n - gone - 1 if gone else None for n, gone in pairs])
    if not any(counts):
        return
    for layer in layers:
        if isinstance(layer, RaggedKVCache):
            layer.rewind(counts)
        elif isinstance(layer, BatchRotatingKVCache):
            layer.prepare(lengths=[-count for count in counts], right_padding=counts)
            layer.finalize()
