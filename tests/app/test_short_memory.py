"""Several models in too little memory: those that can give way do, and nobody waits for ever."""

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.app.loading import Size
from gateway.jobs.chat import Delta, GenerateJob
from gateway.jobs.steps import KvCost, SequenceParams
from gateway.registry import ChatSpec, ModelSpec
from gateway.serving.generation.memory import Layout, RowCosts, longest_chunk
from gateway.serving.ports import GenerationEngine
from tests.fakes import Gate, ScriptedChat, ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
MODEL = 10_000  # bytes of each; a token of a chat model takes one
LONG = 500
COSTS = RowCosts(KvCost(1), chunk_tokens=longest_chunk(512))
SMALL = Layout([2 + 9]).nbytes(COSTS)  # bytes of a row that may say nine tokens
ROW = Layout([2 + 256]).nbytes(COSTS)  # bytes of a row that may say LONG, when it joins
CHATS: dict[str, dict[str, Any]] = {
    name: {"kind": "chat", "source": "path:."} for name in ("one", "two")
}


@dataclass
class Large(ScriptedChat):
    max_context: int = 100_000
    planning: Gate = field(default_factory=Gate)

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        self.planning.pass_through()
        return super().prepare(job)

    def nbytes(self) -> int:
        return MODEL


@dataclass
class SizedEngines(ScriptedEngines):
    """Every chat model has a writer of its own."""

    chats: dict[str, Large] = field(default_factory=lambda: {name: Large() for name in CHATS})

    async def size(self, spec: ModelSpec, folder: Path) -> Size:
        return Size(MODEL, kv_token=int(isinstance(spec, ChatSpec)))

    def writing(self, spec: ChatSpec) -> Generator[GenerationEngine | None, None, None]:
        self._load(spec)
        yield self.chats[spec.id]


async def ask(client: httpx2.AsyncClient, model: str, max_tokens: int = 9) -> httpx2.Response:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
    }
    return await asyncio.wait_for(client.post("/v1/chat/completions", json=body), 60)


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_prompts_that_a_pinned_model_keeps_give_way(tmp_path: Path, is_loaded: bool) -> None:
    """They give way to another model's load and rows; the pinned model itself stays."""
    engines = SizedEngines()
    models = {**CHATS, "one": {**CHATS["one"], "pinned": True}}
    limits: Any = {"cache_max_bytes": 2 * MODEL + ROW, "prefix_cache_bytes": MODEL}
    async with served(catalog(tmp_path, models), engines, **limits, load_wait_s=5) as client:
        if is_loaded:
            assert (await ask(client, "two")).status_code == 200
        engines.chats["one"].prefix_bytes = ROW if is_loaded else MODEL
        assert (await ask(client, "one")).status_code == 200
        assert (await ask(client, "two", LONG)).status_code == 200
        assert engines.chats["one"].prefix_bytes == 0
        assert sorted(engines.loads) == ["one", "two"]


@dataclass
class Slow(Large):
    """Takes its time over each step."""

    def decode(self) -> list[Delta]:
        time.sleep(0.01)
        return super().decode()


async def test_no_idle_model_goes_for_rows_that_wait_where_it_does_not_help(tmp_path: Path) -> None:
    """Long answers hold the memory; an embedding now and then keeps its model."""
    engines = SizedEngines()
    engines.chats["one"] = Slow()
    models = {**CHATS, "embedder": {"kind": "embedding", "source": "path:."}}
    budget = 2 * MODEL + Layout([500]).nbytes(COSTS)
    async with served(catalog(tmp_path, models), engines, cache_max_bytes=budget) as client:
        body = {"model": "embedder", "input": "x"}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200

        async def chat(length: int) -> httpx2.Response:
            messages = [{"role": "user", "content": "x" * length}]
            asked = {"model": "one", "messages": messages, "max_tokens": 60}
            return await client.post("/v1/chat/completions", json=asked)

        chats = [asyncio.create_task(chat(300)) for _ in range(3)]
        while not all(chat.done() for chat in chats):
            assert (await client.post("/v1/embeddings", json=body)).status_code == 200
            await asyncio.sleep(0.1)
        assert [(await chat).status_code for chat in chats] == [200] * 3
    assert engines.loads.count("embedder") == 1


async def test_a_prompt_that_never_fits_beside_a_pinned_model_is_refused_at_once(
    tmp_path: Path,
) -> None:
    """It gets a 507, not a 503 for ever; one that fits with a short answer is served."""
    engines = SizedEngines()
    models = {**CHATS, "one": {**CHATS["one"], "pinned": True}}
    budget = 2 * MODEL + Layout([400]).nbytes(COSTS)
    async with served(catalog(tmp_path, models), engines, cache_max_bytes=budget) as client:
        for name in CHATS:
            assert (await ask(client, name)).status_code == 200

        async def read(length: int) -> httpx2.Response:
            messages = [{"role": "user", "content": "x" * length}]
            asked = {"model": "two", "messages": messages, "max_tokens": 16_384}
            return await asyncio.wait_for(client.post("/v1/chat/completions", json=asked), 60)

        refused = await read(400)
        assert refused.status_code == 507
        assert refused.json()["error"]["code"] == "insufficient_memory"
        assert "retry-after" not in refused.headers
        answer = await read(390)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"
