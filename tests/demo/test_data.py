"""The two sides of the data share nothing that the test asks about."""

import json
import random
import re
from itertools import islice

import pytest

from demo import facts
from demo.data import SKILLS, conversations, held_out_cases
from demo.exchanges import Side
from demo.wordings import HELD_OUT, TRAIN, bare, spell_out
from demo.words import is_held_out

TRAINING = list(islice(conversations(0), 3000))


def _all_texts(phrasings: list[str]) -> set[str]:
    return {bare(text) for phrasing in phrasings for text in spell_out(phrasing)}


@pytest.mark.parametrize("skill", sorted(HELD_OUT.questions))
def test_no_held_out_phrasing_is_trained_on(skill: str) -> None:
    """Written out with every alternative, the two sides have no text in common."""
    assert not _all_texts(TRAIN.questions[skill]) & _all_texts(HELD_OUT.questions[skill])


@pytest.mark.parametrize("skill", sorted(HELD_OUT.questions))
def test_untidy_phrasings_never_become_held_out_ones(skill: str) -> None:
    """Words put in or lost at random do not make a phrasing of the test."""
    side = Side(random.Random(0), held_out=False)
    drawn = {bare(side.wording(skill)) for _ in range(3000)}
    assert not drawn & _all_texts(HELD_OUT.questions[skill])


@pytest.mark.parametrize("kind", ["unknown", "system", "result"])
def test_what_stands_around_the_questions_is_apart_too(kind: str) -> None:
    """System texts, tool results and other questions are not shared either."""
    train, held_out = TRAIN.surroundings[kind], HELD_OUT.surroundings[kind]
    assert not {t for text in train for t in spell_out(text)} & {
        t for text in held_out for t in spell_out(text)
    }


def test_every_word_to_repeat_is_on_its_side() -> None:
    """A held-out word is on the held-out side and no training text contains it."""
    words = {case.answer for case in held_out_cases("repeat", 300)}
    assert all(is_held_out(word) for word in words)
    seen = " ".join(str(case.messages) for case in TRAINING).lower()
    spoken = set(re.findall(r"\w+", seen))
    assert not {word.lower() for word in words} & spoken


def test_every_name_and_city_to_extract_is_on_its_side() -> None:
    """Names and cities asked for in the test are never asked for in training."""

    def parts(answers: list[str]) -> set[tuple[str, str]]:
        found = [json.loads(answer) for answer in answers if answer.startswith('{"name"')]
        return {(key, fact[key].lower()) for fact in found for key in ("name", "city")}

    trained = [m.get("content", "") for case in TRAINING for m in case.messages]
    tested = [case.answer for case in held_out_cases("extract", 300)]
    assert not parts(trained) & parts(tested)


def test_no_held_out_sum_is_trained_on_either_way_round() -> None:
    """Neither a + b nor b + a of a test sum occurs in training."""

    def pairs(text: str) -> set[frozenset[str]]:
        return {frozenset(p) for p in re.findall(r"(\d+) \+ (\d+) = \d+\.", text)}

    trained = pairs(" ".join(str(case.messages) for case in TRAINING))
    tested = pairs(" ".join(case.answer for case in held_out_cases("sum", 300)))
    assert trained
    assert tested
    assert not trained & tested


def test_no_user_text_of_the_test_is_in_training() -> None:
    """Whole questions are compared too, whatever they were made of."""
    trained = {m["content"] for case in TRAINING for m in case.messages if m["role"] == "user"}
    for skill in SKILLS:
        asked = {c.prompt[-1]["content"] for c in held_out_cases(skill, 200) if skill != "result"}
        assert not asked & trained, skill


def test_the_same_seed_makes_the_same_conversations() -> None:
    assert list(islice(conversations(0), 50)) == TRAINING[:50]
    assert list(islice(conversations(1), 50)) != TRAINING[:50]


def test_training_shows_thousands_of_invented_words() -> None:
    """Copying generalises only when there is much to copy."""
    text = " ".join(str(m.get("content")) for case in TRAINING for m in case.messages)
    assert len(set(re.findall(r"[a-z]+", text.lower()))) > 4000


def test_all_thirty_capitals_are_tested() -> None:
    """Thirty cases in a row ask for thirty countries."""
    answers = {case.answer for case in held_out_cases("capital", 30)}
    assert len(answers) == len(facts.CAPITALS) == 30
