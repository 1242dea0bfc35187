"""OpenAI's decisions, by their SDK, against demo-chat: types, limits, and logprobs."""

import math
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gateway.wire.decisions import HEAD, PREDICATE

CHAT = Path(__file__).parents[1] / "demo" / "chat"
INPUT = "Paris is the capital of France. " * 20
ANSWERS = {
    "predicate": "AnswerAnswerResourcePredicate",
    "choice": "AnswerAnswerResourceChoice",
    "score": "AnswerAnswerResourceScore",
}
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": "It is about France.", "name": "france"},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which city?"}],
        "choices": [{"value": "Paris", "description": "in France"}, {"value": "Rome"}],
    },
    {
        "type": "choice",
        "instructions": "Is it true?",
        "choices": [{"value": True}, {"value": False}, {"value": "true"}],
        "name": "truth",
    },
    {
        "type": "score",
        "instructions": "How clear is it?",
        "levels": [{"label": "not at all"}, {"label": "somewhat"}, {"label": "very"}],
    },
]


def test_each_type_of_question_has_its_answer(client: Any) -> None:
    decision = client.decisions.create(
        model="gpt-6-luna",
        input=[
            {"role": "user", "content": INPUT},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "Paris"},
        ],
        questions=QUESTIONS,
        prompt_cache_key="key",
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        safety_identifier="me",
    )
    type(decision).model_validate(decision.model_dump(), strict=True)
    assert decision.model == "gpt-6-luna"
    assert [type(each).__name__ for each in decision.answers] == [
        ANSWERS[each["type"]] for each in QUESTIONS
    ]
    predicate, city, truth, clear = decision.answers
    assert 0 < predicate.probability < 1
    assert [each.name for each in decision.answers] == ["france", None, "truth", None]
    assert [each.value for each in truth.probabilities] == [True, False, "true"]
    assert isinstance(truth.choice, bool | str)
    for answer in (city, truth, clear):
        assert math.fsum(each.probability for each in answer.probabilities) == pytest.approx(1)
        assert 0 <= answer.confidence <= 1
    expected = sum(each.value * each.probability for each in clear.probabilities)
    assert clear.score == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 70])
def test_many_questions_may_be_asked_at_once(client: Any, count: int) -> None:
    """More than a batch has rows; tests/api asks as many as may be asked. The same question has the
    same answer, wherever it stands; the input is read once.
    """
    questions = [{**QUESTIONS[i % 2], "name": f"q{i}"} for i in range(count)]
    decision = client.decisions.create(model="demo-chat", input=INPUT, questions=questions)
    assert [each.name for each in decision.answers] == [f"q{i}" for i in range(count)]
    first = decision.answers[0].probability
    for answer in decision.answers[::2]:
        assert answer.probability == pytest.approx(first, abs=1e-5)
    usage = decision.usage
    assert usage.total_tokens == usage.input_tokens
    if count > 1:
        assert usage.input_tokens_details.cached_tokens > usage.input_tokens / 2


def test_too_many_questions_are_refused(client: Any) -> None:
    for count in (0, 401):
        with pytest.raises(openai.BadRequestError) as caught:
            client.decisions.create(model="demo-chat", input="x", questions=[QUESTIONS[0]] * count)
        assert caught.value.param == "questions"


def test_probabilities_are_what_logprobs_say(client: Any) -> None:
    """The prompt of docs/decisions.md and each label, scored by /v1/completions."""
    tokenizer = Tokenizer.from_file(str(CHAT / "tokenizer.json"))
    message = HEAD.format(input=INPUT) + PREDICATE.format(instructions="It is about France.")
    mark = "Question:"
    text = rendered(message)
    at = text.index(mark)
    prompt = [
        token
        for part in (text[:at], text[at:])
        for token in tokenizer.encode(part, add_special_tokens=False).ids
    ]
    logprobs = []
    for label in ("yes", "no"):
        ids = tokenizer.encode(label, add_special_tokens=False).ids
        scored = client.completions.create(
            model="demo-chat", prompt=[*prompt, *ids], max_tokens=0, echo=True, logprobs=0
        )
        logprobs.append(sum(scored.choices[0].logprobs.token_logprobs[-len(ids) :]))
    weights = [math.exp(each) for each in logprobs]
    decision = client.decisions.create(model="demo-chat", input=INPUT, questions=[QUESTIONS[0]])
    assert decision.answers[0].probability == pytest.approx(weights[0] / sum(weights), abs=1e-5)
    assert decision.usage.input_tokens == len(prompt)


def rendered(message: str) -> str:
    """Render one user message in the demo model's template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(CHAT))
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return text
