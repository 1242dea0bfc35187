"""The memory budget: shares of a sum of bytes."""

import pytest

from gateway.serving.budget import Budget


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
