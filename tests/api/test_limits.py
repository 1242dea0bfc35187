"""What a request may cost before it is looked at: each bound is a setting, each refusal ours."""

import asyncio
from typing import Any

import httpx2
import pytest

from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "writer", "messages": [USER]}
DEEP = '{"a":' * 260 + "{}" + "}" * 260


def error(answer: httpx2.Response) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/health", {"x-large": "x" * 2000}),
        ("/v1/models", {f"x-{i}": "x" * 100 for i in range(20)}),
        ("/v1/models?" + "x" * 2000, {}),
        ("/" + "x" * 2000, {}),
    ],
)
async def test_a_head_over_the_limit_is_a_431(
    models: Catalog,
    engines: ScriptedEngines,
    http2: bool,
    path: str,
    headers: dict[str, str],
) -> None:
    """In one header, in many, in the query or in the path; over both kinds of HTTP."""
    async with served(models, engines, max_header_bytes=1024) as first:
        async with httpx2.AsyncClient(
            base_url=first.base_url, http1=not http2, http2=http2
        ) as client:
            refused = await client.get(path, headers=headers)
            assert refused.status_code == 431
            assert error(refused)["code"] == "request_header_fields_too_large"
            assert refused.headers["x-request-id"]
            assert (await client.get("/health")).status_code == 200


async def test_a_head_without_end_is_not_read_to_its_end(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """The server itself refuses it, so that it costs no memory."""
    async with served(models, engines, max_header_bytes=1024) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-endless: ")
        async with asyncio.timeout(10):
            for _ in range(5):
                writer.write(b"x" * 1024)
                await writer.drain()
            assert b" 431 " in await reader.readline()
        writer.close()
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("setting", "most", "path", "least", "beyond"),
    [
        (
            "max_json_depth",
            8,
            "chat/completions",
            {**CHAT, "chat_template_kwargs": {"a": [[[[[[]]]]]]}},
            {**CHAT, "chat_template_kwargs": {"a": [[[[[[[]]]]]]]}},
        ),
        (
            "max_messages",
            2,
            "chat/completions",
            {**CHAT, "messages": [USER] * 2},
            {**CHAT, "messages": [USER] * 3},
        ),
        (
            "max_messages",
            2,
            "responses",
            {"model": "writer", "input": [USER] * 2},
            {"model": "writer", "input": [USER] * 3},
        ),
        (
            "max_schema_bytes",
            64,
            "chat/completions",
            {**CHAT, "guided_json": {"type": "object"}},
            {**CHAT, "guided_json": {"type": "object", "title": "x" * 64}},
        ),
        (
            "max_regex_chars",
            3,
            "completions",
            {"model": "writer", "prompt": "hi", "guided_regex": "abc"},
            {"model": "writer", "prompt": "hi", "guided_regex": "abcd"},
        ),
        (
            "max_input_chars",
            2,
            "embeddings",
            {"model": "embed", "input": "hi"},
            {"model": "embed", "input": "hi!"},
        ),
    ],
)
async def test_every_bound_is_a_setting(
    models: Catalog,
    engines: ScriptedEngines,
    setting: str,
    most: int,
    path: str,
    least: dict[str, Any],
    beyond: dict[str, Any],
) -> None:
    """At the bound it is served; beyond it, refused."""
    given: dict[str, Any] = {setting: most}
    async with served(models, engines, **given) as client:
        taken = await client.post(f"/v1/{path}", json=least)
        assert taken.status_code == 200, taken.text
        refused = await client.post(f"/v1/{path}", json=beyond)
        assert refused.status_code == 400
        error(refused)


@pytest.mark.parametrize(
    "given",
    [
        {"guided_json": DEEP},
        {"structured_outputs": {"json": DEEP}},
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}],
                },
            ]
        },
    ],
)
async def test_json_inside_a_string_may_not_be_deep_either(
    client: httpx2.AsyncClient, given: dict[str, Any]
) -> None:
    """It would be a way around the depth of the body, and a 500 where it is written again."""
    answer = await client.post("/v1/chat/completions", json={**CHAT, **given})
    assert answer.status_code == 400
    error(answer)


async def test_a_body_of_many_brackets_costs_no_more_than_reading_it(
    client: httpx2.AsyncClient,
) -> None:
    """Sixteen megabytes of nesting are refused, and the next request is served."""
    answer = await client.post("/v1/chat/completions", content=b"[" * (16 * 1024 * 1024))
    assert answer.status_code == 400
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
