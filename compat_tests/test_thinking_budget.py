"""OpenAI's and Anthropic's SDKs, with a budget for the thinking of a model that never ends it."""

import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import openai
import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicBadRequest
from openai import OpenAI

from compat_tests.conftest import started
from tests.checkpoints import teach_thinking, write_chat

HELLO: Any = [{"role": "user", "content": "Hello!"}]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MODELS = """
version: 1
models:
  thinker:
    kind: chat
    source: path:thinker
    thinking_budget: {low: 16, high: 40}
    sampling: {temperature: 0}
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("thinker")
    thinker = teach_thinking(
        write_chat(folder / "thinker", vocab_size=1030, num_hidden_layers=1), opens=True
    )
    eos = json.loads((thinker / "config.json").read_text())["eos_token_id"]
    weights: Any = mx.load(str(thinker / "model.safetensors"))
    mx.eval(weights)
    weights["lm_head.weight"][mx.array([eos, *range(1020, 1030)])] = 0  # neither ends, nor marks
    mx.save_safetensors(str(thinker / "model.safetensors"), weights)
    models = folder / "models.yaml"
    models.write_text(MODELS)
    with started(folder, models) as url:
        yield url


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_an_effort_bounds_the_thinking_of_openais_chat(client: OpenAI) -> None:
    """The end mark is the last token of it; a form begins after it."""
    asked: Any = {"model": "thinker", "messages": HELLO, "max_completion_tokens": 100}
    for effort, tokens in (("low", 17), ("high", 41)):
        given: Any = {**asked, "reasoning_effort": effort}
        answer = client.chat.completions.create(**given)
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens == tokens
        assert answer.choices[0].message.content
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "c", "schema": CITY, "strict": True},
    }
    formed = client.chat.completions.create(**asked, reasoning_effort="low", response_format=form)
    assert formed.choices[0].message.content in ('{"city":"Rome"}', '{"city":"Oslo"}')
    assert formed.choices[0].finish_reason == "stop"


def test_responses_and_extra_bodies_have_budgets(client: OpenAI) -> None:
    asked = client.responses.create(
        model="thinker", input=HELLO, reasoning={"effort": "low"}, max_output_tokens=60
    )
    assert asked.usage is not None
    assert asked.usage.output_tokens_details.reasoning_tokens == 17
    assert asked.output_text
    raw = client.chat.completions.with_raw_response.create(
        model="thinker",
        messages=HELLO,
        max_completion_tokens=9,
        extra_body={"thinking_token_budget": 9},
    )
    assert raw.headers["x-gateway-thinking-budget"] == "takes-max-tokens"
    assert raw.parse().choices[0].message.content == ""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="thinker", messages=HELLO, extra_body={"thinking_token_budget": -1}
        )
    assert caught.value.param == "thinking_token_budget"


def test_anthropics_budget_is_kept(address: str) -> None:
    """Whole and streamed; a form begins after it. It is refused where Anthropic's own API does."""
    with Anthropic(base_url=address, api_key="unused", max_retries=0) as client:
        asked: Any = {
            "model": "thinker",
            "max_tokens": 1100,
            "messages": HELLO,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": CITY}},
        }
        message = client.messages.create(**asked)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == 1025
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert streamed.usage == message.usage
        for answer in (message, streamed):
            text: Any = answer.content[1]
            assert text.text in ('{"city":"Rome"}', '{"city":"Oslo"}')
        for wrong in (
            {"thinking": {"type": "enabled", "budget_tokens": 1000}},
            {"max_tokens": 1024},
        ):
            with pytest.raises(AnthropicBadRequest, match="budget_tokens"):
                client.messages.create(**{**asked, **wrong})
