"""Anthropic's Python SDK, unchanged, against demo-chat at the address that is given.

Every event is held to the SDK's own types: it checks nothing itself.
"""

import asyncio
import sys
from typing import get_args

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from anthropic.types import Message, MessageParam, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

MODEL = "demo-chat"
FRANCE: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: list[MessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
EVENTS = TypeAdapter(get_args(RawMessageStreamEvent)[0])


class Capital(BaseModel):
    country: str
    capital: str


def whole(client: Anthropic) -> None:
    """An answer, counted, with an id to ask about."""
    message = client.messages.create(model=MODEL, max_tokens=64, messages=FRANCE)
    Message.model_validate(message.to_dict())
    assert message.content[0].text == "The capital of France is Paris."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    counted = client.messages.count_tokens(model=MODEL, messages=FRANCE)
    usage = message.usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert sum(parts) == counted.input_tokens
    assert message._request_id.startswith("req-")


def cached(client: Anthropic) -> None:
    """The same prompt reads from the cache the tokens that its first request added."""
    system = [{"type": "text", "text": "Be helpful. " * 60, "cache_control": {"type": "ephemeral"}}]
    first, second = (
        client.messages.create(model=MODEL, max_tokens=8, messages=FRANCE, system=system).usage
        for _ in range(2)
    )
    assert first.cache_creation_input_tokens >= 64
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0


def stopped(client: Anthropic) -> None:
    """Have answers end by a sequence and by the limit, and continue a prefill."""
    cut = client.messages.create(
        model=MODEL, max_tokens=64, messages=FRANCE, stop_sequences=["Berlin", "Paris"]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in cut.content[0].text
    short = client.messages.create(model=MODEL, max_tokens=2, messages=FRANCE)
    assert short.stop_reason == "max_tokens"
    prefill = [*FRANCE, {"role": "assistant", "content": "The capital of France"}]
    rest = client.messages.create(model=MODEL, max_tokens=64, messages=prefill)
    assert rest.content[0].text == " is Paris."


def streamed(client: Anthropic) -> None:
    """Raw events are of the SDK's types; its helper adds them up to the whole answer."""
    asked = {"model": MODEL, "max_tokens": 64, "messages": FRANCE}
    kinds = []
    for event in client.messages.create(**asked, stream=True):
        EVENTS.validate_python(event.to_dict())
        kinds.append(event.type)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "The capital of France is Paris."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(kinds) - 5 + 1  # the last token has no text


def left(client: Anthropic) -> None:
    """Leaving a stream early is no error."""
    with client.messages.stream(model=MODEL, max_tokens=64, messages=FRANCE) as stream:
        next(iter(stream.text_stream))


def tools(client: Anthropic) -> None:
    """A call, its result, and the answer; streamed, its input comes in pieces."""
    asked = {"model": MODEL, "max_tokens": 128, "tools": [TOOL]}
    first = client.messages.create(**asked, messages=WEATHER)
    call = first.content[-1]
    assert (first.stop_reason, call.name, call.input) == (
        "tool_use", "get_weather", {"city": "Paris"},
    )  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    turns = [*WEATHER, first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(**asked, messages=turns)
    assert "18 degrees" in second.content[0].text
    with client.messages.stream(**asked, messages=WEATHER) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced = client.messages.create(**asked, messages=FRANCE, tool_choice=choice)
        assert forced.content[0].type == "tool_use"
    none = client.messages.create(**asked, messages=WEATHER, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]


def tool_loop(client: Anthropic) -> None:
    """The SDK's own runner, over two turns."""
    asked_for = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: Its name.
        """
        asked_for.append(city)
        return "18 degrees, sunny"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=128, messages=WEATHER, tools=[get_weather]
    )
    final = runner.until_done()
    assert asked_for == ["Paris"]
    assert "18 degrees" in final.content[0].text


def formed(client: Anthropic) -> None:
    """A pydantic model as the form of the answer."""
    parsed = client.messages.parse(
        model=MODEL, max_tokens=128, messages=FRANCE, output_format=Capital
    )
    assert isinstance(parsed.parsed_output, Capital)


def thought(client: Anthropic) -> None:
    """Thinking is asked for as of any model; one that cannot think has no block of it."""
    message = client.messages.create(
        model=MODEL, max_tokens=2000, messages=FRANCE,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    assert [block.type for block in message.content] == ["text"]


def refused(client: Anthropic) -> None:
    """Each error is the SDK's own of its status, with type, code and id."""
    asked = {"model": MODEL, "max_tokens": 5, "messages": FRANCE}
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    cases = [
        ({"model": "nobody"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError,
         "invalid_request_error"),
    ]  # fmt: skip
    for fields, kind, name in cases:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.messages.create(**{**asked, **fields}, stream=stream)
            assert caught.value.type == name
            assert caught.value.request_id.startswith("req-")
    long = [{"role": "user", "content": "so " * 9000}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**asked, "messages": long})
    assert caught.value.error_code == "context_length_exceeded"
    assert "prompt is too long: " in caught.value.api_message


def listed(client: Anthropic) -> None:
    """Page after page, and one by one."""
    names = [model.id for model in client.models.list(limit=1)]
    assert names[0] == MODEL
    assert len(names) > 2
    one = client.models.retrieve(names[1])
    assert (one.type, one.id, one.display_name) == ("model", names[1], names[1])


async def at_once(url: str) -> None:
    """Eight requests, by the asynchronous client."""
    async with AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        asked = [
            client.messages.create(model=MODEL, max_tokens=64, messages=FRANCE) for _ in range(8)
        ]
        answers = await asyncio.gather(*asked)
    assert {each.content[0].text for each in answers} == {"The capital of France is Paris."}


CASES = [
    whole, cached, stopped, streamed, left, tools, tool_loop, formed, thought, refused, listed,
]  # fmt: skip


def main(url: str) -> None:
    with Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        for case in CASES:
            case(client)
    with Anthropic(base_url=url, auth_token="unused", max_retries=0) as client:  # sent as Bearer
        whole(client)
    asyncio.run(at_once(url))
    print(f"{len(CASES) + 2} passed")


if __name__ == "__main__":
    main(sys.argv[1])
