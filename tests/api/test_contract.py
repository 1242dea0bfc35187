"""Answers of every wire by OpenAI's own types, strictly; no null but where its API writes one.

compat_tests/js/types.test.mjs holds them to the types for TypeScript, Anthropic's too.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import orjson
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter, ValidationError

from gateway.jobs import CallDelta, SequenceDelta
from tests.fakes import ScriptedChat, ScriptedEngines

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
# Fields that the vendors' APIs write though they are null, by endpoint.
NULLABLE = {
    "/chat/completions": {"content", "refusal", "logprobs", "finish_reason"},
    "/completions": {"logprobs", "finish_reason", "token_logprobs", "top_logprobs"},
    "/responses": {
        *("access_programs", "completed_at", "error", "incomplete_details", "instructions"),
        *("max_output_tokens", "max_tool_calls", "previous_response_id", "effort", "summary"),
        *("verbosity", "usage", "description"),
    },
    "/messages": {
        *("cache_creation", "container", "diagnostics", "inference_geo", "server_tool_use"),
        *("stop_details", "stop_reason", "stop_sequence"),
    },
}


class Caller(ScriptedChat):
    """Thinks in capitals, writes what is small, and calls the clock at `!`."""

    def _next(self, row: int) -> list[SequenceDelta]:
        return [_voiced(delta) for delta in super()._next(row)]


def _voiced(delta: SequenceDelta) -> SequenceDelta:
    if delta.text == "!":
        return replace(delta, text="", call=CallDelta(0, "call_1", "clock", "{}"))
    return replace(delta, text="", reasoning=delta.text) if delta.text.isupper() else delta


def nulls(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the fields that are null, at any depth."""
    if value is None:
        yield name
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from nulls(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from nulls(inner, name)


def check(path: str, kind: Any, raw: bytes) -> None:
    """Hold an answer to its type, if there is one, without any conversion."""
    if kind is not None:
        TypeAdapter(kind).validate_json(raw, strict=True)
    assert set(nulls(orjson.loads(raw))) <= NULLABLE.get(path, set())


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/chat/completions", CHAT, ChatCompletion),
        ("/chat/completions", {**CHAT, "tools": FUNCTIONS}, ChatCompletion),
        ("/chat/completions", {**CHAT, "functions": [CLOCK]}, ChatCompletion),
        ("/chat/completions", {**CHAT, "logprobs": True, "n": 2}, ChatCompletion),
        ("/completions", COMPLETION, Completion),
        ("/completions", {**COMPLETION, "logprobs": 1}, Completion),
        ("/responses", RESPONSE, Response),
        ("/responses", {**RESPONSE, "tools": FLAT, "max_output_tokens": 99}, Response),
        ("/responses", {**RESPONSE, "max_output_tokens": 1}, Response),
        ("/responses/input_tokens", RESPONSE, InputTokenCountResponse),
        ("/embeddings", {"model": "embed", "input": ["a", "b"]}, CreateEmbeddingResponse),
        ("/messages", MESSAGE, None),
        ("/messages", {**MESSAGE, "thinking": {"type": "adaptive"}, "tools": USED}, None),
        ("/messages/count_tokens", {"model": "writer", "messages": USER}, None),
    ],
)
async def test_a_whole_answer_is_of_its_type(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any, kind: Any
) -> None:
    """Text, reasoning, calls, logprobs."""
    engines.chat = Caller()
    answer = await client.post(f"/v1{path}", json=body)
    assert answer.status_code == 200, answer.text
    check(path, kind, answer.content)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/chat/completions", CHAT, ChatCompletionChunk),
        (
            "/chat/completions",
            {**CHAT, "tools": FUNCTIONS, "stream_options": {"include_usage": True}},
            ChatCompletionChunk,
        ),
        ("/chat/completions", {**CHAT, "logprobs": True, "n": 2}, ChatCompletionChunk),
        ("/completions", {**COMPLETION, "logprobs": 1}, None),  # its type has always ended
        ("/responses", RESPONSE, ResponseStreamEvent),
        ("/responses", {**RESPONSE, "tools": FLAT}, ResponseStreamEvent),
        ("/messages", MESSAGE, None),
        ("/messages", {**MESSAGE, "thinking": {"type": "adaptive"}, "tools": USED}, None),
    ],
)
async def test_every_event_is_of_its_type(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any, kind: Any
) -> None:
    """From the first to the one before `[DONE]`."""
    engines.chat = Caller()
    answer = await client.post(f"/v1{path}", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [line.encode() for line in lines if line != "[DONE]"]
    assert len(events) > 2
    for event in events:
        check(path, kind, event)


async def test_every_model_is_of_its_type(client: httpx2.AsyncClient) -> None:
    """Besides what this gateway tells of each."""
    for model in (await client.get("/v1/models")).json()["data"]:
        told = {name: value for name, value in model.items() if name in Model.model_fields}
        check("/models", Model, orjson.dumps(told))


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/chat/completions", {"param", "code"}),
        ("/responses", {"param", "code"}),
        ("/messages", {""}),
    ],
)
async def test_an_error_has_its_vendors_fields(
    client: httpx2.AsyncClient, path: str, allowed: set[str]
) -> None:
    """OpenAI's has nulls for what is unknown, Anthropic's none."""
    answer = await client.post(f"/v1{path}", content=b"[]")
    assert answer.status_code == 400
    assert set(nulls(answer.json())) <= allowed


def test_a_null_is_seen_where_none_may_be() -> None:
    """The check itself: by type, and by name."""
    with pytest.raises(ValidationError):
        check("/models", Model, b'{"id":null}')
    with pytest.raises(AssertionError):
        check("/messages", None, b'{"content":[{"type":"text","text":"a","citations":null}]}')
