"""Tokens written to rows of other lengths: what is there, and what it costs a device."""

import io
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from gateway.engine.kv.cache import STEP, RaggedKVCache
from gateway.engine.kv.layers import make_batch_caches
from gateway.engine.kv.quantized import PackedKVCache, Packing
from tests.checkpoints import write_chat

import mlx.core as mx  # isort: skip  (after OpenBLAS, which the lines above load)

HEADS, SIZE = 3, 32
LENGTHS = [4 * STEP - 3, 5, 1, 70, 9, 33, 64, 128]
KINDS = [RaggedKVCache(), PackedKVCache(Packing(8, SIZE))]


def normal(rows: int, tokens: int) -> list[mx.array]:
    """Make keys and values that differ in all their numbers."""
    return [mx.random.normal((rows, HEADS, tokens, SIZE)) for _ in range(2)]


def filled(kind: RaggedKVCache, length: int) -> RaggedKVCache:
    """Make a cache of one row."""
    cache = kind.with_rows((0,))
    cache.update_and_fetch(*normal(1, length))
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9])
def test_each_row_of_a_batch_has_what_it_has_alone(kind: RaggedKVCache, tokens: int) -> None:
    """In planes of every shape, with more slots than rows, past the end of what was reserved."""
    alone = [filled(kind, length) for length in LENGTHS]
    batch = kind.merge([*alone, filled(kind, 2)])
    batch.filter(range(len(LENGTHS)))
    assert batch.planes[0].shape[0] > len(LENGTHS)
    new = normal(len(LENGTHS), tokens)
    batch.update_and_fetch(*new)
    for row, cache in enumerate(alone):
        cache.update_and_fetch(*(plane[row : row + 1] for plane in new))
        for got, expected in zip(batch.extract(row).planes, cache.extract(0).planes, strict=True):
            assert mx.array_equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_writes_to_the_buffers_that_are_there(kind: RaggedKVCache) -> None:
    batch = kind.merge([filled(kind, length) for length in LENGTHS])
    new = normal(len(LENGTHS), 1)
    mx.eval(batch.state, new)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    batch.update_and_fetch(*new)
    mx.eval(batch.state)
    assert mx.get_peak_memory() - before < min(plane.nbytes for plane in batch.planes) / 4


def count_nodes(model: Any, caches: list[list[Any]], lengths: list[int]) -> int:
    """Count the operations of a step of rows that have read so many tokens."""
    batch: Any = PromptProcessingBatch(model, list(range(len(lengths))), caches)
    batch.prompt([[5] * length for length in lengths])
    step = mx.array([[7]] * len(lengths))
    mx.eval(model(step, cache=batch.prompt_cache), [layer.state for layer in batch.prompt_cache])
    graph = io.StringIO()
    mx.export_to_dot(graph, model(step, cache=batch.prompt_cache))
    return graph.getvalue().count("shape=rectangle")


def test_a_step_of_rows_of_other_lengths_has_no_more_operations_than_mlx_lms(
    tmp_path: Path,
) -> None:
    """Each is a kernel to launch, on a GPU."""
    model = load_model(write_chat(tmp_path, num_hidden_layers=4, hidden_size=128))[0]
    lengths = list(range(9, 17))
    ours = count_nodes(model, [make_batch_caches(model) for _ in lengths], lengths)
    theirs = count_nodes(model, [make_prompt_cache(model) for _ in lengths], lengths)
    assert 0 < ours <= theirs
