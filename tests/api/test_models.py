"""GET /v1/models: every name a client may send."""

import asyncio
import time

import httpx2
import pytest
from openai import AsyncOpenAI

from gateway.errors import ModelLoadFailed
from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio


async def test_ids_and_aliases_are_listed(client: httpx2.AsyncClient) -> None:
    """`root` names the id behind an alias."""
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    roots = {entry["id"]: entry["root"] for entry in listing["data"]}
    assert roots["org/embed"] == roots["embed"] == roots["embed-query"] == "org/embed"
    assert roots["gpt"] == "writer"
    assert all(isinstance(entry["created"], int) for entry in listing["data"])
    assert all(entry["object"] == "model" for entry in listing["data"])
    kinds = {entry["id"]: entry["kind"] for entry in listing["data"]}
    told = [kinds[name] for name in ("writer", "gpt", "embed", "judge")]
    assert told == ["chat", "chat", "embedding", "rerank"]


@pytest.mark.parametrize("path", ["/v1/models/org%2Fembed", "/v1/models/org/embed", "/models/gpt"])
async def test_one_model_is_found_by_any_name(client: httpx2.AsyncClient, path: str) -> None:
    """Ids have slashes, which SDKs send as %2F."""
    assert (await client.get(path)).json()["root"] in ("org/embed", "writer")


async def test_the_sdk_retrieves_an_id_with_a_slash(client: httpx2.AsyncClient) -> None:
    """As it does for every mlx-community model."""
    async with AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x") as sdk:
        assert (await sdk.models.retrieve("org/embed")).id == "org/embed"


async def test_a_model_tells_whether_it_is_loaded(client: httpx2.AsyncClient) -> None:
    """It is after its first use."""
    assert (await client.get("/v1/models/writer")).json()["state"] == "unloaded"
    body = {"model": "writer", "messages": [{"role": "user", "content": "hi"}]}
    await client.post("/v1/chat/completions", json=body)
    assert (await client.get("/v1/models/gpt")).json()["state"] == "loaded"


async def test_a_loaded_model_tells_its_bytes_and_last_use(client: httpx2.AsyncClient) -> None:
    """Both are null before, and so is the error while there is none."""
    before = (await client.get("/v1/models/writer")).json()
    assert (before["bytes"], before["last_used"], before["error"]) == (None, None, None)
    body = {"model": "writer", "messages": [{"role": "user", "content": "hi"}]}
    await client.post("/v1/chat/completions", json=body)
    after = (await client.get("/v1/models/writer")).json()
    assert after["bytes"] == 1
    assert abs(after["last_used"] - time.time()) < 60


async def test_a_failed_model_tells_why(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """By each of its names, while the others are as they were."""
    engines.failing["writer"] = ModelLoadFailed("writer", "corrupt")
    body = {"model": "writer", "messages": [{"role": "user", "content": "hi"}]}
    await client.post("/v1/chat/completions", json=body)
    entries = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
    assert entries["gpt"]["state"] == entries["writer"]["state"] == "failed"
    assert "corrupt" in entries["gpt"]["error"]
    assert entries["embed"]["state"] == "unloaded"


async def test_a_model_beyond_the_budget_is_507(models: Catalog) -> None:
    """Saying what it needs and what is allowed; others are served."""
    engines = ScriptedEngines(sizes={"writer": 2000})
    async with served(models, engines, cache_max_bytes=1000) as client:
        body = {"model": "writer", "messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 507
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert error["code"] == "insufficient_memory"
        assert "`writer`" in error["message"]
        assert "2,000 bytes, and 1,000 are allowed" in error["message"]
        body = {"model": "embed", "input": "hi"}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200


async def test_a_model_that_waits_for_one_in_use_is_503_in_time(models: Catalog) -> None:
    """With Retry-After; the one in use is not disturbed."""
    engines = ScriptedEngines(sizes={"writer": 600, "org/embed": 600})
    async with served(models, engines, cache_max_bytes=1000, load_wait_s=0.2) as client:
        chat = {"model": "writer", "messages": [{"role": "user", "content": "hi"}]}
        await client.post("/v1/chat/completions", json=chat)
        engines.chat.gate.close()
        answering = asyncio.create_task(client.post("/v1/chat/completions", json=chat))
        await asyncio.to_thread(engines.chat.gate.reached.wait, 20)
        answer = await client.post("/v1/embeddings", json={"model": "embed", "input": "hi"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        engines.chat.gate.open()
        assert (await answering).status_code == 200
