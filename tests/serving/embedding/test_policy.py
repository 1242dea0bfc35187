"""The inputs that share a pass and the time that others are waited for, with numbers."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jobs.embed import TextOutputs
from gateway.serving.embedding.batcher import EmbeddedText, EmbeddingCache
from gateway.serving.embedding.policy import (
    EmbeddingLimits,
    Windows,
    patience,
    take_batch,
    window,
)

LIMITS = EmbeddingLimits(max_batch_size=32, max_batch_tokens=16384, batch_window_s=0.010)


@pytest.mark.parametrize(
    ("lengths", "rows", "tokens", "taken"),
    [
        ([[10] * 9], 32, 40, [4]),  # a fifth row would make fifty tokens
        ([[5] * 1000, [5], [5, 5]], 8, 1000, [5, 1, 2]),  # they give one input each in turn
        ([[5], [5], [20], [5]], 32, 40, [1, 1, 0, 1]),  # one would make every row too long
        ([[500], [1]], 32, 40, [1, 0]),  # what is too long is served alone
        ([[1] * 50], 8, 1000, [8]),  # rows are bounded too
    ],
)
def test_the_next_pass_takes_inputs_of_each_request(
    lengths: list[list[int]], rows: int, tokens: int, taken: list[int]
) -> None:
    assert take_batch(lengths, rows, tokens) == taken


@given(
    st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=9), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(1, 4000),
)
def test_a_batch_never_exceeds_its_bounds_nor_stalls(
    lengths: list[list[int]], rows: int, budget: int
) -> None:
    """The oldest is always served; within the budget unless it is one row."""
    taken = take_batch(lengths, rows, budget)
    chosen = [n for each, count in zip(lengths, taken, strict=True) for n in each[:count]]
    assert taken[0] >= 1
    assert len(chosen) <= rows
    assert len(chosen) == 1 or max(chosen) * len(chosen) <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 64))
def test_shares_are_even(counts: list[int], rows: int) -> None:
    taken = take_batch([[7] * count for count in counts], rows, 10**9)
    for mine, count in zip(taken, counts, strict=True):
        assert mine == count or mine >= max(taken) - 1


FEW = replace(LIMITS, min_batch_size=4)
SOON = replace(LIMITS, batch_deadline_s=0.005)
ALONE = replace(LIMITS, max_batch_size=1, min_batch_size=9)


@pytest.mark.parametrize(
    ("waiting", "waited_s", "window_s", "limits", "newest_age_s", "seconds"),
    [
        (1, 0.0, 0.010, LIMITS, None, 0),  # nobody is on the way
        (1, 0.004, 0.010, LIMITS, 0.0, 0.006),  # a burst: from the arrival of the oldest
        (1, 0.011, 0.010, LIMITS, 0.0, 0),
        (1, 0.001, 0.010, LIMITS, 0.008, 0.010 - 0.008),  # a slow client: from when it came
        (1, 0.001, 0.010, LIMITS, 0.011, 0),
        (32, 0.0, 0.010, LIMITS, 0.0, 0),  # a full batch
        (3, 0.004, 0.010, FEW, None, 0.006),  # below the minimum, nobody in sight
        (4, 0.004, 0.010, FEW, None, 0),
        (1, 0.001, 0.500, SOON, 0.0, 0.004),  # the deadline bounds any window
        (0, 0.0, 0.010, ALONE, 0.0, 0),  # batching is turned off
    ],
)
def test_waiting_inputs_wait_so_long_for_others(
    waiting: int,
    waited_s: float,
    window_s: float,
    limits: EmbeddingLimits,
    newest_age_s: float | None,
    seconds: float,
) -> None:
    assert patience(waiting, waited_s, window_s, limits, newest_age_s=newest_age_s) == seconds


def test_the_window_follows_the_load_where_it_is_adaptive() -> None:
    limits = replace(LIMITS, windows=Windows(low_s=0.001, medium_s=0.010, high_s=0.030))
    loads = (0, 7, 8, 31, 32, 500)
    assert [window(load, limits) for load in loads] == [0.001, 0.001, 0.010, 0.010, 0.030, 0.030]
    assert window(500, LIMITS) == 0.010


def test_the_cache_keeps_no_text() -> None:
    """A text may have a million characters: its digest is enough."""
    cache = EmbeddingCache("m", 2)
    text = "a" * 1000
    holders = sys.getrefcount(text)
    dense = TextOutputs(dense=np.ones(2, np.float32))
    vector = EmbeddedText(dense, tokens=1, is_truncated=False)
    cache.put(text, "", vector)
    assert sys.getrefcount(text) == holders
    assert cache.get("a" * 1000, "", truncate=False) is not None
    assert cache.get("a" * 999 + "b", "", truncate=False) is None
