"""A model is loaded in turns of the lane, whatever its kind."""

import asyncio
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.registry import EmbeddingSpec
from gateway.serving.ports import EmbeddingEngine
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, level, ready, served
from tests.waiting import until

pytestmark = pytest.mark.anyio
MODELS = {
    "chat": {"kind": "chat", "source": "path:."},
    "embedder": {"kind": "embedding", "source": "path:."},
}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
EMBEDDING = {"model": "embedder", "input": "Hello"}


@dataclass
class Watching(ScriptedEngines):
    """Counts the chats let in before the last step of loading the embedder."""

    chats_between: int = 0

    def embedding(
        self, spec: EmbeddingSpec, folder: Path
    ) -> Generator[EmbeddingEngine | None, None, None]:
        self._load(spec)
        before = len(self.chat.joined)
        yield None
        self.chats_between = len(self.chat.joined) - before
        yield self.embedder


async def test_a_chat_that_waits_is_let_in_between_two_steps_of_a_load(tmp_path: Path) -> None:
    engines = Watching()
    async with served(catalog(tmp_path, MODELS), engines) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        engines.load_gate.close()
        embedded = asyncio.create_task(client.post("/v1/embeddings", json=EMBEDDING))
        await asyncio.to_thread(engines.load_gate.reached.wait, 60)
        chatted = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: level("gateway_tickets") == 1)  # its row waits for the lane
        engines.load_gate.open()
        answers = await asyncio.gather(embedded, chatted)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert engines.chats_between == 1


async def test_a_load_that_takes_longer_than_requests_wait_is_not_ready_before_its_end(
    tmp_path: Path,
) -> None:
    """A model to be preloaded is waited for; only a failed one is not."""
    engines = ScriptedEngines()
    engines.load_gate.close()
    models = {"chat": {**MODELS["chat"], "preload": True}}
    async with served(
        catalog(tmp_path, models), engines, wait_ready=False, load_wait_s=0.05
    ) as client:
        await asyncio.to_thread(engines.load_gate.reached.wait, 60)
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.json()["error"]["code"] == "model_loading"
        assert (await client.get("/ready")).status_code == 503
        engines.load_gate.open()
        await ready(client)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("gateway.app.gateway, gateway.app.engines", "mlx_lm transformers outlines llguidance"),
        ("gateway.engine.embedding.loading", "mlx_lm transformers"),
    ],
)
def test_what_only_some_models_need_is_not_imported_before_one_does(
    imports: str, absent: str
) -> None:
    code = f"import sys, {imports}; print([*sys.modules.keys() & set({absent.split()})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_once_ready_what_runs_models_that_are_not_loaded_is_imported(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    async with served(catalog(tmp_path, MODELS), engines) as client:
        await ready(client)
        assert engines.imported == set(MODELS)
        assert not engines.loads
