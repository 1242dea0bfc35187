"""How many tokens a pass may have, with numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.serving.pace import LEAST_TOKENS, MOST_GROWTH, START_TOKENS, Pace, allowed_tokens


def test_a_pass_that_took_too_long_tells_how_much_fits() -> None:
    """At once: the next is not to be as long."""
    assert allowed_tokens(16_384, 16_384, 4.0, 0.25) == 1024
    assert allowed_tokens(512, 512, 0.2, 0.25) == 640


def test_a_quick_pass_lets_the_next_be_longer_and_not_many_times_as_long() -> None:
    """Attention costs more for long rows than for short ones."""
    assert allowed_tokens(512, 512, 0.1, 0.25) == 1280
    assert allowed_tokens(512, 512, 0.001, 0.25) == MOST_GROWTH * 512


def test_a_small_quick_pass_tells_nothing_of_large_ones() -> None:
    """Eight tokens take nearly as long as eighty."""
    assert allowed_tokens(2000, 8, 0.02, 0.25) == 2000
    assert allowed_tokens(55, 5, 0.17, 0.25) == 55, "the end of a prompt, on a slow machine"


def test_a_small_slow_pass_halves_at_most() -> None:
    """A kernel was compiled, or the machine was busy."""
    assert allowed_tokens(2000, 8, 0.5, 0.25) == 1000
    assert allowed_tokens(512, 255, 0.25, 0.25) == 256, "and it was half of what it might have been"


def test_a_pass_is_never_cut_to_nothing() -> None:
    """Nor is anything learnt of a pass that had no tokens."""
    assert allowed_tokens(512, 512, 1000, 0.25) == LEAST_TOKENS
    assert allowed_tokens(512, 0, 0.1, 0.25) == 512


@given(st.floats(200, 100_000), st.floats(0, 0.05))
def test_passes_become_as_long_as_they_may_be(tokens_a_second: float, overhead_s: float) -> None:
    """Whatever the device: after a few full ones none is much longer than the limit, nor shorter
    than need be.
    """
    pace = Pace(0.25)
    assert pace.tokens == START_TOKENS
    for _ in range(12):
        seconds = overhead_s + pace.tokens / tokens_a_second
        pace.note(pace.tokens, seconds)
    seconds = overhead_s + pace.tokens / tokens_a_second
    assert seconds == pytest.approx(0.25, rel=0.35)
