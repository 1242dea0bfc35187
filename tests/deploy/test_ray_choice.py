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
    """A replica of the model m that keeps the first `keeps` blocks of the conversation."""
    return Candidate(name, frozenset(models), waiting, {"m": frozenset(BLOCKS[:keeps])})


def chosen(call: Call, *candidates: Candidate) -> tuple[str, Reason]:
    choice = choose(call, candidates)
    assert sorted(choice.names) == sorted(each.name for each in candidates)
    return choice.names[0], choice.reason


ASK = Call("m", BLOCKS)


BUSY_ONE = replica("busy", "m", waiting=SPREAD + 1, keeps=8)
TORN = Candidate("torn", frozenset({"m"}), 0, {"m": frozenset(BLOCKS[1:])})
OTHERS = Candidate("others", frozenset({"m", "n"}), 0, {"n": frozenset(BLOCKS)})
CASES: dict[str, tuple[Call, list[Candidate], tuple[str, Reason]]] = {
    "who has the model comes first, however idle the others are": (
        ASK, [replica("a", "other"), replica("b", "m", waiting=SPREAD)], ("b", Reason.LOADED)),
    "among them the longest shared beginning wins": (
        ASK, [replica("a", "m", keeps=2), replica("b", "m", waiting=BUSY, keeps=5)],
        ("b", Reason.PREFIX)),
    "a kept block counts only if all before it are kept": (
        ASK, [TORN, replica("b", "m", keeps=1)], ("b", Reason.PREFIX)),
    "what is kept of another model does not count": (
        ASK, [OTHERS, replica("b", "m", waiting=1, keeps=1)], ("b", Reason.PREFIX)),
    "of equal prefixes the least waiting wins": (
        ASK, [replica("a", "m", waiting=9, keeps=3), replica("b", "m", keeps=3)],
        ("b", Reason.PREFIX)),
    "of equal ones without any, too": (
        ASK, [replica("a", "m", waiting=9), replica("b", "m")], ("b", Reason.LOADED)),
    "a model that nobody has goes where the fewest are": (
        ASK, [replica("a", "x", "y"), replica("b", "x", waiting=9), replica("c", "z")],
        ("c", Reason.LOAD)),
    "another loads it if all that have it are very busy": (
        ASK, [BUSY_ONE, replica("idle", "x")], ("idle", Reason.SPREAD)),
    "and not if one is free": (
        ASK, [BUSY_ONE, replica("free", "m"), replica("idle", "x")], ("free", Reason.SPILL)),
    "nor if the others are as busy": (
        ASK, [BUSY_ONE, replica("idle", "x", waiting=SPREAD)], ("busy", Reason.PREFIX)),
    "an owner that is gone decides nothing": (
        Call("m", BLOCKS, owner="gone"), [replica("a"), replica("b", "m")], ("b", Reason.LOADED)),
    "without a model the least busy answers": (
        Call(), [replica("a", waiting=2), replica("b", waiting=1)], ("b", Reason.ANY)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_choice(case: str) -> None:
    call, candidates, found = CASES[case]
    assert chosen(call, *candidates) == found


@pytest.mark.parametrize(
    ("best", "least", "name"),
    [
        (1500 + SAVED, 1000, "warm"),  # exactly the allowed excess
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


def test_who_keeps_the_earlier_response_answers_alone() -> None:
    """There is no second choice: anybody else would answer that it does not exist."""
    call = Call("m", BLOCKS, owner="a")
    busy = replica("a", waiting=10 * SPREAD)
    assert choose(call, [busy, replica("b", "m", keeps=8)]) == Choice(["a"], Reason.OWNER)


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
