"""Metrics that nobody outside can grow."""

import itertools

from prometheus_client import REGISTRY

from gateway import metrics
from gateway.metrics import time_decoding


def test_a_process_that_was_taken_over_makes_no_series() -> None:
    """It may name any outcome of its own."""
    for outcome in ("decoded", "x" * 9, "y" * 9):
        assert time_decoding(lambda *_, named=outcome: (named, 5))({}, b"") == (outcome, 5)
    name = "gateway_image_decode_seconds_count"
    counts = [REGISTRY.get_sample_value(name, {"outcome": each}) for each in ("x" * 9, "y" * 9)]
    assert counts == [None, None]
    assert REGISTRY.get_sample_value(name, {"outcome": "invalid"}) == 2


def test_a_quantile_of_long_answers_is_right_to_half_of_itself() -> None:
    """It is interpolated within a bucket: between 30 and 60 s one of 31.3 s was "p50 45 s"."""
    metrics.of(metrics.TOWER_SECONDS, "tower").observe(31.3)
    edges = metrics.snapshot().histograms["gateway_tower_seconds"].edges
    metrics.forget("tower")
    long = [edge for edge in edges if 10 <= edge <= 60]
    assert (long[0], long[-1]) == (10, 60)
    assert all(later <= 1.5 * earlier for earlier, later in itertools.pairwise(long))
