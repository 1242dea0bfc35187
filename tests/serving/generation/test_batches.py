"""Who joins next, with numbers."""

from gateway.jobs import Tier
from gateway.serving.generation.batches import rank


def test_a_tier_is_worth_a_head_start_and_no_more() -> None:
    """So that nobody starves: who waits longer than that is not overtaken."""
    assert rank(10.0, Tier.PRIORITY, 5) < rank(6.0, Tier.DEFAULT, 5) < rank(2.0, Tier.FLEX, 5)
    assert rank(12.0, Tier.PRIORITY, 5) > rank(6.0, Tier.DEFAULT, 5)
    assert rank(0.0, Tier.FLEX, 5) < rank(6.0, Tier.DEFAULT, 5)
