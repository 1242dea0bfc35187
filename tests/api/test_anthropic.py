"""POST /v1/messages over a socket, with a scripted engine."""

from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from gateway.registry import Catalog
from tests.api.harness import ManyVoices, stream
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio

URL = "/v1/messages"
CLAUDE_CODE = Path(__file__).with_name("claude_code_first_request.json")
TOOL = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
THINKING = {"thinking": {"type": "adaptive"}}
ENDS = ["content_block_stop", "message_delta", "message_stop"]


def ask(content: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "writer", "max_tokens": 90, "messages": messages, **more}


async def post(client: httpx2.AsyncClient, content: Any, **more: Any) -> httpx2.Response:
    return await client.post(URL, json=ask(content, **more))


async def events(client: httpx2.AsyncClient, content: Any, **more: Any) -> list[Any]:
    return (await stream(client, URL, ask(content, **more))).events


def kinds(told: list[Any]) -> list[str]:
    return [event["type"] for event in told]


def refusal(answer: httpx2.Response, status: int, kind: str) -> dict[str, Any]:
    """Return the error of an answer in Anthropic's envelope."""
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


async def test_a_whole_answer_has_anthropics_shape(client: httpx2.AsyncClient) -> None:
    """Every field that its SDKs declare."""
    answer = await post(client, "hello", system="Repeat.")
    message = answer.json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "writer",
        "content": [{"type": "text", "text": "hello"}],
        "container": None,
        "diagnostics": None,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation": None,
            "inference_geo": None,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            "service_tier": "standard",
            "speed": "standard",
        },
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "server-timing" in answer.headers


async def test_a_stream_tells_the_same_answer_event_by_event(client: httpx2.AsyncClient) -> None:
    """In Anthropic's order."""
    told = await events(client, "hey")
    assert kinds(told) == [
        "message_start", "content_block_start", *["content_block_delta"] * 3, *ENDS,
    ]  # fmt: skip
    assert "".join(e["delta"]["text"] for e in told if e["type"] == "content_block_delta") == "hey"
    assert told[0]["message"]["content"] == []
    assert told[0]["message"]["stop_reason"] is None
    assert told[-2]["delta"]["stop_reason"] == "end_turn"
    assert told[-2]["usage"] == (await post(client, "hey")).json()["usage"]


async def test_thinking_text_and_calls_are_blocks_in_that_order(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """Whole and streamed."""
    engines.chat = ManyVoices()
    whole = (await post(client, "HMok!", tools=[TOOL], **THINKING)).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["thinking"] == "HM"
    assert whole["content"][2]["id"] == "call_1"
    told = await events(client, "HMok!", tools=[TOOL], **THINKING)
    blocks = [e["content_block"]["type"] for e in told if e["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    indices = [e["index"] for e in told if "index" in e]
    assert indices == sorted(indices)
    assert [e["delta"]["type"] for e in told if e["type"] == "content_block_delta"] == [
        *["thinking_delta"] * 2, "signature_delta", *["text_delta"] * 2, "input_json_delta",
    ]  # fmt: skip


async def test_a_client_that_knows_no_thinking_gets_text_first(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """Though the model thought; a pause of thinking is no block either."""
    engines.chat = ManyVoices()
    assert (await post(client, "HMok")).json()["content"][0]["text"] == "ok"
    assert kinds(await events(client, "HMok"))[1] == "content_block_start"


async def test_the_cache_and_a_stop_sequence_are_told(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """From the first event on, as far as it is known."""
    engines.chat.script = [
        {"text": "a", "tokens": 1, "cached_tokens": 3, "kept_tokens": 1},
        {"text": "b", "tokens": 1, "finish_reason": "stop", "stop": "END"},
    ]
    usage = {"input_tokens": 1, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 1}
    message = (await post(client, "hello", stop_sequences=["END"])).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert usage.items() <= message["usage"].items()
    told = await events(client, "hello", stop_sequences=["END"])
    assert usage.items() <= told[0]["message"]["usage"].items()
    assert (told[0]["message"]["usage"]["output_tokens"], told[-2]["usage"]["output_tokens"]) == (
        1,
        2,
    )
    assert told[-2]["delta"]["stop_sequence"] == "END"


async def test_an_answer_is_cut_by_its_limit_or_by_the_context(client: httpx2.AsyncClient) -> None:
    """A limit above the context is no mistake: agents send one that suits the largest models."""
    cut = (await post(client, "hello", max_tokens=2)).json()
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "he")
    full = (await post(client, "x" * 60, max_tokens=64_000)).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert len(full["content"][0]["text"]) == 40


async def test_an_answer_goes_back_in_as_it_came(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """With the results of its calls."""
    engines.chat = ManyVoices()
    first = (await post(client, "HMok!", tools=[TOOL], **THINKING)).json()
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "noon"}
    messages = [
        {"role": "user", "content": "HMok!"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "writer", "max_tokens": 9, "messages": messages, "tools": [TOOL]}
    second = await client.post(URL, json=body)
    assert second.json()["content"][0]["text"] == "noon"
    assert "x-gateway-ignored" not in second.headers
    turns = engines.chat.jobs[-1].messages
    assert turns[1]["reasoning_content"] == "HM"
    assert turns[2]["name"] == "clock"


async def test_claude_codes_first_request_is_served(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """As version 2.1.197 sends it, its texts and most tools left out."""
    body = orjson.loads(CLAUDE_CODE.read_bytes()) | {"model": "writer"}
    headers = {"x-api-key": "unused", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    answer = await client.post(f"{URL}?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-gateway-ignored"] == "context_management"
    job = engines.chat.jobs[-1]
    assert [turn["role"] for turn in job.messages] == ["system", "user", "system"]
    assert "billing" not in job.messages[0]["content"]
    assert {tool["function"]["name"] for tool in job.tools} >= {"Bash", "Read"}
    assert dict(job.template_args) == {"enable_thinking": True, "reasoning_effort": "high"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_base_url_alone_is_answered(models: Catalog, method: str) -> None:
    """Without a key, as agents ask whether anything is there; nothing of the gateway is told."""
    async with served(models, ScriptedEngines(), api_keys="k") as client:
        answer = await client.request(method, "/")
        assert answer.status_code == 200
        assert (method == "HEAD") == (answer.content == b"")


async def test_tokens_are_counted_without_an_answer(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """Those of the same prompt, however long it is."""
    body = ask("hello")
    del body["max_tokens"]
    answer = await client.post(f"{URL}/count_tokens", json=body)
    assert answer.json() == {"input_tokens": 5}
    long = await client.post(f"{URL}/count_tokens", json={**body, **ask("x" * 300)})
    assert long.json() == {"input_tokens": 300}
    assert not engines.chat.joined


@pytest.mark.parametrize("path", [URL, "/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_before_the_first_token_is_a_status(
    client: httpx2.AsyncClient, path: str, stream: bool
) -> None:
    """In Anthropic's envelope, with the gateway's code."""
    refused = await client.post(path, json=ask("refuse me", stream=stream))
    assert refusal(refused, 400, "invalid_request_error")["message"] == "The template refuses."
    long = await client.post(path, json=ask("x" * 101, stream=stream))
    error = refusal(long, 400, "invalid_request_error")
    assert error["message"] == "prompt is too long: 101 tokens > 100 maximum"
    assert error["details"] == {"error_code": "context_length_exceeded"}
    image = await client.post(path, json=ask([{"type": "image", "source": {}}], stream=stream))
    assert "'image'" in refusal(image, 400, "invalid_request_error")["message"]


async def test_every_refusal_is_in_the_envelope(client: httpx2.AsyncClient) -> None:
    """Of models, methods, paths and bodies too; that of other paths stays OpenAI's."""
    refusal(await post(client, "x", model="claude-x"), 404, "not_found_error")
    wrong = refusal(await post(client, "x", model="org/embed"), 400, "invalid_request_error")
    assert wrong["details"] == {"error_code": "unsupported_model"}
    refusal(await client.get(URL), 405, "invalid_request_error")
    refusal(await client.get(f"{URL}/batches"), 404, "not_found_error")
    refusal(await client.post(URL, content=b"{"), 400, "invalid_request_error")
    deep = b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}"
    refusal(await client.post(URL, content=deep), 400, "invalid_request_error")
    other = await client.get("/v1/messages-of-another-kind")
    assert "type" not in other.json()
    assert "request-id" not in other.headers


async def test_too_large_a_body_and_too_many_messages_are_refused(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Before anything is made of them."""
    async with served(models, engines, max_body_bytes=10_000) as client:
        refusal(await post(client, "x" * 10_000), 413, "request_too_large")
    async with served(models, engines, max_messages=3) as client:
        body = ask("x") | {"messages": [{"role": "user", "content": "x"}] * 4}
        refusal(await client.post(URL, json=body), 400, "invalid_request_error")
        blocks = [{"type": "text", "text": "x"}] * 4
        refusal(await post(client, blocks), 400, "invalid_request_error")
        result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
        refusal(await post(client, [result]), 400, "invalid_request_error")
        refusal(await post(client, "x", system=blocks), 400, "invalid_request_error")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "k"},
        {"authorization": "Bearer k"},
        {"authorization": "Bearer of-another", "x-api-key": "k"},
        {"authorization": "Bearer k", "x-api-key": "of-another"},
    ],
)
async def test_a_key_is_taken_from_either_header(models: Catalog, headers: dict[str, str]) -> None:
    """Agents that are logged in elsewhere send that token beside it."""
    async with served(models, ScriptedEngines(), api_keys="j,k") as client:
        assert (await client.post(URL, json=ask("x"), headers=headers)).status_code == 200
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "wrong"}, {"authorization": "Basic k"}])
async def test_a_wrong_key_is_refused(models: Catalog, headers: dict[str, str]) -> None:
    """As authentication, with a 401."""
    async with served(models, ScriptedEngines(), api_keys="j,k") as client:
        answer = await client.post(URL, json=ask("x"), headers=headers)
        refusal(answer, 401, "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_used_up_allowance_is_the_callers_own(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """A 429 that says when to come again, unlike a full queue's 529; SDKs retry both."""
    async with served(models, engines, requests_per_minute=1) as client:
        assert (await post(client, "x")).status_code == 200
        spent = await post(client, "x")
        refusal(spent, 429, "rate_limit_error")
        assert int(spent.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_what_no_grammar_holds_is_checked_and_said(
    client: httpx2.AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    """As on the chat endpoint, in headers; but a stream that violates its form ends in an error."""
    engines.chat.verdicts = [False, True]
    form = {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}
    if stream:
        told = await events(client, "hi", output_config=form)
        assert told[-1]["error"]["details"] == {"error_code": "schema_violated"}
    else:
        answer = await post(client, "hi", output_config=form)
        assert answer.headers["x-gateway-unenforced"] == "%23%2FuniqueItems,%23%2Fa~1%C3%BC"
        assert answer.headers["x-gateway-schema-valid"] == "true"  # of the second try
        assert answer.json()["gateway"]["schema_valid"] is True
        assert answer.json()["stop_reason"] == "end_turn"


async def test_ignored_fields_are_refused_in_strict_mode(models: Catalog) -> None:
    """By the first of their names."""
    async with served(models, ScriptedEngines(), strict_fields=True) as client:
        error = refusal(await post(client, "x", container="c"), 400, "invalid_request_error")
        assert "container" in error["message"]
        hints = {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}
        assert (await post(client, "x", **hints)).status_code == 200
