"""Generators share the seconds of a run, and each fails by its findings."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.generators import LEAST, Share, Spent, divide, within_share

ALL = 200


@pytest.fixture
def seconds() -> Iterator[float]:
    """Give a clock by which each look takes a second."""
    return map(float, itertools.count())


def test_shares_follow_weights_and_never_exceed_the_total() -> None:
    assert divide(60, [1, 1, 4]) == [10, 10, 40]
    assert divide(60, [0]) == [0]
    assert divide(60, []) == []


def test_a_share_that_is_spent_ends_the_test(seconds: Iterator[float]) -> None:
    """The end is no failure, and comes after some examples in any case."""
    share, seen = Share(30, seconds.__next__), list[int]()

    @settings(max_examples=ALL, database=None)
    @given(st.integers())
    def generate(number: int) -> None:
        share.run(lambda: seen.append(number))

    with pytest.raises(Spent):
        generate()
    assert LEAST < len(seen) == share.examples == 30
    hurried = Share(0, seconds.__next__)
    for _ in range(LEAST):
        hurried.run(int)
    with pytest.raises(Spent):
        hurried.run(int)


def test_a_case_that_is_taken_back_is_no_failure(seconds: Iterator[float]) -> None:
    share = Share(30, seconds.__next__)

    @settings(max_examples=ALL, database=None, derandomize=True)
    @given(st.integers(0, 1 << 60))
    def generate(number: int) -> None:
        share.run(lambda: assume(number % 2))

    with pytest.raises(Spent):
        generate()


@pytest.mark.generator(weight=0)
@pytest.mark.parametrize("name", ["one", "other"])
@settings(max_examples=100_000, database=None)
@given(number=st.integers())
def test_each_parameter_has_as_many_examples_in_any_case(name: str, number: int) -> None:
    _ran_of[name] += 1
    assert _ran_of[name] <= LEAST


def test_what_fails_is_made_smaller_however_long_that_takes(seconds: Iterator[float]) -> None:
    share = Share(30, seconds.__next__)

    def check(number: int) -> None:
        assert number < 1000

    @settings(max_examples=ALL, database=None, derandomize=True)
    @given(st.integers(0, 1_000_000))
    def generate(number: int) -> None:
        share.run(lambda: check(number))

    with pytest.raises(AssertionError, match="assert 1000 < 1000"):
        generate()


_ran: list[int] = []
_ran_of = Counter[str]()


@pytest.mark.generator(weight=0)
@settings(max_examples=100_000, database=None)
@given(st.integers())
def test_a_generator_that_is_marked_has_a_share(number: int) -> None:
    """No more examples run than each has in any case, for a weight of none."""
    _ran.append(number)
    assert len(_ran) <= LEAST


def test_without_a_mark_all_examples_run() -> None:
    ran = []

    @settings(max_examples=ALL, database=None, derandomize=True)
    @given(st.integers(0, 1 << 60))
    @within_share
    def generate(number: int) -> None:
        ran.append(number)

    generate()
    assert len(ran) == ALL


@pytest.mark.generator(weight=0)
@settings(max_examples=100_000, database=None)
@given(st.data())
def test_a_generator_may_draw_as_it_goes(data: st.DataObject) -> None:
    """The example that ends it has drawn nothing, which hypothesis takes for an inconsistency."""
    assert data.draw(st.integers()) is not None
