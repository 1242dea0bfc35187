"""POST /v1/messages over a socket, with a scripted engine."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from httpx2 import AsyncClient, Response

from gateway.registry import Catalog
from tests.api.harness import ASK, messages, stream
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio

URL = "/v1/messages"
CLAUDE_CODE = Path(__file__).with_name("claude_code_first_request.json")


def ask(content: Any, **more: Any) -> dict[str, Any]:
    return {**ASK[URL](content), **more}


async def post(client: AsyncClient, content: Any, **more: Any) -> Response:
    return await client.post(URL, json=ask(content, **more))


async def events(client: AsyncClient, content: Any, **more: Any) -> list[Any]:
    return (await stream(client, URL, ask(content, **more))).events


def refusal(answer: Response, status: int, kind: str) -> dict[str, Any]:
    """Return the error of an answer in Anthropic's envelope."""
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


async def test_the_cache_and_a_stop_sequence_are_told(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """They are told from the first event on, as far as they are known."""
    engines.chat.script = [
        {"text": "a", "tokens": 1, "cached_tokens": 3, "kept_tokens": 1},
        {"text": "b", "tokens": 1, "finish_reason": "stop", "stop": "END"},
    ]
    usage = {"input_tokens": 1, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 1}
    message = (await post(client, "hello", stop_sequences=["END"])).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert usage.items() <= message["usage"].items()
    first, *_, last, _ = await events(client, "hello", stop_sequences=["END"])
    assert usage.items() <= first["message"]["usage"].items()
    assert first["message"]["usage"]["output_tokens"] == 1
    assert (last["usage"]["output_tokens"], last["delta"]["stop_sequence"]) == (2, "END")


async def test_claude_codes_first_request_is_served(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """Version 2.1.197 sends this request; its texts and most tools are left out."""
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


RESUMED: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
            {
                "type": "web_search_tool_result", "tool_use_id": "srvtoolu_1",
                "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
            },
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": '{"query": "re'},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result", "tool_use_id": "toolu_1",
                "content": [{"type": "tool_reference", "tool_name": "mcp__fs__read"}],
            },
            {"type": "tool_result", "tool_use_id": "toolu_0", "content": "of a call cut away"},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "compaction", "content": "So far.", "encrypted_content": None},
            {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
            {"type": "thinking", "thinking": "Nothing to say yet.", "signature": "s"},
        ],
    },
    {"role": "user", "content": "Go on"},
]  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_claude_codes_resumed_session_is_served(
    client: AsyncClient, engines: ScriptedEngines, is_streamed: bool
) -> None:
    """It has everything that Anthropic's own API and its clients leave in a history."""
    body = orjson.loads(CLAUDE_CODE.read_bytes()) | {"model": "writer", "stream": is_streamed}
    count = len(body["messages"])
    body["messages"] += RESUMED
    answer = await client.post(f"{URL}?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    assert ("event: message_stop" in answer.text) == is_streamed
    first = f"messages[{count}].content"
    assert answer.headers["x-gateway-ignored"].split(",") == [
        "context_management", f"{first}[1].server_tool_use",
        f"{first}[2].web_search_tool_result", f"{first}[4].input",
        f"messages[{count + 2}].content[1].fallback",
    ]  # fmt: skip
    told = engines.chat.jobs[-1].messages[count + 1 :]
    assert [(turn["role"], turn["content"]) for turn in told] == [
        ("assistant", "Let me see."), ("tool", "mcp__fs__read"), ("tool", "of a call cut away"),
        ("user", "So far."), ("assistant", ""), ("user", "Go on"),
    ]  # fmt: skip
    thoughts = [turn.get("reasoning_content") for turn in told if turn["role"] == "assistant"]
    assert thoughts == ["Look it up.", "Nothing to say yet."]
    assert told[0]["tool_calls"][0]["function"]["arguments"] == {"query": "re"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_base_url_alone_is_answered(models: Catalog, method: str) -> None:
    """Agents ask it without a key to find a server; the answer says nothing of the gateway."""
    async with served(models, ScriptedEngines(), api_keys="k") as client:
        answer = await client.request(method, "/")
        assert answer.status_code == 200
        assert (method == "HEAD") == (answer.content == b"")


async def test_tokens_are_counted_without_an_answer(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    for length in (5, 300):  # the context has room for 100
        body = {"model": "writer", "messages": messages("x" * length)}
        answer = await client.post(f"{URL}/count_tokens", json=body)
        assert answer.json() == {"input_tokens": length}
    assert not engines.chat.joined


async def test_every_refusal_is_in_the_envelope(client: AsyncClient) -> None:
    refusal(await post(client, "x", model="claude-x"), 404, "not_found_error")
    wrong = refusal(await post(client, "x", model="org/embed"), 400, "invalid_request_error")
    assert wrong["details"] == {"error_code": "unsupported_model"}
    refusal(await client.post("/messages", json=ask("refuse me")), 400, "invalid_request_error")
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
    async with served(models, engines, max_body_bytes=10_000) as client:
        refusal(await post(client, "x" * 10_000), 413, "request_too_large")
    blocks = [{"type": "text", "text": "x"}] * 4
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    async with served(models, engines, max_messages=3) as client:
        for body in (
            {"messages": messages("x") * 4},
            {"messages": messages(blocks)},
            {"messages": messages([result])},
            {"system": blocks},
        ):
            refusal(await post(client, "x", **body), 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"x-api-key": "k"}, True),
        ({"authorization": "Bearer k"}, True),
        ({"authorization": "Bearer of-another", "x-api-key": "k"}, True),
        ({"authorization": "Bearer k", "x-api-key": "of-another"}, True),
        ({}, False),
        ({"x-api-key": "wrong"}, False),
        ({"authorization": "Basic k"}, False),
    ],
)
async def test_a_key_is_taken_from_either_header(
    models: Catalog, headers: dict[str, str], is_let_in: bool
) -> None:
    """Agents that are logged in elsewhere send that token beside it."""
    async with served(models, ScriptedEngines(), api_keys="j,k") as client:
        answer = await client.post(URL, json=ask("x"), headers=headers)
        if is_let_in:
            assert answer.status_code == 200
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        else:
            refusal(answer, 401, "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"
