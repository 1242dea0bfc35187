"""Who joins next, with numbers."""

from gateway.jobs import Tier
from gateway.serving.generation.policy import prefill_goes_first
from gateway.serving.generation.queue import rank


def test_a_tier_is_worth_a_head_start_and_no_more() -> None:
    """So that nobody starves: who waits longer than that is not overtaken."""
    assert rank(10.0, Tier.PRIORITY, 5) < rank(6.0, Tier.DEFAULT, 5) < rank(2.0, Tier.FLEX, 5)
    assert rank(12.0, Tier.PRIORITY, 5) > rank(6.0, Tier.DEFAULT, 5)
    assert rank(0.0, Tier.FLEX, 5) < rank(6.0, Tier.DEFAULT, 5)


def test_a_burst_is_read_before_it_is_answered_and_for_so_long() -> None:
    """A step costs nearly as much for a few rows as for many; those that run wait for a bound."""
    assert prefill_goes_first(soon=31, decoding=1, waited_s=0.2, bound_s=0.5)
    assert not prefill_goes_first(soon=31, decoding=1, waited_s=0.5, bound_s=0.5)
    assert not prefill_goes_first(soon=16, decoding=16, waited_s=0, bound_s=0.5)
    assert not prefill_goes_first(soon=1, decoding=1, waited_s=0, bound_s=0.5), "a long prompt"
