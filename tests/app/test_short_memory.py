"""Several models in too little memory: whoever can give way does, and nobody waits for ever."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.app.opening import Size
from gateway.jobs import GenerateJob, RowJob
from gateway.registry import ChatSpec, ModelSpec
from gateway.serving.generation.memory import rectangle
from gateway.serving.ports import GenerationEngine
from tests.fakes import Gate, ScriptedEmbedder, ScriptedEngines, ScriptedWriter
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
MODEL = 10_000  # bytes of each; a token of a chat model takes one
LONG = 500
ROW = rectangle([LONG])
CHATS: dict[str, dict[str, Any]] = {
    name: {"kind": "chat", "source": "path:."} for name in ("one", "two")
}


@dataclass
class Large(ScriptedWriter):
    max_context: int = 100_000
    reading: Gate = field(default_factory=Gate)

    def plan(self, job: GenerateJob) -> list[RowJob]:
        self.reading.pass_through()
        return super().plan(job)

    def nbytes(self) -> int:
        return MODEL


@dataclass
class LargeEmbedder(ScriptedEmbedder):
    def nbytes(self) -> int:
        return MODEL


@dataclass
class SizedEngines(ScriptedEngines):
    """Every chat model has a writer of its own."""

    embedder: ScriptedEmbedder = field(default_factory=LargeEmbedder)
    writers: dict[str, Large] = field(default_factory=lambda: {name: Large() for name in CHATS})

    async def size(self, spec: ModelSpec, folder: Path) -> Size:
        return Size(MODEL, kv_token=int(isinstance(spec, ChatSpec)))

    def generation(
        self, spec: ChatSpec, folder: Path
    ) -> Generator[GenerationEngine | None, None, None]:
        self._load(spec)
        yield self.writers[spec.id]


async def ask(client: httpx2.AsyncClient, model: str, max_tokens: int = 9) -> httpx2.Response:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
    }
    return await asyncio.wait_for(client.post("/v1/chat/completions", json=body), 15)


async def test_a_row_has_the_memory_of_a_model_that_becomes_idle(tmp_path: Path) -> None:
    """An embedding model has no rows whose end would tell."""
    engines = SizedEngines()
    models = {**CHATS, "embedder": {"kind": "embedding", "source": "path:."}}
    body = {"model": "embedder", "input": "x"}
    async with served(
        catalog(tmp_path, models), engines, cache_max_bytes=2 * MODEL + 600
    ) as client:
        assert (await ask(client, "one")).status_code == 200
        engines.embedder.gate.close()
        embedding = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await asyncio.to_thread(engines.embedder.gate.reached.wait, 20)
        row = asyncio.create_task(ask(client, "one", LONG))
        while len(engines.writers["one"].jobs) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        engines.embedder.gate.open()
        assert (await embedding).status_code == 200
        assert (await row).status_code == 200


async def test_rows_of_two_models_that_wait_for_each_other_do_not_for_ever(tmp_path: Path) -> None:
    """Who has waited as long as a load may is told to come back, and the other has its room."""
    engines = SizedEngines()
    budget = 2 * MODEL + 600
    async with served(
        catalog(tmp_path, CHATS), engines, cache_max_bytes=budget, load_wait_s=1
    ) as client:
        for name in CHATS:
            assert (await ask(client, name)).status_code == 200
        reading = engines.writers["two"].reading
        reading.close()
        second = asyncio.create_task(ask(client, "two", LONG))
        await asyncio.to_thread(reading.reached.wait, 20)
        first = asyncio.create_task(ask(client, "one", LONG))
        await asyncio.sleep(0.5)
        reading.open()
        refused = await first
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_room"
        assert refused.headers["retry-after"] == "5"
        assert (await second).status_code == 200
        assert (await ask(client, "one")).status_code == 200


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_what_a_pinned_model_keeps_of_prompts_gives_way(
    tmp_path: Path, is_loaded: bool
) -> None:
    """To another model's load, and to its rows: the pinned model itself stays."""
    engines = SizedEngines()
    models = {**CHATS, "one": {**CHATS["one"], "pinned": True}}
    budget = 2 * MODEL + ROW
    async with served(
        catalog(tmp_path, models), engines, cache_max_bytes=budget, load_wait_s=5
    ) as client:
        if is_loaded:
            assert (await ask(client, "two")).status_code == 200
        engines.writers["one"].kept_bytes = ROW if is_loaded else MODEL
        assert (await ask(client, "one")).status_code == 200
        assert (await ask(client, "two", LONG)).status_code == 200
        assert engines.writers["one"].kept_bytes == 0
        assert sorted(engines.loads) == ["one", "two"]
