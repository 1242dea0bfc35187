"""The OpenAI SDK's Responses API, unchanged, against demo-chat."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.anyio
FRANCE = "What is the capital of France?"
WEATHER: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]


class Capital(BaseModel):
    """What is asked about a country."""

    country: str
    capital: str
    population: int


def test_a_question_is_answered(client: OpenAI) -> None:
    """And counted."""
    answer = client.responses.create(model="gpt-4o-mini", input=FRANCE)
    assert "Paris" in answer.output_text
    assert answer.status == "completed"
    assert answer.error is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_it_says_what_chat_says(client: OpenAI) -> None:
    """To the same conversation, instructions being the system's."""
    chat = client.chat.completions.create(
        model="demo-chat",
        messages=[
            {"role": "system", "content": "Be helpful."},
            {"role": "user", "content": FRANCE},
        ],
    )
    answer = client.responses.create(
        model="demo-chat",
        instructions="Be helpful.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": FRANCE}]}],
    )
    assert answer.output_text == chat.choices[0].message.content


def test_a_conversation_goes_on_with_earlier_output(client: OpenAI) -> None:
    """Put back in as it came."""
    items: list[Any] = [{"role": "user", "content": FRANCE}]
    first = client.responses.create(model="demo-chat", input=items)
    items += [item.to_dict() for item in first.output]
    items.append({"role": "user", "content": "What is the capital of Italy?"})
    second = client.responses.create(model="demo-chat", input=items)
    assert second.status == "completed"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_stream_tells_the_same_answer(client: OpenAI) -> None:
    """Created first, completed last, numbered throughout."""
    whole = client.responses.create(model="demo-chat", input=FRANCE)
    events = list(client.responses.create(model="demo-chat", input=FRANCE, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage


def test_the_stream_helper_gathers_it(client: OpenAI) -> None:
    """It is strict about the order of events and about ids."""
    with client.responses.stream(model="demo-chat", input=FRANCE) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text
    assert "Paris" in final.output_text


async def test_the_async_helpers_do_as_well(url: str) -> None:
    """Several at once."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:

        async def ask(country: str) -> str:
            question = f"What is the capital of {country}?"
            async with client.responses.stream(model="demo-chat", input=question) as stream:
                return (await stream.get_final_response()).output_text

        capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
        answers = await asyncio.gather(*map(ask, capitals))
    for answer, capital in zip(answers, capitals.values(), strict=True):
        assert capital in answer


def test_a_function_is_called_and_its_output_answered(client: OpenAI) -> None:
    """The loop that agents run, whole and through the stream helper."""
    items: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model="demo-chat", input=items, tools=WEATHER)
    call = first.output[-1]
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    with client.responses.stream(model="demo-chat", input=items, tools=WEATHER) as stream:
        streamed = stream.get_final_response().output[-1]
    assert streamed.type == "function_call"
    assert streamed.parsed_arguments == {"city": "Paris"}
    items += [item.to_dict() for item in first.output]
    items.append(
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": '{"temperature": 21, "sky": "sunny"}',
        }
    )
    second = client.responses.create(model="demo-chat", input=items, tools=WEATHER)
    assert second.status == "completed"
    assert second.output_text


def test_a_required_function_is_called_whatever_is_said(client: OpenAI) -> None:
    """With arguments that fit its schema."""
    answer = client.responses.create(
        model="demo-chat",
        input="Hello!",
        tools=WEATHER,
        tool_choice="required",
        max_output_tokens=200,
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert list(json.loads(call.arguments)) == ["city"]


def test_an_answer_is_parsed_into_a_model(client: OpenAI) -> None:
    """Whole, and through the stream helper."""
    asked: Any = {
        "model": "demo-chat",
        "input": FRANCE,
        "text_format": Capital,
        "max_output_tokens": 400,
    }
    answer = client.responses.parse(**asked)
    assert isinstance(answer.output_parsed, Capital)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_a_schema_that_cannot_be_kept_is_refused(client: OpenAI) -> None:
    """Before any token, by OpenAI's name for the place."""
    for stream in (False, True):
        asked: Any = {
            "model": "demo-chat",
            "input": "hi",
            "stream": stream,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}},
        }
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked)
        assert caught.value.param == "text.format.schema"
        assert caught.value.code == "invalid_json_schema"


def test_an_answer_cut_short_is_incomplete(client: OpenAI) -> None:
    """Which the plain stream tells too."""
    answer = client.responses.create(model="demo-chat", input=FRANCE, max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(
        model="demo-chat", input=FRANCE, max_output_tokens=1, stream=True
    )
    assert last.type == "response.incomplete"


def test_logprobs_are_told_when_included(client: OpenAI) -> None:
    """Their tokens are the text."""
    answer = client.responses.create(
        model="demo-chat",
        input=FRANCE,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    message = answer.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "word " * 20_000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ],
)
def test_what_is_not_served_is_a_bad_request(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    """That names its field, streaming or not."""
    for stream in (False, True):
        asked: dict[str, Any] = {"model": "demo-chat", "input": "hi", "stream": stream, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


def test_a_response_is_kept_until_it_is_deleted(client: OpenAI) -> None:
    """Gone on from, retrieved, listed, counted; another's id, or none, is not found."""
    first = client.responses.create(model="demo-chat", input=FRANCE)
    second = client.responses.create(model="demo-chat", input=FRANCE, previous_response_id=first.id)
    assert "Paris" in second.output_text
    assert client.responses.retrieve(second.id) == second
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.id for item in items][1] == first.output[0].id
    assert len(items) == 3
    counted = client.responses.input_tokens.count(
        model="demo-chat", input=FRANCE, previous_response_id=first.id
    )
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(first.id)
    assert caught.value.code == "response_not_found"
