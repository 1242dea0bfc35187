"""Health, readiness and metrics: the endpoints that supervisors ask."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import structlog
from httpx2 import AsyncClient

from gateway import __version__
from gateway.errors import ModelLoadFailed
from gateway.registry import Catalog, ModelSpec
from tests.api.harness import chat, error_of
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, ready, served

pytestmark = pytest.mark.anyio

WRITER = {"kind": "chat", "source": "path:.", "preload": True}


async def test_ready_waits_for_what_is_preloaded_while_health_does_not(tmp_path: Path) -> None:
    """A load balancer sends nothing yet, and a supervisor kills nothing."""
    engines = ScriptedEngines()
    engines.load_gate.close()
    async with served(catalog(tmp_path, {"writer": WRITER}), engines, wait_ready=False) as client:
        await asyncio.to_thread(engines.load_gate.reached.wait, 60)
        assert (await client.get("/health")).status_code == 200
        waiting = await client.get("/ready")
        assert waiting.status_code == 503
        assert waiting.json() == {"status": "loading", "models": {"writer": "loading"}}
        engines.load_gate.open()
        await ready(client)
        assert (await client.get("/ready")).json()["models"] == {"writer": "loaded"}


KEYS: dict[str, Any] = {"api_keys": "k"}


@pytest.mark.parametrize(
    ("given", "headers", "is_told"),
    [
        ({}, {}, True),
        ({}, {"host": "evil.example"}, False),
        ({}, {"origin": "http://evil.example"}, False),
        ({"allowed_hosts": "ours.example"}, {"host": "ours.example"}, True),
        (KEYS, {}, False),
        (KEYS, {"authorization": "Bearer wrong"}, False),
        (KEYS, {"authorization": "Bearer k", "host": "any.example"}, True),
    ],
)
async def test_ready_names_models_to_those_who_may_list_them(
    models: Catalog, engines: ScriptedEngines, given: Any, headers: dict[str, str], is_told: bool
) -> None:
    """A probe needs no key and no host, and learns the status alone."""
    async with served(models, engines, **given) as client:
        answer = await client.get("/ready", headers=headers)
    assert answer.status_code == 200
    assert answer.json()["status"] == "ready"
    assert ("models" in answer.json()) is is_told


BROKEN = ModelLoadFailed("broken", "corrupt file")


async def unready(client: AsyncClient) -> dict[str, Any]:
    """Give the first answer of /ready that is no longer "loading"."""
    while (answer := await client.get("/ready")).json()["status"] == "loading":
        await asyncio.sleep(0.02)
    body: dict[str, Any] = answer.json()
    return {"code": answer.status_code, **body}


async def test_a_preload_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    engines.failing["wrong"] = BROKEN
    models = catalog(tmp_path, {"good": WRITER, "wrong": WRITER})
    async with served(models, engines, wait_ready=False) as client:
        states = {"good": "loaded", "wrong": "failed"}
        assert await unready(client) == {"code": 503, "status": "failed", "models": states}
        assert engines.loads == ["wrong", "good"]
        answer = await client.post("/v1/chat/completions", json=chat(model="wrong"))
        assert "corrupt file" in error_of(answer, 500)["message"]
        answer = await client.post("/v1/chat/completions", json=chat(model="good"))
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("broken", "status"), [(["broken"], "ready"), (["broken", "b2"], "failed")]
)
async def test_a_part_of_what_is_preloaded_is_enough_where_a_setting_says_so(
    tmp_path: Path, broken: list[str], status: str
) -> None:
    engines = ScriptedEngines()
    engines.failing |= dict.fromkeys(broken, BROKEN)
    models = catalog(tmp_path, {"broken": WRITER, "b2": WRITER})
    async with served(models, engines, wait_ready=False, ready_in_part=True) as client:
        assert (await unready(client))["status"] == status


async def test_a_preload_that_failed_is_tried_again_until_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks a gateway that is not ready for the model, so nobody else would load it."""
    monkeypatch.setattr("gateway.app.loading.RETRY_S", 0.01)
    monkeypatch.setattr("gateway.serving.models.entry.BROKEN_S", 0.01)
    engines = ScriptedEngines()
    engines.failing["broken"] = BROKEN
    models = catalog(tmp_path, {"broken": WRITER, "writer": WRITER})
    async with served(models, engines, wait_ready=False) as client:
        assert (await unready(client))["code"] == 503
        engines.failing.clear()
        await ready(client)
        assert engines.loads.count("writer") == 1


async def test_an_import_that_fails_stops_no_preload(tmp_path: Path) -> None:
    class Unimportable(ScriptedEngines):
        async def import_for(self, specs: Iterable[ModelSpec]) -> None:
            raise OSError("a library could not be read")

    async with served(catalog(tmp_path, {"writer": WRITER}), Unimportable()) as client:
        assert (await client.get("/ready")).status_code == 200


async def test_metrics_tell_how_long_prompts_and_answers_are_and_why_those_ended(
    client: AsyncClient,
) -> None:
    """Each answer of a request by itself; a prompt once, and texts together."""
    names = (
        'gateway_finished_total{model="writer",reason="stop"}',
        'gateway_finished_total{model="writer",reason="length"}',
        'gateway_answer_length_tokens_count{model="writer"}',
        'gateway_answer_length_tokens_sum{model="writer"}',
        'gateway_prompt_length_tokens_sum{model="writer"}',
        'gateway_prompt_length_tokens_count{model="org/embed"}',
        'gateway_prompt_length_tokens_sum{model="org/embed"}',
    )
    before = await values(client, *names)
    await client.post("/v1/chat/completions", json=chat("hello", n=2, max_tokens=3))
    await client.post("/v1/chat/completions", json=chat("hello"))
    await client.post("/v1/embeddings", json={"model": "embed", "input": ["a", "bb"]})
    after = await values(client, *names)
    counted = [now - then for now, then in zip(after, before, strict=True)]
    assert counted == [1, 2, 3, 3 + 3 + 6, 5 + 5, 1, 3]


async def values(client: AsyncClient, *names: str) -> list[float]:
    """Read series as they are written; one that is not there is 0."""
    lines = (await client.get("/metrics")).text.splitlines()
    series = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [float(series.get(name, 0)) for name in names]


async def test_metrics_tell_what_ready_and_the_watch_tell(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    engines.load_gate.close()
    models = catalog(tmp_path, {"writer": WRITER})
    async with served(models, engines, wait_ready=False, stall_limit_s=2) as client:
        names = ("gateway_ready", "gateway_heartbeat_age_seconds")
        async with asyncio.timeout(60):
            while (now := await values(client, *names))[1] == 0:
                assert now[0] == 0
                await asyncio.sleep(0.02)
        engines.load_gate.open()
        await ready(client)
        assert await values(client, *names) == [1, 0]


async def test_the_bound_on_waiting_tokens_is_told_by_model(tmp_path: Path) -> None:
    own = {**WRITER, "queue_max_tokens": 7}
    models = catalog(tmp_path, {"writer": WRITER, "other": own})
    async with served(models, ScriptedEngines(), queue_max_tokens=99) as client:
        names = [f'gateway_queue_tokens_limit{{model="{name}"}}' for name in ("writer", "other")]
        assert await values(client, *names) == [99, 7]


async def test_a_model_that_makes_room_is_counted(tmp_path: Path) -> None:
    """The count starts at 0, for a rate to see the first; unloading by hand makes no room."""
    models = catalog(tmp_path, {name: {**WRITER, "preload": False} for name in ("goes", "comes")})
    async with served(models, ScriptedEngines(), cache_max_models=1, admin_key="k") as client:
        name = 'gateway_model_evictions_total{model="goes"}'
        counts = []
        for model in ("goes", "comes"):
            answer = await client.post("/v1/chat/completions", json=chat(model=model))
            assert answer.status_code == 200
            assert f"\n{name} " in (await client.get("/metrics")).text
            counts += await values(client, name)
        headers = {"authorization": "Bearer k"}
        await client.post("/admin/models/comes/unload", headers=headers)
        assert counts == [0, 1]
        assert await values(client, 'gateway_model_evictions_total{model="comes"}') == [0]


async def test_who_only_looks_wakes_no_model(tmp_path: Path) -> None:
    """One that left after its time is as it was until somebody asks it; its counts stay."""
    engines = ScriptedEngines()
    entry = {"kind": "chat", "source": "path:.", "preload": False, "ttl_s": 0.02}
    body = chat("hello", model="sleeper")
    told = 'gateway_completion_tokens_total{model="sleeper"} '
    async with served(catalog(tmp_path, {"sleeper": entry}), engines) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        while (await client.get("/v1/models/sleeper")).json()["state"] != "unloaded":
            await asyncio.sleep(0.01)
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/sleeper"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert told in answer.text or path != "/metrics"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "sleeper"
        assert engines.loads == ["sleeper"]
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert engines.loads == ["sleeper", "sleeper"]


async def test_preloading_more_than_there_are_places_is_warned_of(tmp_path: Path) -> None:
    """The last ones would leave without a word; the first ones stay."""
    models = catalog(tmp_path, {"first": WRITER, "second": WRITER})
    with structlog.testing.capture_logs() as lines:
        async with served(models, ScriptedEngines(), cache_max_models=1) as client:
            told = (await client.get("/ready")).json()["models"]
    assert told == {"first": "loaded"}
    [warned] = [line for line in lines if line["event"] == "preload_beyond_limit"]
    assert warned["log_level"] == "warning"
    assert (warned["models"], warned["cache_max_models"]) == (["first", "second"], 1)
    with structlog.testing.capture_logs() as lines:
        async with served(models, ScriptedEngines(), cache_max_models=2):
            pass
    assert not [line for line in lines if line["event"] == "preload_beyond_limit"]


async def test_the_version_is_told_to_those_who_have_a_key(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, api_keys="k") as client:
        for path in ("/version", "/v1/version"):
            assert (await client.get(path)).status_code == 401
            answer = await client.get(path, headers={"authorization": "Bearer k"})
            assert (answer.status_code, answer.json()) == (200, {"version": __version__})


async def test_healthz_is_health(models: Catalog, engines: ScriptedEngines) -> None:
    """A probe has no key, and Kubernetes's writes the path so."""
    async with served(models, engines, api_keys="k") as client:
        for path in ("/health", "/healthz"):
            answer = await client.get(path, headers={"host": "10.0.0.7:8000"})
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
