"""The memory budget: shares of a sum of bytes."""

import pytest

from gateway.serving.budget import Budget, PrefixShare


def test_a_share_is_held_until_it_is_released() -> None:
    budget = Budget(100)
    weights, rows = budget.share(), budget.share()
    weights.resize(60)
    rows.resize(30)
    assert (rows.nbytes, budget.free_bytes) == (30, 10)
    rows.resize(5)
    assert budget.free_bytes == 35
    weights.resize(120)
    assert budget.free_bytes == -25
    weights.release()
    assert budget.free_bytes == 95


@pytest.mark.parametrize("sizes", [[50, 20], [50, 0]])
def test_whoever_listens_hears_of_bytes_that_come_back(sizes: list[int]) -> None:
    budget = Budget(100)
    heard: list[int] = []
    budget.listen(lambda: heard.append(budget.free_bytes))
    share = budget.share()
    for nbytes in sizes:
        share.resize(nbytes)
    assert heard == [100 - sizes[-1]]


def test_a_row_that_lacks_memory_calls_on_other_rooms_than_its_own() -> None:
    """Its own it empties by itself, in its own turn; listeners hear of a call once."""
    budget = Budget(1000)
    own, other = PrefixShare(budget, 1000), PrefixShare(budget, 1000)
    heard: list[int] = []
    budget.listen(lambda: heard.append(other.recalled))
    with own.in_use(), other.in_use():
        own.note(50)
        assert not budget.recall(10, besides=own), "others keep nothing"
        other.note(30)
        assert budget.recall(20, besides=own)
        assert budget.recall(20, besides=own)
        assert (own.recalled, other.recalled) == (0, 20)
        assert (own.excess_bytes, other.excess_bytes) == (0, 20)
        assert heard == [20]


def test_a_share_is_never_negative() -> None:
    """It would give memory that nobody has to all others."""
    share = Budget(100).share()
    with pytest.raises(ValueError, match="-5 bytes"):
        share.resize(-5)
    assert share.nbytes == 0


def test_whoever_listens_may_not_resize_the_share_that_called() -> None:
    """It would be called again, and again; other shares it may resize."""
    budget = Budget(100)
    share, other = budget.share(), budget.share()
    share.resize(50)
    budget.listen(lambda: other.resize(7))
    share.resize(40)
    assert budget.free_bytes == 53
    budget.listen(lambda: share.resize(0))
    with pytest.raises(RuntimeError, match="during its own resize"):
        share.resize(30)
    assert budget.free_bytes == 63  # what was asked for is held
