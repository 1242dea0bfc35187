"""What somebody would send to break a gateway: each is a 400, and the next request is served."""

import asyncio
import json
from typing import Any

import httpx2
import orjson
import pytest

from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "writer", "messages": USER}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {**CHAT, "logit_bias": {"1" * 5000: 1}}),
        ("chat/completions", {**CHAT, "guided_regex": ""}),
        ("chat/completions", {**CHAT, "guided_choice": []}),
        ("chat/completions", {**CHAT, "guided_grammar": ""}),
        ("chat/completions", {**CHAT, "chat_template_kwargs": nested(300)}),
        ("chat/completions", {**CHAT, "tools": [function(nested(900))]}),
        ("chat/completions", {**CHAT, "structured_outputs": {}}),
        ("chat/completions", {**CHAT, "structured_outputs": {"structural_tag": "{}"}}),
        ("chat/completions", {**CHAT, "structured_outputs": {"json": None, "regex": None}}),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object", "schema": {}}}),
        (
            "chat/completions",
            {
                **CHAT,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schem": {"type": "object"}},
                },
            },
        ),
        ("chat/completions", {**CHAT, "function_call": {"name": "zz"}}),
        (
            "chat/completions",
            {**CHAT, "functions": [{"name": "f"}], "tools": [function({"type": "object"})]},
        ),
        ("chat/completions", {**CHAT, "functions": [{"name": "f"}], "tool_choice": "required"}),
        ("chat/completions", {**CHAT, "messages": USER * 5000}),
        ("chat/completions", {**CHAT, "tools": [function({"description": "x" * 1_100_000})]}),
        ("responses", {"model": "writer", "input": "hi", "metadata": nested(300)}),
        ("completions", {"model": "writer", "prompt": "hi", "guided_choice": []}),
    ],
)
async def test_it_is_a_400_and_the_next_request_is_served(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Never a 500, never a hang, never free text where a form was asked for."""
    answer = await client.post(f"/v1/{path}", content=json.dumps(body).encode())
    assert answer.status_code == 400, answer.text[:200]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("name", ["€", "a\r\nx-evil: 1", "b" * 100_000, "c,d", " "])
@pytest.mark.parametrize("stream", [False, True])
async def test_names_that_no_header_can_hold_are_written_so_that_it_can(
    client: httpx2.AsyncClient, name: str, stream: bool
) -> None:
    """And cut, and never make a header of their own."""
    answer = await client.post("/v1/chat/completions", json={**CHAT, name: 1, "stream": stream})
    assert answer.status_code == 200
    assert len(answer.headers["x-gateway-ignored"]) < 500
    assert "x-evil" not in answer.headers


async def test_nulls_are_as_good_as_absent_at_any_depth(client: httpx2.AsyncClient) -> None:
    """SDKs in other languages write every field they know."""
    call = {"id": "c", "type": None, "function": {"name": "f", "arguments": None}}
    body = {
        **CHAT,
        "messages": [
            {"role": "user", "content": "hi", "name": None, "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "stream_options": {"include_usage": None},
        "tools": [{"type": None, "function": {"name": "f", "strict": None, "description": None}}],
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_client_that_does_not_read_holds_no_place(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Its answer waits in memory; the row, the lease and the queue's place are free."""
    async with served(models, engines, queue_limit=1) as client:
        body = orjson.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 90}]})
        streamed = orjson.dumps({**orjson.loads(body), "stream": True, "n": 64})
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(streamed)}\r\n\r\n"  # noqa: E501
        writer.write(head.encode() + streamed)
        await writer.drain()
        await reader.readline()  # it began; no more is read
        async with asyncio.timeout(10):
            while (await client.post("/v1/chat/completions", json=CHAT)).status_code != 200:
                await asyncio.sleep(0.05)
        writer.close()
