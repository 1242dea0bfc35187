"""The OpenAI SDK, unchanged, sync and async, against demo-chat and MiniLM."""

import asyncio
import base64
import json
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "Hello!"}]
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_embeddings_are_real_vectors(client: OpenAI) -> None:
    """They have length 1, and are near texts of the same meaning.

    The SDK itself asks for base64.
    """
    answer = client.embeddings.create(
        model="text-embedding-3-small",
        input=["A dog plays in the park.", "A puppy runs on the grass.", "Interest rates rose."],
    )
    dog, puppy, rates = (np.array(item.embedding) for item in answer.data)
    assert dog.shape == (384,)
    assert np.linalg.norm(dog) == pytest.approx(1, abs=1e-5)
    assert dog @ puppy > 0.4 > 0.2 > dog @ rates
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 24
    assert answer.model == "text-embedding-3-small"


def test_float_and_base64_vectors_are_the_same(client: OpenAI) -> None:
    vectors: list[Any] = [
        client.embeddings.create(
            model="all-minilm-l6-v2", input="same", encoding_format=encoding
        ).data[0].embedding
        for encoding in ("float", "base64")
    ]  # fmt: skip
    as_float, as_base64 = vectors
    if isinstance(as_base64, str):  # asked for by name, the SDK leaves it as it came
        as_base64 = np.frombuffer(base64.b64decode(as_base64), dtype="<f4").tolist()
    assert np.array_equal(np.float32(as_float), np.float32(as_base64))


def test_a_chat_answer_is_real(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=FRANCE)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_a_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="demo-chat", messages=FRANCE)
    chunks = list(
        client.chat.completions.create(
            model="demo-chat", messages=FRANCE, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert chunks[-1].usage == whole.usage


def test_the_stream_helper_gathers_the_same_answer(client: OpenAI) -> None:
    """It is strict about roles, indices and the order of chunks."""
    with client.chat.completions.stream(model="demo-chat", messages=FRANCE, n=2) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert len(final.choices) == 2
    assert all("Paris" in (choice.message.content or "") for choice in final.choices)


async def test_the_async_client_streams_many_answers_at_once(url: str) -> None:
    """They share decode steps; each client gets its own answer."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:

        async def ask(country: str) -> str:
            text = ""
            async for chunk in await client.chat.completions.create(
                model="gpt-4.1-mini",
                messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
                stream=True,
            ):
                text += chunk.choices[0].delta.content or ""
            return text

        capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
        answers = await asyncio.gather(*(ask(country) for country in list(capitals) * 4))
    for answer, capital in zip(answers, list(capitals.values()) * 4, strict=True):
        assert capital in answer


async def test_twenty_single_embeddings_at_once_equal_one_call_of_twenty(url: str) -> None:
    """Graphiti sends single texts at once, everybody else a list."""
    texts = [f"Fact number {n}: {'very ' * n}true." for n in range(20)]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:

        async def embed(given: str | list[str]) -> list[list[float]]:
            answer = await client.embeddings.create(model="all-minilm-l6-v2", input=given)
            return [item.embedding for item in answer.data]

        singles = await asyncio.gather(*(embed(text) for text in texts))
        together = await embed(texts)
    assert np.allclose([vector for (vector,) in singles], together, atol=1e-5)


def test_seeded_answers_repeat_and_sampling_fields_are_taken(client: OpenAI) -> None:
    answers = [
        client.chat.completions.create(
            model="demo-chat",
            messages=HELLO,
            temperature=1.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            max_completion_tokens=12,
            stop=["\n"],
            seed=11,
            user="me",
        )
        for _ in range(2)
    ]
    first, second = answers
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.system_fingerprint == second.system_fingerprint


def test_models_are_listed_and_found(client: OpenAI) -> None:
    names = {model.id for model in client.models.list()}
    assert {"all-minilm-l6-v2", "demo-chat", "gpt-4o-mini", "text-embedding-3-small"} <= names
    assert client.models.retrieve("demo-chat").id == "demo-chat"


@pytest.mark.parametrize(
    ("status", "code", "model", "message"),
    [
        (openai.NotFoundError, "model_not_found", "no-such-model", "hi"),
        (openai.BadRequestError, "unsupported_model", "all-minilm-l6-v2", "hi"),
        (openai.BadRequestError, "context_length_exceeded", "demo-chat", "word " * 20_000),
    ],
)
def test_errors_arrive_with_their_class_and_code(
    client: OpenAI, status: type[openai.APIStatusError], code: str, model: str, message: str
) -> None:
    """A program can then branch on them."""
    with pytest.raises(status) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": message}])
    assert caught.value.code == code
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


class Person(BaseModel):
    """A class that the SDK turns into a strict schema."""

    name: str
    age: int
    city: str


def test_parse_gives_the_callers_own_type(client: OpenAI) -> None:
    """The answer fits the type, even from a model of a million parameters."""
    answer = client.chat.completions.parse(
        model="gpt-4o-mini",
        messages=[{"role": "user", "content": "Anna is 34 years old and lives in Rome."}],
        response_format=Person,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OSLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


def test_the_tools_loop_goes_round(client: OpenAI) -> None:
    """The model calls, the tool answers, the model gives the tool's result."""
    messages = list(OSLO)
    asked = client.chat.completions.create(
        model="demo-chat", messages=messages, tools=[WEATHER]
    ).choices[0]
    assert asked.finish_reason == "tool_calls"
    assert asked.message.tool_calls is not None
    (call,) = asked.message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees and rainy"}
    messages += [asked.message.model_dump(exclude_none=True), result]
    told = client.chat.completions.create(model="demo-chat", messages=messages, tools=[WEATHER])
    assert "7" in (told.choices[0].message.content or "")
    assert told.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_streams_and_parses(client: OpenAI, choice: Any) -> None:
    """The question itself gives no cause for a call."""
    with client.chat.completions.stream(
        model="demo-chat", messages=HELLO, tools=[WEATHER], tool_choice=choice
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


async def test_eighty_reranker_calls_at_once_all_score(url: str) -> None:
    """One token each, logprobs sorted, biased ids that mean nothing here ignored."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:

        async def score(passage: str) -> float:
            answer = await client.chat.completions.create(
                model="gpt-4.1-mini",
                messages=[
                    {"role": "system", "content": "Say True or False."},
                    {"role": "user", "content": passage},
                ],
                temperature=0,
                max_tokens=1,
                logit_bias={"6432": 1, "7983": 1},
                logprobs=True,
                top_logprobs=2,
            )
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.content
            top = logprobs.content[0].top_logprobs
            assert top[0].logprob >= top[1].logprob
            return float(np.exp(top[0].logprob))

        scores = await asyncio.gather(*(score(f"Passage number {n}.") for n in range(80)))
    assert all(0 < each <= 1 for each in scores)
