"""The OpenAI SDK's Responses API, unchanged, against demo-chat."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
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
    """The facts asked about a country."""

    country: str
    capital: str
    population: int


def test_a_question_is_answered(client: OpenAI) -> None:
    answer = client.responses.create(model="gpt-4o-mini", input=FRANCE)
    assert "Paris" in answer.output_text
    assert answer.status == "completed"
    assert answer.error is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_the_answer_is_the_one_of_chat_completions(client: OpenAI) -> None:
    """The conversation is the same, with instructions as the system's message."""
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


def test_an_answer_is_parsed_into_a_model(client: OpenAI) -> None:
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


def test_an_answer_cut_short_is_incomplete(client: OpenAI) -> None:
    answer = client.responses.create(model="demo-chat", input=FRANCE, max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(
        model="demo-chat", input=FRANCE, max_output_tokens=1, stream=True
    )
    assert last.type == "response.incomplete"


def test_logprobs_are_told_when_included(client: OpenAI) -> None:
    answer = client.responses.create(
        model="demo-chat", input=FRANCE, include=["message.output_text.logprobs"], top_logprobs=2
    )
    message = answer.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


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
