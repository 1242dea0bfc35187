"""The two sides of the data share nothing that the test asks about."""

from functools import cache
from itertools import islice

import pytest

from demo.data import SKILLS, Case, conversations, held_out_cases
from demo.wordings import HELD_OUT, TRAIN, bare, spell_out


@cache
def training() -> list[Case]:
    return list(islice(conversations(0), 3000))


def _all_texts(phrasings: list[str]) -> set[str]:
    return {bare(text) for phrasing in phrasings for text in spell_out(phrasing)}


@pytest.mark.parametrize("skill", sorted(HELD_OUT.questions))
def test_no_held_out_phrasing_is_trained_on(skill: str) -> None:
    """Written out with every alternative, the two sides have no text in common."""
    assert not _all_texts(TRAIN.questions[skill]) & _all_texts(HELD_OUT.questions[skill])


def test_no_user_text_of_the_test_is_in_training() -> None:
    """Whole questions are compared too, whatever they were made of."""
    trained = {m["content"] for case in training() for m in case.messages if m["role"] == "user"}
    for skill in SKILLS:
        asked = {c.prompt[-1]["content"] for c in held_out_cases(skill, 200) if skill != "result"}
        assert not asked & trained, skill


def test_the_same_seed_makes_the_same_conversations() -> None:
    assert list(islice(conversations(0), 50)) == training()[:50]
    assert list(islice(conversations(1), 50)) != training()[:50]
