"""New limits of a model, from a new reading of models.yaml, hold for the model that runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, level, served
from tests.waiting import until

pytestmark = pytest.mark.anyio
CHAT: dict[str, Any] = {"kind": "chat", "source": "path:."}
JUDGE: dict[str, Any] = {"kind": "rerank", "source": "path:."}
EMBEDDER: dict[str, Any] = {"kind": "embedding", "source": "path:."}
ADMIN = {"authorization": "Bearer admin"}


@asynccontextmanager
async def serving(
    folder: Path,
    engines: ScriptedEngines,
    *,
    cache_max_models: int = 2,
    load_wait_s: float = 20,
    **models: Any,
) -> AsyncIterator[httpx2.AsyncClient]:
    given: dict[str, Any] = {"cache_max_models": cache_max_models, "load_wait_s": load_wait_s}
    file = folder / "models.yaml"
    async with served(
        catalog(folder, models), engines, admin_key="admin", models=file, **given
    ) as client:
        yield client


async def reloaded(client: httpx2.AsyncClient, folder: Path, **models: Any) -> dict[str, Any]:
    catalog(folder, models)
    answer = await client.post("/admin/reload", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    changes: dict[str, Any] = answer.json()
    return changes


def asked(text: str) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": text}]}


async def test_a_chat_model_takes_over_its_limits_as_it_runs(tmp_path: Path) -> None:
    """Answers under way go on; nothing is loaded, and no caller waits for a second copy."""
    engines = ScriptedEngines()
    async with serving(tmp_path, engines, cache_max_models=1, load_wait_s=1, chat=CHAT) as client:
        gate = engines.chat.gate
        gate.close()
        first = asyncio.create_task(client.post("/v1/chat/completions", json=asked("first")))
        await asyncio.to_thread(gate.reached.wait, 60)
        limits = {
            "queue_limit": 3,
            "queue_max_tokens": 50,
            "sampling": {"max_tokens": 2},
            "batching": {"max_batch_size": 1, "prefill_chunk_tokens": 16},
            "structured": {"rows": 4},
        }
        assert (await reloaded(client, tmp_path, chat={**CHAT, **limits}))["changed"] == []
        second = [
            asyncio.create_task(client.post("/v1/chat/completions", json=asked(text)))
            for text in ("second", "third")
        ]
        await until(lambda: level("gateway_tickets") == 2)
        refused = await client.post("/v1/chat/completions", json=asked("fourth"))
        assert refused.status_code == 429
        gate.open()
        said = [
            (await task).json()["choices"][0]["message"]["content"] for task in (first, *second)
        ]
        assert said == ["first", "se", "th"]
        assert set(engines.chat.steps) == {1}, "one row at a time"
        long = await client.post("/v1/chat/completions", json=asked("x" * 40))
        assert long.status_code == 200, "one that is alone may hold any amount"
    assert engines.loads == ["chat"]


async def test_an_embedding_model_takes_over_its_limits_as_it_runs(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    body = {"model": "embedder", "input": ["one", "two", "three"]}
    async with serving(tmp_path, engines, cache_max_models=1, embedder=EMBEDDER) as client:
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        batching = {"max_batch_size": 1, "cache_size": 2}
        await reloaded(client, tmp_path, embedder={**EMBEDDER, "batching": batching})
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        assert engines.embedder.batches == [[3, 3, 5], [3], [3], [5]]
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        assert engines.embedder.batches[4:] == [[3]], "two are kept"
        await reloaded(client, tmp_path, embedder={**EMBEDDER, "overflow": "truncate"})
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        assert engines.embedder.batches[5:] == [[3, 3, 5]], "none are kept any more"
    assert engines.loads == ["embedder"]


async def test_what_a_load_depends_on_is_loaded_anew(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    async with serving(tmp_path, engines, chat=CHAT) as client:
        for key, value in (
            ("max_context", 64),
            ("chat_template", "{{ messages }}"),
            ("structured", {"max_array_items": 3}),
            ("batching", {"prefix_cache_bytes": 0}),
            ("batching", {"speculate_rows": 0}),
        ):
            assert (await client.post("/v1/chat/completions", json=asked("hi"))).status_code == 200
            changes = await reloaded(client, tmp_path, chat={**CHAT, key: value})
            assert changes["changed"] == ["chat"], key
        assert (await client.post("/v1/chat/completions", json=asked("hi"))).status_code == 200
    assert engines.loads == ["chat"] * 6


async def test_a_rerank_model_takes_over_its_limits_as_it_runs(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    body = {"query": "a", "documents": ["abc"] * 4}
    async with serving(tmp_path, engines, judge=JUDGE) as client:
        await client.post("/rerank", json=body)
        changed = {**JUDGE, "max_tokens_per_doc": 2, "batching": {"max_batch_size": 2}}
        assert (await reloaded(client, tmp_path, judge=changed))["changed"] == []
        answer = await client.post("/rerank", json=body)
        assert answer.headers["x-gateway-truncated"] == "4"
    assert engines.reranker.batches == [[6] * 4, [5] * 2, [5] * 2]
    assert engines.loads == ["judge"]
