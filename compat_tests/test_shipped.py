"""The shipped models, asked by the OpenAI SDK: SmolLM2 under names that clients have built in."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

pytestmark = pytest.mark.slow

# The shape of what Graphiti has entities extracted by: endless strings in an endless list.
ENTITIES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "extracted_entities": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "Name of the extracted entity"},
                    "entity_type_id": {"type": "integer"},
                },
                "required": ["name", "entity_type_id"],
            },
        }
    },
    "required": ["extracted_entities"],
}


@pytest.fixture
def client(shipped_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shipped_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_built_in_names_are_answered_by_a_real_model(client: openai.OpenAI) -> None:
    """Asked at once, they share its passes."""
    names = ["gpt-4o-mini", "gpt-4.1-mini", "gpt-6-luna"]
    question: Any = {"role": "user", "content": "What is the capital of France?"}
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [
            pool.submit(client.chat.completions.create, model=name, messages=[question])
            for name in names
        ]
    for name, answering in zip(names, asked, strict=True):
        answer = answering.result()
        assert answer.model == name
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        assert client.models.retrieve(name).root == "smollm2-135m"  # type: ignore[attr-defined]


def test_a_structured_answer_ends(client: openai.OpenAI) -> None:
    """Its schema bounds neither strings nor lists, and the request sets no limit of tokens."""
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Extract: Alice works at Acme in Paris."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "entities", "strict": True, "schema": ENTITIES},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    written = json.loads(answer.choices[0].message.content or "")
    jsonschema.validate(written, ENTITIES)
    assert len(written["extracted_entities"]) <= 8
    assert all(len(each["name"]) <= 80 for each in written["extracted_entities"])


def test_a_hub_model_without_a_network_is_a_503_at_once(shipped_url: str) -> None:
    """Naming the model and the cause; the SDK does not retry it."""
    with (
        openai.OpenAI(base_url=f"{shipped_url}/v1", api_key="unused", timeout=10) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.embeddings.create(model="qwen3-embedding-0.6b", input="hi")
    assert caught.value.status_code == 503
    assert caught.value.code == "model_unavailable"
    assert "qwen3-embedding-0.6b" in str(caught.value)
