"""The router's decision, with numbers."""

from typing import Any

import pytest

from deploy.ray.choice import (
    BLOCK_TOKENS,
    BUSY,
    SPREAD,
    Call,
    Candidate,
    Choice,
    Reason,
    choose,
    replicas_for,
)

BLOCKS = [bytes([i]) for i in range(8)]
SAVED = len(BLOCKS) * BLOCK_TOKENS


def replica(name: str, *models: str, waiting: float = 0, keeps: int = 0) -> Candidate:
    """A replica that keeps so many first blocks of the conversation with the model m."""
    return Candidate(name, frozenset(models), waiting, {"m": frozenset(BLOCKS[:keeps])})


def chosen(call: Call, *candidates: Candidate) -> tuple[str, Reason]:
    choice = choose(call, candidates)
    assert sorted(choice.names) == sorted(each.name for each in candidates)
    return choice.names[0], choice.reason


ASK = Call("m", BLOCKS)


def test_those_that_have_the_model_come_first() -> None:
    found = chosen(ASK, replica("a", "other"), replica("b", "m", waiting=SPREAD))
    assert found == ("b", Reason.LOADED)


def test_among_them_the_longest_shared_beginning_wins() -> None:
    found = chosen(ASK, replica("a", "m", keeps=2), replica("b", "m", waiting=BUSY, keeps=5))
    assert found == ("b", Reason.PREFIX)


def test_a_kept_block_counts_only_if_all_before_it_are_kept() -> None:
    torn = Candidate("a", frozenset({"m"}), 0, {"m": frozenset(BLOCKS[1:])})
    assert torn.shares(ASK) == 0
    assert chosen(ASK, torn, replica("b", "m", keeps=1)) == ("b", Reason.PREFIX)


def test_what_is_kept_of_another_model_does_not_count() -> None:
    other = Candidate("a", frozenset({"m", "n"}), 0, {"n": frozenset(BLOCKS)})
    assert chosen(ASK, other, replica("b", "m", waiting=1, keeps=1)) == ("b", Reason.PREFIX)


def test_of_equal_ones_the_least_waiting_wins() -> None:
    found = chosen(ASK, replica("a", "m", waiting=9, keeps=3), replica("b", "m", keeps=3))
    assert found == ("b", Reason.PREFIX)
    assert chosen(ASK, replica("a", "m", waiting=9), replica("b", "m")) == ("b", Reason.LOADED)


@pytest.mark.parametrize(
    ("best", "least", "name"),
    [
        (1500 + SAVED, 1000, "warm"),  # as many as allowed
        (1501 + SAVED, 1000, "cold"),
        (BUSY * 1.5 + SAVED, 0, "warm"),  # hardly busy: its prefix is worth more than the wait
        (BUSY * 1.5 + SAVED + 1, 0, "cold"),
    ],
)
def test_beyond_one_and_a_half_times_the_least_it_spills(
    best: float, least: float, name: str
) -> None:
    found, reason = chosen(
        ASK, replica("warm", "m", waiting=best, keeps=8), replica("cold", "m", waiting=least)
    )
    assert found == name
    assert reason == (Reason.SPILL if name == "cold" else Reason.PREFIX)


def test_a_model_that_nobody_has_goes_where_the_fewest_are() -> None:
    found = chosen(ASK, replica("a", "x", "y"), replica("b", "x", waiting=9), replica("c", "z"))
    assert found == ("c", Reason.LOAD)


def test_another_loads_the_model_only_if_all_that_have_it_are_very_busy() -> None:
    idle = replica("idle", "x")
    busy = replica("busy", "m", waiting=SPREAD + 1, keeps=8)
    assert chosen(ASK, busy, idle) == ("idle", Reason.SPREAD)
    assert chosen(ASK, busy, replica("free", "m"), idle) == ("free", Reason.SPILL)
    as_busy = replica("idle", "x", waiting=SPREAD)
    assert chosen(ASK, busy, as_busy) == ("busy", Reason.PREFIX)


def test_who_keeps_the_earlier_response_answers_alone() -> None:
    """There is no second choice: anybody else would answer that it does not exist."""
    call = Call("m", BLOCKS, owner="a")
    busy = replica("a", waiting=10 * SPREAD)
    assert choose(call, [busy, replica("b", "m", keeps=8)]) == Choice(["a"], Reason.OWNER)


def test_an_owner_that_is_gone_decides_nothing() -> None:
    call = Call("m", BLOCKS, owner="gone")
    assert chosen(call, replica("a"), replica("b", "m")) == ("b", Reason.LOADED)


def test_without_a_model_the_least_busy_answers() -> None:
    assert chosen(Call(), replica("a", waiting=2), replica("b", waiting=1)) == ("b", Reason.ANY)


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        (0, 1, 1),
        (0, 3, 1),
        (1001, 1, 2),
        (2000, 1, 2),
        (9999, 1, 4),  # never more than there may be
        (1600, 3, 3),  # two would have 800 each, and be three again soon
        (400, 3, 1),
    ],
)
def test_replicas_follow_the_tokens_that_wait(waiting: float, running: int, expected: int) -> None:
    bounds: dict[str, Any] = {"target": 1000, "least": 1, "most": 4}
    assert replicas_for(waiting, running, **bounds) == expected
