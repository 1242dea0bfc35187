"""The KV of a batch of sequences of different lengths.

Each row's tokens begin at place 0 of its slot, and the places after its last token are masked. In
mlx-lm's batched cache, rows are aligned at their ends, so a row that joins or leaves moves all
others.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import _BaseCache

from gateway.engine.models.rotations import share_positions

STEP: Final = 256  # buffers grow by this many tokens, as in mlx-lm
SPARE: Final = 8  # rows per free slot; memory estimates include free slots
_FEW: Final = 8  # the most tokens per row that one kernel writes for all rows

Mover: TypeAlias = tuple[int, list[mx.array]]  # a row's new index, and its part of each plane

_Base: Any = _BaseCache  # untyped in mlx-lm


class RowLengths:
    """The number of tokens in each row. All layers share one object and its masks."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts
        self.longest = max(self.counts, default=0)
        self.are_equal = len(set(self.counts)) <= 1
        self._arrays: dict[Hashable, mx.array] = {}
        self._indices: dict[tuple[int, int], tuple[mx.array, mx.array, mx.array]] = {}
        # Lengths made from these, by operation. Weak references let unused lengths be freed.
        self._next: WeakValueDictionary[Hashable, RowLengths] = WeakValueDictionary()

    @property
    def offset(self) -> int | mx.array:
        """Return the position of each row's next token, (rows,), or a number if all are equal."""
        if self.are_equal:
            return self.longest
        return share_positions(self._array("offset", lambda: mx.array(self.counts)))

    def plus(self, tokens: int) -> "RowLengths":
        return self._follow(("plus", tokens), (count + tokens for count in self.counts))

    def minus(self, tokens: tuple[int, ...]) -> "RowLengths":
        counts = (count - gone for count, gone in zip(self.counts, tokens, strict=True))
        return self._follow(("minus", tokens), counts)

    def at(self, rows: tuple[int, ...]) -> "RowLengths":
        return self._follow(("at", rows), (self.counts[row] for row in rows))

    def join(self, counts: tuple[int, ...]) -> "RowLengths":
        return self._follow(("join", counts), (*self.counts, *counts))

    def indices(self, heads: int, tokens: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return the row, head and place of each new vector, (rows, heads, tokens) each."""
        # A single flat index would exceed 32 bits for the largest buffers.
        if (heads, tokens) not in self._indices:
            row, head, _ = np.indices((len(self.counts), heads, tokens), np.int32)
            place = np.broadcast_to(self._places(tokens)[:, None], row.shape)
            self._indices[heads, tokens] = mx.array(row), mx.array(head), mx.array(place)
        return self._indices[heads, tokens]

    def _places(self, tokens: int) -> npt.NDArray[np.int32]:
        counts = np.array(self.counts, np.int32)
        return np.add.outer(counts, np.arange(tokens, dtype=np.int32))

    def mask(self, tokens: int, window: int | None, *, is_array: bool) -> mx.array | str | None:
        """Return the attention mask of the next tokens, (rows, 1, tokens, longest + tokens) bool.

        Return "causal", or None for one token, where that means the same to mlx-lm's models.
        """
        if self.are_equal and window is None and not is_array:
            return "causal" if tokens > 1 else None
        return self._array(("mask", tokens, window), lambda: self._make_mask(tokens, window))

    def _make_mask(self, tokens: int, window: int | None) -> mx.array:
        places = mx.array(self._places(tokens)[:, None, :, None])
        key_places = mx.arange(self.longest + tokens)
        mask = key_places <= places
        if window is not None:
            mask &= key_places > places - window
        return mask

    def _array(self, key: Hashable, make: Callable[[], mx.array]) -> mx.array:
        if key not in self._arrays:
            self._arrays[key] = make()
        return self._arrays[key]

    def _follow(self, key: Hashable, counts: Iterable[int]) -> "RowLengths":
        lengths = self._next.get(key)
        if lengths is None:
            lengths = self._next[key] = share_lengths(tuple(counts))
        return lengths


_shared: WeakValueDictionary[tuple[int, ...], RowLengths] = WeakValueDictionary()


def share_lengths(counts: tuple[int, ...]) -> RowLengths:
    lengths = _shared.get(counts)
    if lengths is None:
        lengths = _shared[counts] = RowLengths(counts)
    return lengths


class RaggedKVCache(_Base):  # type: ignore[misc]
    """The keys and values of one layer, with the interface of mlx-lm's batched caches.

    `planes` are the keys and the values, (slots, heads, places, size) each. Row i is in slot i.
    """

    def __init__(self, counts: Sequence[int] = (0,)) -> None:
        self.planes: list[mx.array] = []
        self.lengths = share_lengths(tuple(counts))
        self._padding: tuple[int, ...] = ()

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> "RaggedKVCache":
        return cls().holding([keys, values])

    def holding(self, planes: Sequence[mx.array]) -> "RaggedKVCache":
        """Return a cache of this class that contains these planes, (rows, heads, tokens, n)."""
        rows, _, tokens, _ = planes[0].shape
        cache = self.with_rows([tokens] * rows)
        cache.planes = list(planes)
        return cache

    def with_rows(self, counts: Sequence[int]) -> "RaggedKVCache":
        return RaggedKVCache(counts)

    def pack(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [keys, values]

    def unpack(self, planes: Sequence[mx.array]) -> tuple[Any, Any]:
        keys, values = planes
        return keys, values

    @property
    def keys(self) -> mx.array | None:
        """Return the first plane. mlx-lm's pipeline models set it (qwen2.py, pipeline_rank)."""
        return self.planes[0] if self.planes else None

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.planes = [keys, *self.planes[1:]]

    @property
    def offset(self) -> int | mx.array:
        return self.lengths.offset

    @property
    def state(self) -> Sequence[mx.array]:
        return self.planes

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def size(self) -> int:
        return self.lengths.longest

    def empty(self) -> bool:
        return not self.planes

    def is_trimmable(self) -> bool:
        return True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append tokens to each row; return the keys and values up to the longest row's end."""
        lengths, after = self.lengths, self.lengths.plus(keys.shape[2])
        new = self.pack(keys, values)
        self.planes = [
            _write(buffer, tokens, lengths)
            for buffer, tokens in zip(
                self._reserve(new, len(after.counts), after.longest), new, strict=True
            )
        ]
        self.lengths = after
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        return self.unpack(self._used())

    def floating(self) -> tuple[mx.array, mx.array]:
        """Return the keys and values, dequantized if they are quantized."""
        return self.keys_and_values()

    def make_mask(
        self,
        N: int,  # noqa: N803
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        return self.lengths.mask(N, window_size, is_array=return_array)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        assert not left_padding
        self._padding = tuple(right_padding or ())

    def finalize(self) -> None:
        if self._padding:
            self.rewind(self._padding)
            self._padding = ()

    def rewind(self, counts: tuple[int, ...]) -> None:
        """Remove the last `counts[i]` tokens of each row i."""
        self.lengths = self.lengths.minus(counts)

    def trim(self, n: int) -> int:
        n = min(n, *self.lengths.counts)
        self.rewind((n,) * len(self.lengths.counts))
        return n

    def filter(self, batch_indices: Sequence[int]) -> None:
        filter_layers([self], batch_indices)

    def take_movers(self, rows: Sequence[int]) -> list[Mover] | None:
        """Copy the rows whose index changes when only `rows` are kept.

        Return None if all rows have to be copied.
        """
        if self.empty():
            return []
        moves = [(place, row) for place, row in enumerate(rows) if row != place]
        slots, _, places, _ = self.planes[0].shape
        longest = max((self.lengths.counts[row] for row in rows), default=0)
        is_roomy = slots > len(rows) + len(rows) // SPARE or places > _round_up(longest)
        if is_roomy or any(row < len(rows) for _, row in moves):
            return None
        return [
            (place, [copy_rows(plane[row : row + 1]) for plane in self.planes])
            for place, row in moves
        ]

    def keep(self, rows: Sequence[int], movers: list[Mover] | None) -> None:
        """Keep only these rows. `movers` is the result of `take_movers` for the same rows."""
        self.lengths = self.lengths.at(tuple(rows))
        if movers is None:
            at = mx.array(list(rows)), slice(None), slice(_round_up(self.lengths.longest))
            self.planes = [plane[at] for plane in self.planes]
        for place, moved in movers or ():
            self._place(moved, place)

    def extend(self, other: "RaggedKVCache") -> None:
        first, joining_rows = len(self.lengths.counts), len(other.lengths.counts)
        self.lengths = self.lengths.join(other.lengths.counts)
        if not other.empty():
            joining = other._used()
        elif not self.empty():
            joining = [mx.repeat(plane[:1, :, :0], joining_rows, axis=0) for plane in self.planes]
        else:
            return
        self.planes = self._reserve(joining, first + joining_rows, self.lengths.longest)
        self._place(joining, first)

    def extract(self, idx: int) -> "RaggedKVCache":
        return self.holding(self.copy_tokens(idx, 0, self.lengths.counts[idx]))

    def copy_tokens(self, row: int, start: int, stop: int) -> list[mx.array]:
        at = slice(row, row + 1), slice(None), slice(start, stop)
        return [copy_rows(plane[at]) for plane in self.planes]

    @classmethod
    def merge(cls, caches: Sequence["RaggedKVCache"]) -> "RaggedKVCache":
        if len(caches) == 1:
            return copy.copy(caches[0])
        merged = caches[0].with_rows(())
        filled = [cache for cache in caches if not cache.empty()]
        if filled:
            rows = sum(len(cache.lengths.counts) for cache in caches)
            places = max(cache.lengths.longest for cache in caches)
            merged.planes = merged._reserve(filled[0].planes, rows, places)
        for cache in caches:
            merged.extend(cache)
        return merged

    def __copy__(self) -> "RaggedKVCache":
        # `reshape` makes new array objects, because MLX writes to an array object in place.
        twin = self.with_rows(self.lengths.counts)
        twin.lengths = self.lengths
        twin.planes = [plane.reshape(plane.shape) for plane in self.planes]
        return twin

    def _used(self) -> list[mx.array]:
        assert self.planes
        at = slice(len(self.lengths.counts)), slice(None), slice(self.lengths.longest)
        return [plane[at] for plane in self.planes]

    def _reserve(self, like: Sequence[mx.array], rows: int, places: int) -> list[mx.array]:
        buffers: Sequence[mx.array | None] = self.planes or [None] * len(like)
        return [
            _reserve(buffer, plane, rows, places)
            for buffer, plane in zip(buffers, like, strict=True)
        ]

    def _place(self, planes: Sequence[mx.array], first: int) -> None:
        pairs = zip(self.planes, planes, strict=True)
        self.planes = [_place(buffer, rows, first) for buffer, rows in pairs]


def filter_layers(layers: Sequence[Any], rows: Sequence[int]) -> None:
    """Keep only these rows of a model's caches, in this order. Prefer that of `compact`."""
    ragged = [layer for layer in layers if isinstance(layer, RaggedKVCache)]
    movers = [layer.take_movers(rows) for layer in ragged]
    if any(movers):
        # The movers are evaluated first: MLX copies a whole buffer before a write if a pending
        # operation reads the buffer.
        mx.eval([planes for moves in movers for _, planes in moves or ()])
    for layer, moves in zip(ragged, movers, strict=True):
        layer.keep(rows, moves)
    for layer in layers:
        if not isinstance(layer, RaggedKVCache):
            layer.filter(rows)


def compact(rows: Sequence[int]) -> list[int]:
    """Reorder ascending rows so that `filter_layers` copies few: the last rows fill the gaps."""
    staying = set(rows)
    movers = iter([row for row in rows if row >= len(rows)])
    return [place if place in staying else next(movers) for place in range(len(rows))]


def copy_rows(array: mx.array) -> mx.array:
    """Copy an array, because a view would keep the whole batch's buffer alive."""
    # `mx.contiguous` returns the view itself if the buffer is at most 16 KB larger.
    return mx.concatenate([array[:0], array])


def _reserve(buffer: mx.array | None, like: mx.array, rows: int, places: int) -> mx.array:
    """Return the buffer, grown to `rows` rows of `places` tokens; without a buffer, make one."""
    _, heads, _, size = like.shape
    if buffer is None:
        return mx.zeros((rows, heads, _round_up(places), size), like.dtype)
    slots, _, there, _ = buffer.shape
    if rows <= slots and places <= there:
        return buffer
    more_slots = more_places = 0
    if rows > slots:
        more_slots = rows + rows // SPARE - slots
    if places > there:
        more_places = _round_up(places) - there
    return mx.pad(buffer, [(0, more_slots), (0, 0), (0, more_places), (0, 0)])


def _write(buffer: mx.array, tokens: mx.array, lengths: RowLengths) -> mx.array:
    """Write tokens, (rows, heads, tokens, size), at the rows' ends."""
    rows, heads, count, _ = tokens.shape
    if lengths.are_equal:
        at = lengths.longest
        buffer[:rows, :, at : at + count] = tokens
    elif count <= _FEW:
        buffer[lengths.indices(heads, count)] = tokens
    else:
        for row, at in enumerate(lengths.counts):
            buffer[row : row + 1, :, at : at + count] = tokens[row : row + 1]
    return buffer


def _place(buffer: mx.array, rows: mx.array, first: int) -> mx.array:
    """Write whole rows to the slots from `first` on, and zeros after them."""
    # Attention multiplies masked places by zero, so an old infinity would become NaN.
    rest = buffer.shape[2] - rows.shape[2]
    if rest > 0:
        rows = mx.pad(rows, [(0, 0), (0, 0), (0, rest), (0, 0)])
    buffer[first : first + rows.shape[0]] = rows
    return buffer


def _round_up(places: int) -> int:
    return -(-places // STEP) * STEP


def cache_nbytes(cache: list[Any]) -> int:
    return sum(int(layer.nbytes) for layer in cache)
