"""/metrics' present values: rows, tickets, leases, tasks and memory, read when it is asked."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes import ScriptedEngines
from tests.provoked.readings import Reading, reading
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

MODELS = {
    "writer": {"kind": "chat", "source": "path:."},
    "embedder": {"kind": "embedding", "source": "path:."},
}
NOBODY = {"rows": 0, "tickets": 0, "leases": 0, "requests": 0, "tokens": 0}


def chat(client: httpx2.AsyncClient, text: str) -> "asyncio.Task[httpx2.Response]":
    body = {"model": "writer", "messages": [{"role": "user", "content": text}]}
    return asyncio.create_task(client.post("/v1/chat/completions", json=body))


def embed(client: httpx2.AsyncClient, *texts: str) -> "asyncio.Task[httpx2.Response]":
    body = {"model": "embedder", "input": texts}
    return asyncio.create_task(client.post("/v1/embeddings", json=body))


async def until(client: httpx2.AsyncClient, **expected: int) -> Reading:
    """Read /metrics until it has these values."""
    async with asyncio.timeout(60):
        while True:
            now = await reading(client)
            if expected.items() <= now.work.items():
                return now
            await asyncio.sleep(0.01)


async def test_gauges_count_running_and_waiting_requests_and_return_to_zero(tmp_path: Path) -> None:
    """One answer at a time is written, so two of three wait; an embedding waits for the lane."""
    engines = ScriptedEngines()
    given: dict[str, Any] = {"generation_max_batch_size": 1, "cache_max_bytes": 1000}
    async with served(catalog(tmp_path, MODELS), engines, **given) as client:
        await asyncio.gather(chat(client, "loads it"), embed(client, "loads it"))
        before = await until(client, **NOBODY)
        engines.chat.gate.close()
        asked = [chat(client, text) for text in ("one", "two", "three")]
        await asyncio.to_thread(engines.chat.gate.reached.wait, 60)
        asked.append(embed(client, "four", "five"))
        busy = await until(client, rows=1, tickets=3, leases=4, requests=4)
        assert busy.tasks > before.tasks
        engines.chat.gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        after = await until(client, **NOBODY)
        assert (after.held_bytes, after.limit_bytes) == (2, 1000)
        assert (after.active_bytes, after.cached_bytes) == (12, 34)


async def test_a_gateway_that_has_ended_tells_nothing(tmp_path: Path) -> None:
    models = catalog(tmp_path, MODELS)
    for _ in range(2):
        async with served(models, ScriptedEngines()) as client:
            assert (await client.get("/metrics")).text.count("\ngateway_tasks ") == 1
    async with served(models, ScriptedEngines()), served(models, ScriptedEngines()) as client:
        assert (await client.get("/metrics")).text.count("\ngateway_tasks ") == 2
