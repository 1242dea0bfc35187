"""Adapters served by name over HTTP by real engines, beside the models that they are merged."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.engine.hub import Hub
from tests.checkpoints import merge_adapter, write_adapter, write_chat
from tests.cpu_engines import cpu_engines
from tests.fake_hub import FakeHub
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

NAMES = ("one", "two")
ADMIN = {"authorization": "Bearer sesame"}
CHAT = {"kind": "chat", "sampling": {"temperature": 0}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 20}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_chat(folder / "base")
    for seed, name in enumerate(NAMES, 1):
        adapter = write_adapter(folder / name, base, seed=seed, rank=3 * seed)
        merge_adapter(folder / f"{name}-merged", base, adapter)
    return folder


def entries(**more: dict[str, Any]) -> dict[str, Any]:
    adapters = {name: {**CHAT, "base": "base", "adapter": f"path:{name}"} for name in NAMES}
    merged = {f"{name}-merged": {**CHAT, "source": f"path:{name}-merged"} for name in NAMES}
    return {"base": {**CHAT, "source": "path:base"}, **adapters, **merged, **more}


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    engines = cpu_engines(speculate_rows=4, prefix_cache_bytes=1 << 24)
    async with served(catalog(folder, entries()), engines, admin_key="sesame") as client:
        yield client


async def ask(
    client: httpx2.AsyncClient, model: str, text: str = "Hi there", **fields: Any
) -> httpx2.Response:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 40, **fields}
    return await client.post("/v1/chat/completions", json=body)


async def said(
    client: httpx2.AsyncClient, model: str, text: str = "Hi there", **fields: Any
) -> str:
    answer = await ask(client, model, text, **fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == model
    content: str = body["choices"][0]["message"]["content"]
    return content


async def streamed(client: httpx2.AsyncClient, model: str) -> str:
    answer = await ask(client, model, stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_each_answers_as_its_merged_model_when_all_are_asked_at_once(
    client: httpx2.AsyncClient,
) -> None:
    """Whole, streamed and held to a schema; the base among them, which answers as ever."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    expected = {name: await said(client, f"{name}-merged") for name in NAMES}
    held = {name: await said(client, f"{name}-merged", response_format=form) for name in NAMES}
    expected["base"] = await said(client, "base")
    assert len(set(expected.values())) == 3
    names = ["base", *NAMES] * 2
    wholes, streams, forms = await asyncio.gather(
        asyncio.gather(*(said(client, name) for name in names)),
        asyncio.gather(*(streamed(client, name) for name in names)),
        asyncio.gather(*(said(client, name, response_format=form) for name in NAMES)),
    )
    assert wholes == streams == [expected[name] for name in names]
    assert forms == [held[name] for name in NAMES]


async def test_models_are_listed_with_their_base(client: httpx2.AsyncClient) -> None:
    await said(client, "one")
    listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
    assert {name: each["parent"] for name, each in listed.items()} == {
        **dict.fromkeys(listed),
        **dict.fromkeys(NAMES, "base"),
    }
    assert listed["one"]["state"] == listed["base"]["state"] == "loaded"
    assert listed["two"]["state"] == "unloaded"
    assert 0 < listed["one"]["bytes"] < listed["base"]["bytes"] / 5
    assert listed["one"]["batching"] == listed["base"]["batching"]
    shown = (await client.get("/v1/models/one")).json()
    assert shown["root"] == "one"


async def test_an_adapter_is_unloaded_and_loaded_while_its_base_answers(
    client: httpx2.AsyncClient,
) -> None:
    expected = await said(client, "base", "A long one, please", max_tokens=300)
    own = await said(client, "one-merged")
    asked = asyncio.create_task(said(client, "base", "A long one, please", max_tokens=300))
    for _ in range(3):
        assert await said(client, "one") == own
        unloaded = await client.post("/admin/models/one/unload", headers=ADMIN)
        assert unloaded.json()["state"] == "unloaded"
    assert await asked == expected
    unloaded = await client.post("/admin/models/base/unload", headers=ADMIN)
    assert unloaded.json()["state"] == "unloaded"
    assert await said(client, "one") == own


async def test_an_adapter_that_does_not_fit_is_an_error_that_names_what(folder: Path) -> None:
    wide = write_chat(folder / "wide", hidden_size=128)
    write_adapter(folder / "broken", wide)
    broken = {**CHAT, "base": "base", "adapter": "path:broken"}
    models = catalog(folder, entries(broken=broken))
    async with served(models, cpu_engines()) as client:
        expected = await said(client, "one")
        answer = await ask(client, "broken")
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "model_load_failed"
        assert "`broken`" in error["message"]
        problem = r"down_proj\.lora_b is \(4, 128\), but its base needs \(4, 64\)"
        assert re.search(problem, error["message"])
        assert await said(client, "one") == expected


async def test_an_adapter_is_fetched_from_the_hub(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "repo", folder / "base")
    (adapter / "0000100_adapters.safetensors").write_bytes(b"earlier")
    far = {**CHAT, "base": "base", "adapter": "hub:org/far"}
    absent = {**CHAT, "base": "base", "adapter": "hub:org/absent"}
    with FakeHub({"org/far": adapter}).serving() as hub:
        place = Hub(endpoint=hub.url, cache=tmp_path / "cache")
        models = catalog(folder, entries(far=far, absent=absent))
        async with served(models, cpu_engines(place)) as client:
            assert await said(client, "far")
            answer = await ask(client, "absent")
            assert answer.status_code == 503
            assert "`absent`" in answer.json()["error"]["message"]
    fetched = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert fetched == {"adapter_config.json", "adapters.safetensors"}
