"""Answers of every wire by OpenAI's and Anthropic's own types, strictly; no null but where these
vendors' APIs write one.

compat_tests/js/types.test.mjs holds them to the types for TypeScript.
"""

import functools
import importlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
from httpx2 import AsyncClient
from openai.types import Completion, CompletionChoice, CreateEmbeddingResponse, Decision, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

from gateway.registry import Catalog
from tests.api.conftest import some_models
from tests.api.harness import ManyVoices
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "HM ok!"}]
CHAT = {"model": "writer", "messages": USER}
RESPONSE = {"model": "writer", "input": "HM ok!"}
COMPLETION = {"model": "writer", "prompt": "hi"}
MESSAGE = {"model": "writer", "max_tokens": 9, "messages": USER}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
FUNCTIONS = [{"type": "function", "function": CLOCK}]
FLAT = [{"type": "function", "strict": False, **CLOCK}]
USED = [{"name": "clock", "input_schema": CLOCK["parameters"]}]
UNIQUE = {"type": "array", "uniqueItems": True}  # no grammar enforces this, so there is a verdict
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": UNIQUE}}
TEXT = {"format": {"type": "json_schema", "name": "a", "schema": UNIQUE}}
OUTPUT = {"format": {"type": "json_schema", "schema": UNIQUE}}
THOUGHT = {"thinking": {"type": "adaptive"}}
PREDICATE = {"type": "predicate", "instructions": "It rains."}
DECISION = {"model": "writer", "input": "The sky is grey.", "questions": [PREDICATE]}
ANTHROPICS = {"anthropic-version": "2023-06-01"}


class _ChunkChoice(CompletionChoice):
    """A completion's, which in a stream may not have ended: OpenAI's type of one always has."""

    finish_reason: Any = None


class CompletionChunk(Completion):
    """An event of a completion."""

    choices: list[_ChunkChoice]  # type: ignore[assignment]


class ErrorEvent(BaseModel):
    """OpenAI's envelope, which its SDK has no type of."""

    error: ErrorObject


# The places where the vendors' APIs write a null, by endpoint; lists have no step of their own. A
# verdict is this gateway's own, and null where nobody can tell.
_ANSWERED = {"choices.logprobs", "choices.finish_reason", "gateway.schema_valid"}
_RESPONDED = {
    *("access_programs", "completed_at", "error", "incomplete_details", "instructions"),
    *("max_output_tokens", "max_tool_calls", "previous_response_id", "usage"),
    *("reasoning.effort", "reasoning.summary", "text.verbosity", "tools.description"),
    *("text.format.description", "gateway.schema_valid"),
}
_MESSAGED = {
    *("container", "diagnostics", "stop_details", "stop_reason", "stop_sequence"),
    *("usage.cache_creation", "usage.inference_geo", "usage.server_tool_use"),
    "gateway.schema_valid",
}
NULLABLE: dict[str, set[str]] = {
    "/chat/completions": {
        *_ANSWERED,
        *("choices.message.content", "choices.message.refusal", "choices.logprobs.refusal"),
    },
    "/completions": _ANSWERED,
    "/responses": {*_RESPONDED, *(f"response.{name}" for name in _RESPONDED), "param"},
    "/messages": {
        *_MESSAGED,
        *(f"message.{name}" for name in _MESSAGED),
        *("delta.container", "delta.stop_details", "delta.stop_sequence"),
    },
    "/decisions": {"answers.name"},
    "/models": {
        *("capabilities", "deprecated_at", "line", "max_input_tokens", "max_tokens", "retires_at")
    },
}


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """Give a client of the gateway that most cases share, which answers in every way there is."""
    engines = ScriptedEngines(chat=ManyVoices(max_context=1000))
    async with served(some_models(tmp_path_factory.mktemp("models")), engines) as client:
        yield client


@functools.cache  # one for a union of events takes a second to build
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the adapter of a type, or of a name among Anthropic's, whose import takes seconds."""
    if isinstance(kind, str):
        kind = getattr(importlib.import_module("anthropic.types"), kind)
    return TypeAdapter(kind)


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields that are null, at any depth."""
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from nulls(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from nulls(inner, path)


def check(path: str, kind: Any, raw: bytes) -> None:
    """Hold an answer to its type without any conversion, and to the fields that may be null."""
    adapter(kind).validate_json(raw, strict=True)
    assert set(nulls(orjson.loads(raw))) <= NULLABLE.get(path, set())


def events_of(text: str) -> list[bytes]:
    """Give the data of a stream's events, without the mark of its end and Anthropic's pings."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    told = [line for line in lines if line != "[DONE]"]
    return [line.encode() for line in told if orjson.loads(line).get("type") != "ping"]


WAYS = [
    ("/chat/completions", CHAT),
    ("/chat/completions", {**CHAT, "tools": FUNCTIONS}),
    ("/chat/completions", {**CHAT, "functions": [CLOCK]}),
    ("/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/chat/completions", {**CHAT, "max_tokens": 1}),
    ("/chat/completions", {**CHAT, "response_format": FORM}),
    ("/completions", COMPLETION),
    ("/completions", {**COMPLETION, "logprobs": 1}),
    ("/responses", RESPONSE),
    ("/responses", {**RESPONSE, "tools": FLAT, "max_output_tokens": 99}),
    ("/responses", {**RESPONSE, "max_output_tokens": 1}),
    ("/responses", {**RESPONSE, "text": TEXT, "instructions": "Be brief."}),
    ("/responses", {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    ("/messages", MESSAGE),
    ("/messages", {**MESSAGE, **THOUGHT, "tools": USED}),
    ("/messages", {**MESSAGE, "stop_sequences": ["k"]}),
    ("/messages", {**MESSAGE, "max_tokens": 1}),
    ("/messages", {**MESSAGE, "output_config": OUTPUT}),
]
WHOLE: dict[str, Any] = {
    "/chat/completions": ChatCompletion,
    "/completions": Completion,
    "/responses": Response,
    "/messages": "Message",
}
EVENTS: dict[str, Any] = {
    "/chat/completions": ChatCompletionChunk,
    "/completions": CompletionChunk,
    "/responses": ResponseStreamEvent,
    "/messages": "RawMessageStreamEvent",
}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        *((path, body, WHOLE[path]) for path, body in WAYS),
        ("/responses/input_tokens", RESPONSE, InputTokenCountResponse),
        ("/embeddings", {"model": "embed", "input": ["a", "b"]}, CreateEmbeddingResponse),
        ("/decisions", DECISION, Decision),
        ("/messages/count_tokens", {"model": "writer", "messages": USER}, "MessageTokensCount"),
    ],
)
async def test_a_whole_answer_is_of_its_type(
    client: AsyncClient, path: str, body: Any, kind: Any
) -> None:
    """Text, reasoning, calls, logprobs, verdicts, answers that were cut."""
    answer = await client.post(f"/v1{path}", json=body)
    assert answer.status_code == 200, answer.text
    check(path, kind, answer.content)


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_every_event_is_of_its_type(client: AsyncClient, path: str, body: Any) -> None:
    usage = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    answer = await client.post(f"/v1{path}", json={**body, **usage, "stream": True})
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    assert len(events) > 2
    for event in events:
        check(path, EVENTS[path], event)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/chat/completions", CHAT, ErrorEvent),
        ("/completions", {**COMPLETION, "prompt": "hm ok"}, ErrorEvent),
        ("/responses", RESPONSE, ResponseStreamEvent),
        ("/messages", MESSAGE, "ErrorResponse"),
    ],
)
async def test_a_stream_that_fails_is_of_its_types_to_the_end(
    models: Catalog, path: str, body: Any, kind: Any
) -> None:
    engines = ScriptedEngines(chat=ManyVoices(max_context=1000, fail_at_step=4))
    async with served(models, engines) as client:
        answer = await client.post(f"/v1{path}", json={**body, "stream": True})
    assert answer.status_code == 200
    *before, last = events_of(answer.text)
    for event in before:
        check(path, EVENTS[path], event)
    adapter(kind).validate_json(last, strict=True)
    assert b"engine_failed" in b"".join(events_of(answer.text)[-2:])


async def test_a_kept_response_and_its_items_are_of_their_types(client: AsyncClient) -> None:
    body = {**RESPONSE, "store": True, "tools": FLAT}
    kept = (await client.post("/v1/responses", json=body)).json()["id"]
    check("/responses", Response, (await client.get(f"/v1/responses/{kept}")).content)
    items = await client.get(f"/v1/responses/{kept}/input_items")
    check("/responses", ResponseItemList, items.content)


async def test_every_model_is_of_its_type(client: AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()["data"]
    assert models
    for model in models:
        told = {name: value for name, value in model.items() if name in Model.model_fields}
        check("/models", Model, orjson.dumps(told))
    page = (await client.get("/v1/models", headers=ANTHROPICS)).json()
    assert page["data"]
    one = await client.get(f"/v1/models/{page['first_id']}", headers=ANTHROPICS)
    for model in (*page["data"], one.json()):
        check("/models", "ModelInfo", orjson.dumps(model))


@pytest.mark.parametrize("path", [*WHOLE, "/embeddings", "/messages/count_tokens"])
@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"model":"nobody","messages":1,"max_tokens":1}'])
async def test_an_error_is_of_its_vendors_type(client: AsyncClient, path: str, body: bytes) -> None:
    """OpenAI's has nulls for unknown fields, Anthropic's none."""
    is_anthropics = path.startswith("/messages")
    answer = await client.post(f"/v1{path}", content=body)
    assert answer.status_code in (400, 404)
    kind: Any = "ErrorResponse" if is_anthropics else ErrorEvent
    adapter(kind).validate_json(answer.content, strict=True)
    assert set(nulls(answer.json())) <= (set() if is_anthropics else {"error.param", "error.code"})
