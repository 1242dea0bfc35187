"""Drafts pause where they make answers come later; the measure is of steps' times."""

import pytest

from gateway.jobs.steps import Drafter, Pass, StepResult
from gateway.serving.generation.draft_gains import BASELINES, SHORTEST_PAUSE, STALE, DraftGains

LOOKUP: Drafter = "prompt_lookup"
OTHERS: list[Drafter] = ["draft_model", "mtp_head"]


class Answers:
    """Two answers whose steps take a second, and `made_in_s` more to make a draft."""

    def __init__(self, accepted: int, made_in_s: float) -> None:
        self.gains = DraftGains()
        self._accepted = accepted
        self._made_in_s = made_in_s
        self._is_drafted = False  # the pass under way

    def step(self, *, drafts: bool = True, forced: int = 0) -> float | None:
        """Make a step; return the gain if it has been judged."""
        size = Pass(2, 2, forced=forced)
        if self._is_drafted:
            size = Pass(2, 2, drafted=6, accepted=self._accepted, drafter=LOOKUP)
        allowed = self.gains.choose(rows=2)
        self._is_drafted = drafts and LOOKUP in allowed
        seconds = 1.0 + self._made_in_s * self._is_drafted
        drafter = LOOKUP if self._is_drafted else None
        judged = self.gains.note(StepResult(size=size, drafter=drafter), seconds)
        return None if judged is None else judged[1]


def test_a_drafter_that_gains_goes_on() -> None:
    answers = Answers(accepted=4, made_in_s=0.5)
    judged = [gain for gain in (answers.step() for _ in range(80)) if gain is not None]
    assert judged == pytest.approx([2.0, 2.0], rel=0.03)
    assert LOOKUP in answers.gains.choose(rows=2)


@pytest.mark.parametrize("every", [1, 2])
def test_one_that_loses_pauses_each_time_for_longer_and_the_others_go_on(every: int) -> None:
    """The time to make drafts counts as their cost, also where not every step makes one."""
    answers, pauses, paused = Answers(accepted=1, made_in_s=3.0), list[int](), 0
    for number in range(6000):
        gain = answers.step(drafts=number % every == 0)
        if gain is not None:
            assert gain < 1
            assert answers.gains.choose(rows=2) == OTHERS
        is_paused = answers.gains._sources[LOOKUP].paused > 0
        if paused and not is_paused:
            pauses.append(paused)
        paused = (paused + 1) * is_paused
    assert pauses[:2] == pytest.approx([SHORTEST_PAUSE, 2 * SHORTEST_PAUSE], abs=3)


def test_one_slow_step_is_no_measure() -> None:
    answers = Answers(accepted=0, made_in_s=0.5)
    answers.gains.choose(rows=2)
    answers.gains.note(StepResult(size=Pass(2, 2)), 60.0)
    judged = [gain for gain in (answers.step() for _ in range(60)) if gain is not None]
    assert judged == pytest.approx([1 / 1.5], rel=0.03)


def test_nothing_is_drafted_before_the_time_without_is_known_nor_once_it_is_old() -> None:
    gains, waits = DraftGains(), 0
    for _ in range(STALE + 2 * BASELINES):
        if not gains.choose(rows=3):
            waits += 1
            gains.note(StepResult(size=Pass(3, 3)), 1.0)
    assert waits == 2 * BASELINES
    assert not gains.choose(rows=2)  # another count of rows has no baseline yet


def test_forced_tokens_and_mixed_drafts_say_nothing() -> None:
    answers = Answers(accepted=0, made_in_s=0.0)
    for _ in range(BASELINES):
        answers.step(forced=7)
    assert not answers.gains.choose(rows=2)
    for _ in range(BASELINES):
        answers.step()
    mixed = StepResult(size=Pass(2, 2, drafted=6))
    assert all(answers.gains.note(mixed, 9.0) is None for _ in range(200))
    assert answers.gains.choose(rows=2) == [LOOKUP, *OTHERS]
