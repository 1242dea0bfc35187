"""The pass at load: once, on the lane, before any request's; the faults it shows are named."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import EngineFailed
from gateway.jobs import Vectors
from gateway.jobs.chat import Delta
from tests.fakes import ScriptedChat, ScriptedEmbedder, ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
MODELS = {
    "chat": {"kind": "chat", "source": "path:."},
    "embedder": {"kind": "embedding", "source": "path:."},
}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
EMBEDDING = {"model": "embedder", "input": "Hi"}


@pytest.mark.parametrize("warm_up", [True, False])
async def test_a_model_is_warm_before_its_first_request(tmp_path: Path, warm_up: bool) -> None:
    engines = ScriptedEngines()
    async with served(catalog(tmp_path, MODELS), engines, warm_up=warm_up) as client:
        assert (await client.post("/v1/embeddings", json=EMBEDDING)).status_code == 200
        answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["choices"][0]["message"]["content"] == "Hi"
    assert len(engines.embedder.batches) == 1 + warm_up
    assert len(engines.chat.joined) == 1 + warm_up


class Stumbling(ScriptedChat):
    """Each step fails, as the real engine's does: the row is read again, alone, and then ends."""

    def decode(self) -> list[Delta]:
        decoding = self.inside("decoding")
        if len(self.steps) < 2:
            self.steps.append(len(decoding))
            for row in decoding.values():
                row.state, row.rest = "reading", None
            return []
        self.scripted.clear()
        return [Delta(0, id=number, error="out of luck") for number in decoding]


async def test_a_step_that_fails_is_a_failed_load(tmp_path: Path) -> None:
    engines = ScriptedEngines(chat=Stumbling())
    async with served(catalog(tmp_path, MODELS), engines, warm_up=True) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "The model `chat` failed to load: out of luck"


class Broken(ScriptedEmbedder):
    def embed(self, rows: Any) -> Vectors:
        raise EngineFailed("embedder", "the vector of row 0 is not finite")


async def test_a_pass_that_fails_is_a_failed_load(tmp_path: Path) -> None:
    engines = ScriptedEngines(embedder=Broken())
    async with served(catalog(tmp_path, MODELS), engines, warm_up=True) as client:
        answer = await client.post("/v1/embeddings", json=EMBEDDING)
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "The model `embedder` failed to load: the vector of row 0 is not finite",
            "type": "server_error",
            "param": None,
            "code": "model_load_failed",
        }
        assert engines.embedder.is_closed
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


class Untidy(ScriptedEngines):
    """Engines that fail once to give memory back, which ends nothing."""

    def tidy(self) -> None:
        super().tidy()
        if self.tidied == 1:
            raise RuntimeError("no")


async def test_freed_memory_is_given_back_now_and_then(tmp_path: Path) -> None:
    engines = Untidy()
    given = catalog(tmp_path, MODELS)
    async with served(given, engines, give_back_s=0.02) as client, asyncio.timeout(60):
        while engines.tidied < 3:
            assert (await client.post("/v1/embeddings", json=EMBEDDING)).status_code == 200
    done = engines.tidied
    async with served(catalog(tmp_path, MODELS), engines) as client:
        assert (await client.post("/v1/embeddings", json=EMBEDDING)).status_code == 200
    assert engines.tidied == done
