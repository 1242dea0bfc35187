"""Requests meant to break a gateway: each is a 400, and the next request is served."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest
import structlog
from httpx2 import AsyncClient

from gateway.registry import Catalog, ModelSpec, Resolved
from tests.api.harness import ASK, chat, error_of, messages, until_told
from tests.fakes import ScriptedEngines
from tests.serving_app import served
from tests.waiting import until

pytestmark = pytest.mark.anyio
USER = messages()
CHAT = chat()
PATHS: dict[str, dict[str, Any]] = {
    "chat/completions": chat(),
    "completions": {"model": "writer", "prompt": "hi"},
    "responses": {"model": "writer", "input": "hi"},
    "embeddings": {"model": "embed", "input": "hi"},
}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


SCHEM = {"name": "x", "schem": {"type": "object"}}  # a slip of the pen
FUNCTIONS = [{"name": "f"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"logit_bias": {"1" * 5000: 1}}),
        ("chat/completions", {"chat_template_kwargs": nested(300)}),
        ("chat/completions", {"tools": [function(nested(900))]}),
        ("chat/completions", {"structured_outputs": {"structural_tag": "{}"}}),
        ("chat/completions", {"structured_outputs": {"json": None, "regex": None}}),
        ("chat/completions", {"response_format": {"type": "json_object", "schema": {}}}),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": SCHEM}}),
        ("chat/completions", {"function_call": {"name": "zz"}}),
        ("chat/completions", {"functions": FUNCTIONS, "tools": [function({"type": "object"})]}),
        ("chat/completions", {"functions": FUNCTIONS, "tool_choice": "required"}),
        ("chat/completions", {"messages": USER * 5000}),
        ("chat/completions", {"tools": [function({"description": "x" * 1_100_000})]}),
        ("responses", {"metadata": nested(300)}),
        ("completions", {"guided_choice": []}),
    ],
)
async def test_a_hostile_body_is_a_400_and_the_next_request_is_served(
    client: AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    """The answer is never a 500, a hang, or free text where a form was asked for."""
    answer = await client.post(
        f"/v1/{path}", content=json.dumps({**PATHS[path], **fields}).encode()
    )
    error_of(answer)
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


LONG = "xyzw" * 65  # 260 characters


def called(**given: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **given}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def part(**content: Any) -> dict[str, Any]:
    return {"messages": [{**USER[0], **content}]}


CHOSEN = {"type": "function", "function": {"name": LONG}}
NAMED = {"type": "json_schema", "json_schema": {"name": LONG}}
NAMED_CALL = "messages[0].tool_calls[0].function.name"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *((path, {"model": LONG * 1000}, "model") for path in PATHS),
        *((path, {"user": LONG * 1000}, "user") for path in PATHS),
        ("chat/completions", part(name=LONG), "messages[0].name"),
        ("chat/completions", part(role=LONG), "messages[0].role"),
        ("chat/completions", part(role="tool", tool_call_id=LONG), "messages[0].tool_call_id"),
        ("chat/completions", part(content=[{"type": LONG}]), None),
        ("chat/completions", called(id=LONG), "messages[0].tool_calls[0].id"),
        ("chat/completions", called(function={"name": LONG}), NAMED_CALL),
        ("chat/completions", {"tools": [{"function": {"name": LONG}}]}, "tools[0].function.name"),
        ("chat/completions", {"tool_choice": CHOSEN}, None),
        ("chat/completions", {"response_format": NAMED}, "response_format.json_schema.name"),
        ("chat/completions", {"prompt_cache_key": LONG}, "prompt_cache_key"),
        ("chat/completions", {"safety_identifier": LONG}, "safety_identifier"),
        ("chat/completions", {"logit_bias": {LONG: 1}}, None),
        ("embeddings", {"prompt_name": LONG}, "prompt_name"),
        ("responses", {"input": [{"type": LONG}]}, "input[0].type"),
        ("responses", {"input": [{"type": "function_call", "call_id": LONG}]}, "input[0].call_id"),
        ("responses", {"include": [LONG]}, "include[0]"),
        ("responses", {"tool_choice": {"type": "function", "name": LONG}}, "tool_choice"),
        ("responses", {"tools": [{"type": "function", "name": LONG}]}, "tools[0].name"),
    ],
)
async def test_a_name_is_short_and_is_refused_before_it_is_looked_for(
    client: AsyncClient, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = await client.post(f"/v1/{path}", json={**PATHS[path], **body})
    error = error_of(answer)
    assert len(answer.content) < 700
    assert param in (None, error["param"])


@pytest.mark.parametrize("path", ["models/", "nowhere/", "responses/"])
async def test_what_is_repeated_of_a_path_is_cut(client: AsyncClient, path: str) -> None:
    answer = await client.get(f"/v1/{path}{'writer' * 2000}")
    assert answer.status_code == 404
    assert len(answer.content) < 700


async def test_one_kept_item_meant_many_times_is_refused_before_all_are_read(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """A body of some kilobytes could stand for gigabytes."""
    async with served(models, engines, max_input_chars=100) as client:
        asked = {"model": "writer", "input": "x" * 80}
        kept = (await client.post("/v1/responses", json=asked)).json()
        items = (await client.get(f"/v1/responses/{kept['id']}/input_items")).json()
        meant = {"type": "item_reference", "id": items["data"][0]["id"]}
        answer = await client.post("/v1/responses", json={**asked, "input": [meant] * 40})
    error = error_of(answer)
    assert error["param"] == "input"
    assert "refers to" in error["message"]


class Watched(Catalog):
    """A catalog that knows on which thread it is read."""

    threads: ClassVar[list[int]] = []

    def resolve(self, name: str, *kinds: type[ModelSpec]) -> Resolved:
        self.threads.append(threading.get_ident())
        return super().resolve(name, *kinds)


@pytest.mark.parametrize("path", PATHS)
async def test_a_large_body_is_read_and_translated_off_the_event_loop(
    models: Catalog, engines: ScriptedEngines, path: str
) -> None:
    """A small one isn't: a thread costs more."""
    name = {"embeddings": "input", "completions": "prompt", "responses": "instructions"}.get(path)
    large = {**PATHS[path], name or "messages": "x" * 300_000}
    if name is None:
        large["messages"] = [{"role": "user", "content": "x" * 300_000}]
    async with served(Watched(models.specs), engines) as client:
        Watched.threads.clear()
        await client.post(f"/v1/{path}", json=PATHS[path])
        await client.post(f"/v1/{path}", json=large)
    here = threading.get_ident()
    assert [thread == here for thread in Watched.threads] == [True, False]


async def test_bodies_that_come_at_once_are_read_by_one_thread_for_each_size(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Each thread that reads takes its share of the loop's time: forty took it all."""
    bodies = [{**PATHS["embeddings"], "input": "x" * size} for size in (40_000, 1_100_000) * 6]
    async with served(Watched(models.specs), engines, max_input_chars=10) as client:
        Watched.threads.clear()
        await asyncio.gather(*(client.post("/v1/embeddings", json=body) for body in bodies))
    assert len(Watched.threads) == len(bodies)
    assert len({threading.get_ident(), *Watched.threads}) == 3


@pytest.mark.parametrize("name", ["€", "a\r\nx-evil: 1", "b" * 100_000, "c,d", " "])
@pytest.mark.parametrize("stream", [False, True])
async def test_names_that_no_header_can_hold_are_written_so_that_it_can(
    client: AsyncClient, name: str, stream: bool
) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, name: 1, "stream": stream})
    assert answer.status_code == 200
    assert len(answer.headers["x-gateway-ignored"]) < 500
    assert "x-evil" not in answer.headers


async def test_nulls_are_as_good_as_absent_at_any_depth(client: AsyncClient) -> None:
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
        async with sent(
            client, "/v1/chat/completions", chat("x" * 90, stream=True, n=64)
        ) as reader:
            await reader.readline()  # it began; no more is read

            async def is_served() -> bool:
                answer = await client.post("/v1/chat/completions", json=CHAT)
                return answer.status_code == 200

            await until_told(is_served)


@pytest.mark.parametrize("scheme", ["http", "file", "data"])
async def test_an_image_is_refused_and_nobody_looks_where_it_is(
    client: AsyncClient, tmp_path: Path, scheme: str
) -> None:
    visits: list[object] = []
    (tmp_path / "image.png").write_text("a secret", encoding="utf-8")
    async with await asyncio.start_server(lambda *_: visits.append(_), "127.0.0.1", 0) as there:
        port = there.sockets[0].getsockname()[1]
        url = {
            "http": f"http://127.0.0.1:{port}/image.png",
            "file": f"file://{tmp_path}/image.png",
            "data": "data:image/png;base64,AAAA",
        }[scheme]
        parts: dict[str, dict[str, Any]] = {
            "chat/completions": {"type": "image_url", "image_url": {"url": url}},
            "responses": {"type": "input_image", "image_url": url},
            "messages": {"type": "image", "source": {"type": "url", "url": url}},
        }
        for path, part in parts.items():
            name = "input" if path == "responses" else "messages"
            body = {**ASK[f"/v1/{path}"]("x"), name: messages([part])}
            answer = await client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400
            assert part["type"] in answer.json()["error"]["message"]
            assert "secret" not in answer.text
        for given in ({"content": [parts["chat/completions"]]}, [{"a": url}]):
            error_of(await client.post("/v1/embeddings", json={"model": "embed", "input": given}))
    assert not visits


@contextlib.asynccontextmanager
async def sent(
    client: AsyncClient, path: str, body: Any, *, method: str = "POST", is_shut: bool = False
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request over a connection of its own, whose sending side may be shut behind it."""
    text = b"" if body is None else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    writer.write(head.encode() + b"connection: close\r\n\r\n" + text)
    if is_shut:
        writer.write_eof()
    async with asyncio.timeout(60):
        yield reader
    writer.close()


def requests_in(lines: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [line for line in lines if line["event"] == "request"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/embeddings", {"model": "embed", "input": "hi"}),
        ("POST", "/embed", {"inputs": "hi"}),
        ("POST", "/v1/rerank", {"model": "judge", "query": "a", "documents": ["b"]}),
        ("POST", "/v1/completions", {"model": "writer", "prompt": "hi"}),
        ("POST", "/v1/responses", {"model": "writer", "input": "hi", "stream": True}),
        ("POST", "/v1/messages", {"model": "writer", "max_tokens": 4, "messages": USER}),
        ("POST", "/v1/chat/completions", {"model": "nobody", "messages": USER}),
    ],
)
async def test_who_shuts_the_sending_side_hears_of_no_failure(
    client: AsyncClient, method: str, path: str, body: Any
) -> None:
    with structlog.testing.capture_logs() as lines:
        async with sent(client, path, body, method=method, is_shut=True) as reader:
            answer = await reader.read()
            await until(lambda: requests_in(lines))
    assert not answer or answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404"))
    assert not [line for line in lines if line["log_level"] in ("error", "critical")]
    assert {line["status"] for line in requests_in(lines)} <= {200, 404, 499}


@pytest.mark.parametrize("stream", [False, True])
async def test_who_shuts_the_sending_side_has_left(
    client: AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    """A closed connection looks the same. It is never told of a failure; the log says 499."""
    engines.chat.gate.close()
    with structlog.testing.capture_logs() as lines:
        body = chat("x" * 50, stream=stream)
        async with sent(client, "/v1/chat/completions", body, is_shut=True) as reader:
            # It has left before its row runs, mostly.
            await until(lambda: engines.chat.gate.reached.is_set() or requests_in(lines))
            engines.chat.gate.open()
            answer = await reader.read()
            await until(lambda: requests_in(lines))
    assert not answer
    assert [line["status"] for line in requests_in(lines)] == [499]
