"""Bounds on a request before it is looked at: each is a setting, each refusal ours."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.api.bodies import SMALL_BYTES, UNCOUNTED_BYTES, Bodies, Body
from gateway.errors import Unavailable
from gateway.registry import Catalog
from tests.api.harness import error_of, reached
from tests.fakes import ScriptedEngines
from tests.serving_app import level, served, settings
from tests.waiting import until

StreamPair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# The metric is of the last gateway: each test has its own.
pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("engines")]
USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "writer", "messages": [USER]}
LONG = "x" * 64
DEEP = '{"a":' * 260 + "{}" + "}" * 260


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
    models: Catalog, engines: ScriptedEngines, path: str, headers: dict[str, str]
) -> None:
    async with served(models, engines, max_header_bytes=1024) as client:
        refused = await client.get(path, headers=headers)
        assert error_of(refused, 431)["code"] == "request_header_fields_too_large"
        assert refused.headers["x-request-id"]
        assert (await client.get("/health")).status_code == 200


async def test_a_head_without_end_is_not_read_to_its_end(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """The server itself refuses it, so that it costs no memory."""
    async with served(models, engines, max_header_bytes=1024) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-endless: ")
        async with asyncio.timeout(60):
            for _ in range(5):
                writer.write(b"x" * 1024)
                await writer.drain()
            assert b" 431 " in await reader.readline()
        writer.close()
        assert (await client.get("/health")).status_code == 200


BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": {"model": "writer", "prompt": "hi"},
    "responses": {"model": "writer", "input": "hi"},
    "embeddings": {"model": "embed", "input": "hi"},
}


def nested(depth: int) -> dict[str, Any]:
    """Return lists in lists, as an argument of a template."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return {"a": value}


@pytest.mark.parametrize(
    ("setting", "most", "path", "field", "least", "beyond"),
    [
        ("max_json_depth", 8, "chat/completions", "chat_template_kwargs", nested(5), nested(6)),
        ("max_messages", 2, "chat/completions", "messages", [USER] * 2, [USER] * 3),
        ("max_messages", 2, "responses", "input", [USER] * 2, [USER] * 3),
        ("max_schema_bytes", 64, "chat/completions", "guided_json", {"title": ""}, {"title": LONG}),
        ("max_regex_chars", 3, "completions", "guided_regex", "abc", "abcd"),
        ("max_input_chars", 2, "embeddings", "input", "hi", "hi!"),
        ("max_request_chars", 4, "embeddings", "input", ["hi", "hi"], ["hi", "hi", "!"]),
        ("max_request_chars", 4, "completions", "prompt", ["hi", "hi"], ["hi", "hi", "!"]),
    ],
)
async def test_every_bound_is_a_setting(
    models: Catalog,
    engines: ScriptedEngines,
    setting: str,
    most: int,
    path: str,
    field: str,
    least: Any,
    beyond: Any,
) -> None:
    given: dict[str, Any] = {setting: most}
    async with served(models, engines, **given) as client:
        taken = await client.post(f"/v1/{path}", json={**BODIES[path], field: least})
        assert taken.status_code == 200, taken.text
        refused = await client.post(f"/v1/{path}", json={**BODIES[path], field: beyond})
        error_of(refused)


@pytest.mark.parametrize(
    "given",
    [
        {"guided_json": DEEP},
        {"structured_outputs": {"json": DEEP}},
    ],
)
async def test_json_inside_a_string_may_not_be_deep_either(
    client: AsyncClient, given: dict[str, Any]
) -> None:
    """It would be a way around the depth of the body, and a 500 where it is written again."""
    answer = await client.post("/v1/chat/completions", json={**CHAT, **given})
    error_of(answer)


async def test_deep_arguments_of_an_earlier_call_are_a_text(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """A model that writes brackets until `max_tokens` ends no conversation."""
    call = {"function": {"name": "f", "arguments": DEEP}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    answer = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert answer.status_code == 200, answer.text
    place = "messages[1].tool_calls[0].function.arguments"
    assert answer.headers["x-gateway-ignored"] == place
    shown = engines.chat.jobs[-1].messages[1]["tool_calls"][0]["function"]
    assert shown["arguments"] == {"input": DEEP}


@contextlib.asynccontextmanager
async def unfinished(client: AsyncClient, nbytes: int, more: int = 1) -> AsyncIterator[StreamPair]:
    """Send `nbytes` bytes of a body that is `more` bytes longer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost"
    writer.write(f"{head}\r\ncontent-length: {nbytes + more}\r\n\r\n".encode() + b"x" * nbytes)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def until_held(nbytes: int) -> None:
    await until(lambda: level("gateway_body_bytes") == nbytes)


LARGE = 100_000
COUNTED = LARGE - UNCOUNTED_BYTES


async def test_bodies_that_are_too_large_together_find_no_room(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Their clients are told when to come again, whole bodies or not.

    Small bodies are let in, and so is one that is larger than the room but alone.
    """
    async with served(models, engines, max_bodies_bytes=2 * COUNTED) as client:
        large = {**CHAT, "ignored": "x" * 2 * LARGE}
        assert (await client.post("/v1/chat/completions", json=large)).status_code == 200
        async with unfinished(client, LARGE), unfinished(client, LARGE) as (_, last):
            await until_held(2 * COUNTED)
            answer = await client.post("/v1/chat/completions", json=large)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "service_unavailable"
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            last.close()
            await until_held(COUNTED)
        await until_held(0)
        assert (await client.post("/v1/chat/completions", json=large)).status_code == 200


async def test_what_is_refused_for_its_size_is_not_held(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, max_body_bytes=LARGE) as client:
        async with unfinished(client, LARGE - 1, more=LARGE) as (reader, writer):
            await until_held(COUNTED - 1)
            writer.write(b"x" * (LARGE - 1))
            await until_held(0)
            writer.write(b"x")
            assert b" 413 " in await reader.readline()


async def test_a_body_is_held_until_its_answer_ends(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines) as client:
        body = {"model": "embed", "input": ["x" * 50] * 2000}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        engines.embedder.gate.close()
        asking = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await reached(engines.embedder.gate)
        assert level("gateway_body_bytes") > 0
        engines.embedder.gate.open()
        assert (await asking).status_code == 200
        await until_held(0)


def test_a_large_answer_is_counted_before_it_is_written_or_finds_no_room() -> None:
    """A small one always has room, and an answer that is sent gives its bytes back."""
    bodies = Bodies(3 * SMALL_BYTES)
    first, second, small = Body(bodies), Body(bodies), Body(bodies)
    first.count_answer(2 * SMALL_BYTES)
    with pytest.raises(Unavailable):
        second.count_answer(2 * SMALL_BYTES)
    small.count_answer(SMALL_BYTES)
    first.count(0)
    second.count_answer(2 * SMALL_BYTES)
    assert bodies.nbytes == 3 * SMALL_BYTES - 2 * UNCOUNTED_BYTES


def test_the_ninth_of_the_largest_bodies_finds_no_room() -> None:
    """As delivered: 32 MiB each, and 256 MiB for all, without the first 64 KiB of each."""
    delivered = settings()
    bodies = Bodies(delivered.max_bodies_bytes)
    for _ in range(8):
        Body(bodies).count(delivered.max_body_bytes)
    ninth = Body(bodies)
    ninth.count(9 * UNCOUNTED_BYTES)
    with pytest.raises(Unavailable):
        ninth.count(9 * UNCOUNTED_BYTES + 1)
    assert delivered.max_body_bytes == 32 * 1024**2
