"""Requests and tokens per minute of each caller."""

import pytest

from gateway.serving.rate_limit import Accounts, Allowance, Bucket, refill, seconds_until


@pytest.mark.parametrize(
    ("left", "seconds", "after"),
    [(0, 1, 1), (0, 30, 30), (59.5, 1, 60), (60, 1000, 60), (-120, 60, -60), (-10, 10, 0)],
)
def test_a_bucket_fills_evenly_and_no_fuller_than_full(
    left: float, seconds: float, after: float
) -> None:
    assert refill(left, 60, seconds) == after


@pytest.mark.parametrize(
    ("wanted", "left", "limit", "seconds"),
    [(1, 1, 60, 0), (1, 5, 60, 0), (1, 0, 60, 1), (1, 0.5, 60, 0.5), (1, -599, 600, 60)],
)
def test_the_wait_is_the_time_until_the_bucket_has_enough(
    wanted: float, left: float, limit: int, seconds: float
) -> None:
    assert seconds_until(wanted, left, limit) == seconds
    assert refill(left, limit, seconds) >= min(wanted, limit)


def test_tokens_taken_beyond_the_rest_are_owed() -> None:
    """An answer's cost is known when it is there: the next one waits for it."""
    bucket = Bucket(600)
    assert bucket.wait_s() == 0
    bucket.take(900)
    assert bucket.left == pytest.approx(-300, abs=1)
    assert bucket.wait_s() == pytest.approx(30.1, abs=0.2)
    assert bucket.reset_s() == pytest.approx(90, abs=0.2)


def test_every_key_has_buckets_of_its_own() -> None:
    accounts = Accounts(Allowance(requests=5, tokens=None))
    accounts.of("key-1")["requests"].take(5)
    accounts.of(None)["requests"].take(1)
    assert accounts.of("key-1")["requests"].left < 1
    assert accounts.of("key-2")["requests"].left == 5
    assert accounts.of(None)["requests"].left < 5
    assert set(accounts.of(None)) == {"requests"}
