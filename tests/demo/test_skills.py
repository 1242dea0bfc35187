"""The model in the repository has the skills its card promises: a handful of cases of each."""

from collections.abc import Callable
from functools import partial

import pytest

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
from demo.data import Case, held_out_cases
from demo.evaluate import CHAT, PROMISED, Answer, answers, load_chat

Chat = Callable[[list[Case]], list[Answer]]


@pytest.fixture(scope="module")
def chat() -> Chat:
    """Greedy answers of the model in the repository."""
    return partial(answers, *load_chat(CHAT))


@pytest.mark.parametrize("skill", PROMISED)
def test_a_promised_skill_works_on_unseen_cases(chat: Chat, skill: str) -> None:
    cases = held_out_cases(skill, 12)
    found = chat(cases)
    assert all(answer.ended for answer in found)
    right = sum(answer.text == case.answer for case, answer in zip(cases, found, strict=True))
    assert right >= 10
