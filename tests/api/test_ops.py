"""Health, readiness and metrics: what supervisors ask."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.errors import ModelLoadFailed
from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, ready, served

pytestmark = pytest.mark.anyio

WRITER = {"kind": "chat", "source": "path:.", "preload": True}


async def test_ready_waits_for_what_is_preloaded_while_health_does_not(tmp_path: Path) -> None:
    """A load balancer sends nothing yet, and a supervisor kills nothing."""
    engines = ScriptedEngines()
    engines.load_gate.close()
    async with served(catalog(tmp_path, {"writer": WRITER}), engines, wait_ready=False) as client:
        await asyncio.to_thread(engines.load_gate.reached.wait, 5)
        assert (await client.get("/health")).status_code == 200
        waiting = await client.get("/ready")
        assert waiting.status_code == 503
        assert waiting.json() == {"status": "loading", "models": {"writer": "loading"}}
        engines.load_gate.open()
        await ready(client)
        assert (await client.get("/ready")).json()["models"] == {"writer": "loaded"}


@pytest.mark.parametrize(
    ("given", "headers", "is_told"),
    [
        ({}, {}, True),
        ({}, {"host": "evil.example"}, False),
        ({}, {"origin": "http://evil.example"}, False),
        ({"allowed_hosts": "ours.example"}, {"host": "ours.example"}, True),
        ({"api_keys": "k"}, {}, False),
        ({"api_keys": "k"}, {"authorization": "Bearer wrong"}, False),
        ({"api_keys": "k"}, {"authorization": "Bearer k", "host": "any.example"}, True),
    ],
)
async def test_ready_names_models_to_those_who_may_list_them(
    models: Catalog,
    engines: ScriptedEngines,
    given: dict[str, Any],
    headers: dict[str, str],
    is_told: bool,
) -> None:
    """A probe needs no key and no host, and learns the status alone."""
    async with served(models, engines, **given) as client:
        answer = await client.get("/ready", headers=headers)
    assert answer.status_code == 200
    assert answer.json()["status"] == "ready"
    assert ("models" in answer.json()) is is_told


async def test_a_preload_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is in the log, and the next request for it says why."""
    engines = ScriptedEngines()
    engines.failing["broken"] = ModelLoadFailed("broken", "corrupt file")
    models = catalog(tmp_path, {"broken": WRITER, "writer": WRITER})
    async with served(models, engines) as client:
        assert engines.loads == ["broken", "writer"]
        body = {"model": "broken", "messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 500
        assert "corrupt file" in answer.json()["error"]["message"]
        answer = await client.post("/v1/chat/completions", json={**body, "model": "writer"})
        assert answer.status_code == 200


async def test_health_answers_while_the_lane_is_busy(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """A long native call must not look like death."""
    engines.embedder.gate.close()
    asked = asyncio.create_task(
        client.post("/v1/embeddings", json={"model": "embed", "input": "a"})
    )
    await asyncio.to_thread(engines.embedder.gate.reached.wait, 5)
    assert (await client.get("/health")).status_code == 200
    engines.embedder.gate.open()
    assert (await asked).status_code == 200


async def test_metrics_count_what_was_served(client: httpx2.AsyncClient) -> None:
    """In Prometheus' text format, per model."""
    await client.post("/v1/embeddings", json={"model": "embed", "input": ["a", "bb"]})
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'gateway_prompt_tokens_total{model="org/embed"}' in answer.text
    assert 'gateway_requests_total{route="/v1/embeddings",status="200"}' in answer.text
    assert 'gateway_batch_rows_count{model="org/embed"}' in answer.text
