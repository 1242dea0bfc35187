"""The OpenAI SDK's legacy completions, unchanged, against demo-chat."""

from typing import Any

import pytest
from openai import OpenAI

pytestmark = pytest.mark.anyio
PROMPTS = ["The capital of France is", "One, two, three,"]


def test_a_prompt_is_written_on(client: OpenAI) -> None:
    """The answer has sixteen tokens, as nothing else was asked."""
    answer = client.completions.create(model="demo-chat", prompt=PROMPTS[0])
    (choice,) = answer.choices
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 16
    assert (choice.finish_reason == "length") == (answer.usage.completion_tokens == 16)


def test_several_prompts_answer_as_each_alone(client: OpenAI) -> None:
    """Answers come in the prompts' order, `n` for each, and are counted together."""
    alone = [
        client.completions.create(model="demo-chat", prompt=prompt, temperature=0)
        for prompt in PROMPTS
    ]
    together = client.completions.create(model="demo-chat", prompt=PROMPTS, n=2, temperature=0)
    texts = [answer.choices[0].text for answer in alone for _ in range(2)]
    assert [choice.text for choice in together.choices] == texts
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)


def test_a_stream_adds_up_to_the_whole(client: OpenAI) -> None:
    """Choice by choice, with the prompt first when it is echoed."""
    asked: Any = {"model": "demo-chat", "prompt": PROMPTS, "echo": True, "temperature": 0}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    usage = None
    for chunk in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, PROMPTS, strict=True))
    assert usage == whole.usage


def test_a_text_may_be_held_to_a_choice(client: OpenAI) -> None:
    """The request uses vLLM's words, new and old."""
    asked: Any = {"model": "demo-chat", "prompt": PROMPTS[0]}
    for form in ({"structured_outputs": {"choice": ["red", "green"]}}, {"guided_regex": "red|no"}):
        (choice,) = client.completions.create(**asked, extra_body=form).choices
        assert choice.text in ("red", "green", "no")
        assert choice.finish_reason == "stop"
