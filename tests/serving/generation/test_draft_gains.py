"""Drafts pause where they make answers come later; the measure is of steps' times."""

from collections.abc import Iterator

import pytest

from gateway.jobs import Drafter, Pass
from gateway.serving.generation.draft_gains import BASELINES, SHORTEST_PAUSE, STALE, DraftGains

PLAIN = Pass(rows=2, tokens=2)


def drafted(accepted: int, drafter: Drafter | None = "prompt_lookup") -> Pass:
    return Pass(2, 2 + accepted, drafted=6, accepted=accepted, drafter=drafter)


def run(gains: DraftGains, steps: int, accepted: int, seconds: float) -> Iterator[float]:
    """Make steps of a second without drafts and of `seconds` with them; yield what is judged."""
    for _ in range(steps):
        judged = gains.note(PLAIN, 1.0)
        if "prompt_lookup" in gains.choose(rows=2):
            judged = gains.note(drafted(accepted), seconds)
        if judged is not None:
            yield judged[1]


def test_a_drafter_that_gains_goes_on() -> None:
    gains = DraftGains()
    assert list(run(gains, 70, accepted=4, seconds=1.5)) == pytest.approx([2.0, 2.0])
    assert "prompt_lookup" in gains.choose(rows=2)


def test_one_that_loses_pauses_each_time_for_longer_and_the_other_goes_on() -> None:
    gains = DraftGains()
    pauses = []
    for _ in range(2):
        assert next(run(gains, 10_000, accepted=1, seconds=2.0)) == pytest.approx(0.75)
        assert gains.choose(rows=2) == ["draft_model"]
        paused = 2
        while gains.choose(rows=2) != ["prompt_lookup", "draft_model"]:
            gains.note(PLAIN, 1.0)
            paused += 1
        pauses.append(paused)
    assert pauses == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE]


def test_nothing_is_drafted_before_the_time_without_is_known_nor_once_it_is_old() -> None:
    gains = DraftGains()
    for _ in range(BASELINES):
        assert gains.choose(rows=3) == ()
        gains.note(Pass(rows=3, tokens=3), 1.0)
    waits = 0
    for _ in range(STALE):
        if not gains.choose(rows=3):
            waits += 1
            gains.note(Pass(rows=3, tokens=3), 1.0)
    assert waits == 1
    assert gains.choose(rows=2) == ()  # of another count of rows


def test_forced_tokens_and_mixed_drafts_say_nothing() -> None:
    gains = DraftGains()
    for _ in range(BASELINES):
        gains.note(Pass(rows=2, tokens=9, forced=7), 9.0)
    assert gains.choose(rows=2) == ()
    for _ in range(200):
        gains.note(PLAIN, 1.0)
        assert gains.note(drafted(0, drafter=None), 9.0) is None
    assert gains.choose(rows=2) == ["prompt_lookup", "draft_model"]
