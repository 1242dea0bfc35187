"""Metrics that nobody outside can grow."""

from prometheus_client import REGISTRY

from gateway.metrics import time_decoding


def test_a_process_that_was_taken_over_makes_no_series() -> None:
    """It may name any outcome of its own."""
    for outcome in ("decoded", "x" * 9, "y" * 9):
        assert time_decoding(lambda *_, named=outcome: (named, 5))({}, b"") == (outcome, 5)
    name = "gateway_image_decode_seconds_count"
    counts = [REGISTRY.get_sample_value(name, {"outcome": each}) for each in ("x" * 9, "y" * 9)]
    assert counts == [None, None]
    assert REGISTRY.get_sample_value(name, {"outcome": "invalid"}) == 2
