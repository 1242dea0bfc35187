"""Who joins next, with numbers."""

from gateway.jobs import Tier
from gateway.serving.generation.batches import rank, take_rows


def test_free_rows_pass_bound_ones_which_keep_their_order() -> None:
    """First come, first served, each in its own line."""
    waiting = [True, True, False, True, False]
    assert take_rows(waiting, room=9, bound_room=1) == [0, 2, 4]
    assert take_rows(waiting, room=9, bound_room=0) == [2, 4]
    assert take_rows(waiting, room=2, bound_room=2) == [0, 1]
    assert take_rows(waiting, room=0, bound_room=2) == []


def test_a_tier_is_worth_a_head_start_and_no_more() -> None:
    """So that nobody starves: who waits longer than that is not overtaken."""
    assert rank(10.0, Tier.PRIORITY, 5) < rank(6.0, Tier.DEFAULT, 5) < rank(2.0, Tier.FLEX, 5)
    assert rank(12.0, Tier.PRIORITY, 5) > rank(6.0, Tier.DEFAULT, 5)
    assert rank(0.0, Tier.FLEX, 5) < rank(6.0, Tier.DEFAULT, 5)
