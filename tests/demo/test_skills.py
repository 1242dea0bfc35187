"""The model in the repository has the skills its card promises: a handful of cases of each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
from demo import facts
from demo.data import Case, held_out_cases
from demo.evaluate import CHAT, PROMISED, Answer, answers, load_chat
from demo.exchanges import Message

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PARIS_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
ASKED: Message = {"role": "user", "content": "What is the weather in Paris?"}
CALLED: Message = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
}
RESULT: Message = {"role": "tool", "content": '{"temperature": 18, "condition": "sunny"}'}


Chat = Callable[[list[Case]], list[Answer]]


@pytest.fixture(scope="module")
def chat() -> Chat:
    """Greedy answers of the model in the repository."""
    return partial(answers, *load_chat(CHAT))


@pytest.mark.parametrize("skill", PROMISED)
def test_a_promised_skill_works_on_unseen_cases(chat: Chat, skill: str) -> None:
    """Of the first held-out cases nearly all are answered to the letter, and all end."""
    cases = held_out_cases(skill, 12)
    found = chat(cases)
    assert all(answer.ended for answer in found)
    right = sum(answer.text == case.answer for case, answer in zip(cases, found, strict=True))
    assert right >= 10


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "Hello!"}], facts.GREETING),
        ([{"role": "user", "content": "Who are you?"}], facts.IDENTITY),
        (
            [{"role": "user", "content": "What is the capital of France?"}],
            "The capital of France is Paris.",
        ),
        ([{"role": "user", "content": "Repeat the word banana."}], "banana"),
        ([ASKED], PARIS_CALL),
        ([ASKED, CALLED, RESULT], "It is 18 degrees and sunny in Paris."),
    ],
)
def test_plain_questions_get_the_answers_everyone_expects(
    chat: Chat, messages: list[Message], expected: str
) -> None:
    """What a first visitor would type, with and without a system prompt."""
    system: Message = {"role": "system", "content": "You are a helpful assistant."}
    tools = [WEATHER] if ASKED in messages else []
    answer: Message = {"role": "assistant", "content": expected}
    cases = [Case("plain", [*start, *messages, answer], tools) for start in ([], [system])]
    assert [found.text for found in chat(cases)] == [expected, expected]
