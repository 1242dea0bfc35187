"""KV of rows of different lengths: stored, masked and copied tokens."""

import copy
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from gateway.engine.kv.cache import SPARE, STEP, RaggedKVCache, compact
from gateway.engine.kv.layers import make_batch_caches
from gateway.engine.kv.prefix_cache import BLOCK
from gateway.engine.kv.quantized import PackedKVCache, Packing
from gateway.jobs.steps import KvCost
from gateway.serving.generation.memory import Layout, RowCosts
from tests.checkpoints import write_chat

import mlx.core as mx  # isort: skip  (after OpenBLAS, which the line above loads)

HEADS, SIZE = 2, 4


def tokens(values: list[list[float]]) -> mx.array:
    """Make keys that hold a number a token, (rows, heads, tokens, size)."""
    rows = mx.array(values)[:, None, :, None]
    return mx.broadcast_to(rows, (rows.shape[0], HEADS, rows.shape[2], SIZE))


def append(cache: RaggedKVCache, values: list[list[float]]) -> None:
    keys = tokens(values)
    cache.update_and_fetch(keys, -keys)


def rows_of(cache: RaggedKVCache) -> list[list[float]]:
    """Return the tokens each row holds; keys and values must agree in all heads and places."""
    if cache.empty():
        return [[] for _ in cache.lengths.counts]
    keys, values = (np.array(each) for each in cache.keys_and_values())
    assert (keys == -values).all()
    assert (keys == keys[:, :1, :, :1]).all()
    both = zip(keys[:, 0, :, 0].tolist(), cache.lengths.counts, strict=True)
    return [row[:count] for row, count in both]


@dataclass
class Modelled:
    """A cache beside plain lists that undergo the same."""

    cache: RaggedKVCache
    rows: list[list[float]] = field(default_factory=lambda: [[]])
    last: float = 0

    def new(self, count: int) -> list[float]:
        start = self.last + 1
        self.last += count
        return [start + i for i in range(count)]

    def read(self, counts: list[int]) -> None:
        """Read this number of tokens a row, padded on the right."""
        counts = (counts * len(self.rows))[: len(self.rows)]
        values = [self.new(count) for count in counts]
        most = max(counts)
        self.cache.prepare(lengths=counts, right_padding=[most - count for count in counts])
        append(self.cache, [each + [9e9] * (most - len(each)) for each in values])
        self.cache.finalize()
        for row, more in zip(self.rows, values, strict=True):
            row += more

    def join(self, count: int) -> None:
        other = RaggedKVCache()
        values = self.new(count)
        if values:
            append(other, [values])
        self.cache.extend(other)
        self.rows.append(values)

    def keep(self, wanted: set[int]) -> None:
        order = compact([i for i in range(len(self.rows)) if i in wanted] or [0])
        self.cache.filter(order)
        self.rows = [self.rows[i] for i in order]

    def rewind(self, counts: list[int]) -> None:
        gone = [
            min(count, len(row))
            for count, row in zip(counts * len(self.rows), self.rows, strict=False)
        ]
        self.cache.rewind(tuple(gone))
        self.rows = [row[: len(row) - less] for row, less in zip(self.rows, gone, strict=True)]


counts = st.lists(st.integers(1, 12), min_size=1, max_size=6)
operations = st.one_of(
    st.tuples(st.just("read"), counts),
    st.tuples(st.just("join"), st.integers(0, 2 * STEP)),
    st.tuples(st.just("keep"), st.sets(st.integers(0, 8))),
    st.tuples(st.just("rewind"), st.lists(st.integers(0, 5), min_size=1, max_size=6)),
)


@given(st.lists(operations, max_size=14))
@settings(max_examples=150)
def test_each_row_holds_what_it_read_whatever_the_others_do(done: list[tuple[str, Any]]) -> None:
    """No more is held than is counted once rows have left."""
    both = Modelled(RaggedKVCache())
    counted = RowCosts(KvCost(token=2 * HEADS * SIZE * 4))
    for name, argument in done:
        getattr(both, name)(argument)
        if name == "keep":
            assert both.cache.nbytes <= Layout(both.cache.lengths.counts).nbytes(counted)
        assert both.cache.lengths.counts == tuple(map(len, both.rows))
        assert rows_of(both.cache) == both.rows


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 12))
def test_a_token_attends_to_its_own_row_up_to_itself_and_within_the_window(
    lengths: list[int], count: int, window: int
) -> None:
    cache = RaggedKVCache(lengths)
    for size in (None, window):
        mask: Any = cache.make_mask(count, return_array=True, window_size=size)
        expected = [
            [
                [
                    at <= own and (size is None or at > own - size)
                    for at in range(max(lengths) + count)
                ]
                for own in range(length, length + count)
            ]
            for length in lengths
        ]
        assert mask[:, 0].tolist() == expected


def test_lengths_that_are_held_do_not_hold_those_that_came_after() -> None:
    held = RaggedKVCache([1, 2]).lengths
    assert held.plus(1).plus(1).counts == (3, 4)
    assert not list(held._next.values())


def test_a_slot_is_clean_for_the_next_row() -> None:
    """Attention gives masked places a weight of zero, and zero times NaN would be NaN."""
    cache = RaggedKVCache()
    append(cache, [[1.0] * 9])
    for _ in range(8):
        other = RaggedKVCache()
        append(other, [[float("nan")] * 9])
        cache.extend(other)
    cache.filter(range(8))  # one slot stays free, and keeps what was in it
    assert cache.keys is not None
    assert cache.keys.shape[0] == 9
    other = RaggedKVCache()
    append(other, [[2.0]])
    cache.extend(other)
    keys, values = (each[8:] for each in cache.keys_and_values())
    query = mx.ones((1, HEADS, 1, SIZE))
    mask = mx.arange(9) < 1
    found = mx.fast.scaled_dot_product_attention(query, keys, values, scale=1.0, mask=mask)
    assert found.flatten().tolist() == [-2.0] * HEADS * SIZE


def test_an_earlier_copy_is_not_written_to() -> None:
    cache = RaggedKVCache()
    append(cache, [[1.0, 2.0]])
    twin = copy.copy(cache)
    cache.rewind((1,))
    append(cache, [[7.0]])
    assert rows_of(twin) == [[1.0, 2.0]]
    assert rows_of(cache) == [[1.0, 7.0]]


def full_of(rows: int, length: int) -> RaggedKVCache:
    """Make a cache of rows of equal length, evaluated."""
    cache = RaggedKVCache([0] * rows)
    keys = mx.random.normal((rows, HEADS, length, SIZE))
    cache.update_and_fetch(keys, -keys)
    mx.eval(cache.state)
    return cache


def peak_of(change: Any, cache: RaggedKVCache) -> int:
    """Return the bytes that a change needs at its peak, besides those in use before."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    change()
    mx.eval(cache.state)
    return mx.get_peak_memory() - before


def test_a_row_that_leaves_or_joins_moves_one_row_at_most() -> None:
    cache, other = full_of(16, 4 * BLOCK), full_of(1, 4 * BLOCK)
    row = other.nbytes
    order = compact([i for i in range(16) if i != 3])
    assert order == [0, 1, 2, 15, *range(4, 15)]
    assert peak_of(lambda: cache.filter(order), cache) <= 1.5 * row
    assert cache.nbytes == 16 * row
    assert peak_of(lambda: cache.extend(other), cache) <= 1.5 * row


def test_a_long_rows_memory_is_free_once_it_leaves() -> None:
    cache = full_of(24, 8 * STEP)
    cache.rewind((0, *[8 * STEP - BLOCK] * 23))
    cache.filter(compact(range(1, 24)))
    row = full_of(1, BLOCK).nbytes
    for _ in range(9):
        assert cache.nbytes <= (24 + 24 // SPARE) * row
        cache.filter(compact(range(1, 23)))
        cache.extend(full_of(1, BLOCK))


def test_keys_may_be_made_to_depend_on_what_a_model_sends() -> None:
    """A model divided by layers does so on every rank but the first; a copy is not changed."""
    cache = RaggedKVCache()
    append(cache, [[1, 2, 3]])
    twin = copy.copy(cache)
    layer: Any = cache  # what mlx-lm calls is untyped
    layer.keys = mx.depends(layer.keys, mx.zeros(1))
    append(cache, [[4]])
    assert rows_of(cache) == [[1, 2, 3, 4]]
    assert rows_of(twin) == [[1, 2, 3]]


LENGTHS = [4 * STEP - 3, 5, 1, 70, 9, 33, 64, 128]


@pytest.mark.parametrize("kind", [RaggedKVCache(), PackedKVCache(Packing(8, 32))])
def test_a_step_writes_to_the_buffers_that_are_there(kind: RaggedKVCache) -> None:
    caches = [kind.with_rows((0,)) for _ in LENGTHS]
    for cache, length in zip(caches, LENGTHS, strict=True):
        cache.update_and_fetch(*[mx.random.normal((1, 3, length, 32))] * 2)
    batch = kind.merge(caches)
    new = mx.random.normal((len(LENGTHS), 3, 1, 32))
    mx.eval(batch.state, new)
    least = min(plane.nbytes for plane in batch.planes)
    assert peak_of(lambda: batch.update_and_fetch(new, new), batch) < least / 4


def count_nodes(model: Any, caches: list[list[Any]], lengths: list[int]) -> int:
    """Count the operations of a step of rows that have read these numbers of tokens."""
    batch: Any = PromptProcessingBatch(model, list(range(len(lengths))), caches)
    batch.prompt([[5] * length for length in lengths])
    step = mx.array([[7]] * len(lengths))
    mx.eval(model(step, cache=batch.prompt_cache), [layer.state for layer in batch.prompt_cache])
    graph = io.StringIO()
    mx.export_to_dot(graph, model(step, cache=batch.prompt_cache))
    return graph.getvalue().count("shape=rectangle")


def test_a_step_of_ragged_rows_has_no_more_operations_than_mlx_lms(tmp_path: Path) -> None:
    """Each is a kernel to launch, on a GPU."""
    model = load_model(write_chat(tmp_path, num_hidden_layers=4, hidden_size=128))[0]
    lengths = list(range(9, 17))
    ours = count_nodes(model, [make_batch_caches(model) for _ in lengths], lengths)
    theirs = count_nodes(model, [make_prompt_cache(model) for _ in lengths], lengths)
    assert 0 < ours <= theirs
