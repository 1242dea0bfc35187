"""Which inputs share a pass and how long others are waited for, with numbers."""

import sys
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.serving.embedding.policy import (
    EmbeddingCache,
    EmbeddingLimits,
    TextVector,
    Windows,
    patience,
    take_batch,
    window,
)

LIMITS = EmbeddingLimits(max_batch_size=32, max_batch_tokens=16384, batch_window_s=0.010)


class TestTakeBatch:
    """How many of each request's inputs share the next pass."""

    def test_rows_are_taken_while_the_padded_batch_fits(self) -> None:
        """Four rows of ten are forty tokens; a fifth would be fifty."""
        assert take_batch([[10] * 9], 32, 40) == [4]

    def test_requests_give_one_input_each_in_turn(self) -> None:
        """A thousand texts do not keep one text out."""
        assert take_batch([[5] * 1000, [5], [5, 5]], 8, 1000) == [5, 1, 2]

    def test_what_makes_every_row_too_long_waits_for_another_batch(self) -> None:
        """Padding counts: 3 x 20 is too much where 2 x 5 was little. Others still fit."""
        assert take_batch([[5], [5], [20], [5]], 32, 40) == [1, 1, 0, 1]

    def test_an_over_long_row_is_served_alone(self) -> None:
        """Rather than never."""
        assert take_batch([[500], [1]], 32, 40) == [1, 0]

    def test_rows_are_bounded_too(self) -> None:
        """However short they are."""
        assert take_batch([[1] * 50], 8, 1000) == [8]

    @given(
        st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=9), min_size=1, max_size=20),
        st.integers(1, 40),
        st.integers(1, 4000),
    )
    def test_a_batch_never_exceeds_its_bounds_nor_stalls(
        self, lengths: list[list[int]], rows: int, budget: int
    ) -> None:
        """The oldest is always served; within the budget unless it is one row."""
        taken = take_batch(lengths, rows, budget)
        chosen = [n for each, count in zip(lengths, taken, strict=True) for n in each[:count]]
        assert taken[0] >= 1
        assert len(chosen) <= rows
        assert len(chosen) == 1 or max(chosen) * len(chosen) <= budget

    @given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 64))
    def test_shares_are_even(self, counts: list[int], rows: int) -> None:
        """No request has two more than another that still had some to give."""
        taken = take_batch([[7] * count for count in counts], rows, 10**9)
        for mine, count in zip(taken, counts, strict=True):
            assert mine == count or mine >= max(taken) - 1


class TestPatience:
    """How long waiting inputs wait for others on an idle lane."""

    def test_nobody_on_the_way_is_no_wait(self) -> None:
        """The fast path."""
        assert patience(1, 0.0, 0.010, LIMITS, newest_age_s=None) == 0

    def test_a_burst_is_waited_for_until_the_oldest_has_waited_the_window(self) -> None:
        """Ten milliseconds from its arrival, not from the last."""
        assert patience(1, 0.004, 0.010, LIMITS, newest_age_s=0.0) == 0.006
        assert patience(1, 0.011, 0.010, LIMITS, newest_age_s=0.0) == 0

    def test_who_is_long_on_the_way_is_waited_for_no_longer_than_a_window(self) -> None:
        """From when they came: after it, a slow client holds nobody up."""
        assert patience(1, 0.001, 0.010, LIMITS, newest_age_s=0.008) == 0.010 - 0.008
        assert patience(1, 0.001, 0.010, LIMITS, newest_age_s=0.011) == 0

    def test_a_full_batch_waits_for_nobody(self) -> None:
        """However many come."""
        assert patience(32, 0.0, 0.010, LIMITS, newest_age_s=0.0) == 0

    def test_below_the_minimum_the_window_is_waited_out(self) -> None:
        """Nobody in sight or not; at the minimum it goes."""
        limits = replace(LIMITS, min_batch_size=4)
        assert patience(3, 0.004, 0.010, limits, newest_age_s=None) == 0.006
        assert patience(4, 0.004, 0.010, limits, newest_age_s=None) == 0

    def test_the_deadline_bounds_any_window(self) -> None:
        """A window scaled up does not outgrow it."""
        limits = replace(LIMITS, batch_deadline_s=0.005)
        assert patience(1, 0.001, 0.500, limits, newest_age_s=0.0) == 0.004

    def test_batching_turned_off_waits_for_nobody(self) -> None:
        """Size one, whatever the minimum says."""
        limits = replace(LIMITS, max_batch_size=1, min_batch_size=9)
        assert patience(0, 0.0, 0.010, limits, newest_age_s=0.0) == 0


def test_the_window_follows_the_load_where_it_is_adaptive() -> None:
    """Low below a quarter of a batch, high from a whole one on."""
    limits = replace(LIMITS, windows=Windows(low_s=0.001, medium_s=0.010, high_s=0.030))
    loads = (0, 7, 8, 31, 32, 500)
    assert [window(load, limits) for load in loads] == [0.001, 0.001, 0.010, 0.010, 0.030, 0.030]
    assert window(500, LIMITS) == 0.010


def test_the_cache_keeps_no_text() -> None:
    """Which may be of a million characters: its digest is enough."""
    cache = EmbeddingCache("m", 2)
    text = "a" * 1000
    holders = sys.getrefcount(text)
    vector = TextVector(np.ones(2, np.float32), tokens=1, is_truncated=False)
    cache.put(text, "", vector)
    assert sys.getrefcount(text) == holders
    assert cache.get("a" * 1000, "", truncate=False) is not None
    assert cache.get("a" * 999 + "b", "", truncate=False) is None
