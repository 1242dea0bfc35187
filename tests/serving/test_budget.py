"""The memory budget: shares of a sum of bytes, and who gives way."""

import pytest

from gateway.serving.budget import Budget, Held, pick_leaving


def test_the_idle_model_used_longest_ago_gives_way() -> None:
    """One in use goes only after every idle one, however old it is."""
    held = {"a": Held(10, 3.0), "b": Held(10, 1.0), "c": Held(10, 0.0, is_idle=False)}
    assert pick_leaving(held, places=1, nbytes=0) == ["b"]
    assert pick_leaving(held, places=2, nbytes=0) == ["b", "a"]
    assert pick_leaving(held, places=3, nbytes=0) == ["b", "a", "c"]


def test_as_many_give_way_as_bytes_are_needed() -> None:
    """And no more; nobody does when nothing is lacking."""
    held = {"a": Held(10, 1.0), "b": Held(30, 2.0), "c": Held(50, 3.0)}
    assert pick_leaving(held, places=0, nbytes=0) == []
    assert pick_leaving(held, places=-1, nbytes=5) == ["a"]
    assert pick_leaving(held, places=-1, nbytes=11) == ["a", "b"]
    assert pick_leaving(held, places=2, nbytes=1) == ["a", "b"]
    assert pick_leaving(held, places=0, nbytes=1000) == ["a", "b", "c"]


def test_one_told_to_leave_before_is_chosen_again() -> None:
    """Two in use are not both kept from new leases, where one is enough."""
    held = {
        "a": Held(10, 1.0, is_idle=False),
        "b": Held(10, 2.0, is_idle=False, is_doomed=True),
    }
    assert pick_leaving(held, places=1, nbytes=0) == ["b"]


def test_a_share_is_held_until_it_is_released() -> None:
    """It grows and shrinks meanwhile, and what is in memory counts though it was not free."""
    budget = Budget(100)
    weights, rows = budget.share(), budget.share()
    weights.state(60)
    rows.state(30)
    assert (rows.nbytes, budget.free_bytes) == (30, 10)
    rows.state(5)
    assert budget.free_bytes == 35
    weights.state(120)
    assert budget.free_bytes == -25
    weights.release()
    assert budget.free_bytes == 95


@pytest.mark.parametrize("sizes", [[50, 20], [50, 0]])
def test_whoever_listens_hears_of_bytes_that_come_back(sizes: list[int]) -> None:
    """And not of those that go."""
    budget = Budget(100)
    heard: list[int] = []
    budget.listen(lambda: heard.append(budget.free_bytes))
    share = budget.share()
    for nbytes in sizes:
        share.state(nbytes)
    assert heard == [100 - sizes[-1]]
