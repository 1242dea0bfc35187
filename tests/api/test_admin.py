"""/admin: load, unload and reload, for who holds the admin key and nobody else."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from httpx2 import AsyncClient, Response

from gateway.app import gateway
from gateway.errors import ModelLoadFailed
from tests.api.harness import chat, error_of, held
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served
from tests.waiting import until

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": "Bearer sesame"}
USER = {"authorization": "Bearer user"}
MODELS: dict[str, dict[str, Any]] = {
    "org/embed": {"kind": "embedding", "source": "path:.", "aliases": ["embed"]},
    "writer": {"kind": "chat", "source": "path:.", "pinned": True},
}
URL = "/v1/chat/completions"


@pytest.fixture
async def client(tmp_path: Path, engines: ScriptedEngines) -> AsyncIterator[AsyncClient]:
    """Serve with an admin key, and a key for users."""
    given: dict[str, Any] = {"models": tmp_path / "models.yaml", "admin_key": "sesame"}
    given["api_keys"] = "user"
    async with served(catalog(tmp_path, MODELS), engines, **given) as client:
        yield client


async def post(client: AsyncClient, path: str) -> Response:
    return await client.post(f"/admin/{path}", headers=ADMIN)


@pytest.mark.parametrize("path", ["/admin/reload", "/admin/models/writer/load"])
async def test_without_an_admin_key_there_is_no_admin(tmp_path: Path, path: str) -> None:
    async with served(catalog(tmp_path, MODELS), ScriptedEngines()) as client:
        answer = await client.post(path, headers=ADMIN)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("headers", [{}, USER, {"authorization": "Bearer sesam"}])
async def test_only_the_admin_key_opens_admin(client: AsyncClient, headers: dict[str, str]) -> None:
    assert (await client.post("/admin/reload", headers=headers)).status_code == 401
    assert (await client.get("/v1/models", headers=ADMIN)).status_code == 401
    assert (await client.get("/v1/models", headers=USER)).status_code == 200


async def test_a_model_is_loaded_and_unloaded_by_any_of_its_names(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    loaded = await post(client, "models/embed/load")
    assert loaded.status_code == 200
    assert (loaded.json()["id"], loaded.json()["state"]) == ("embed", "loaded")
    assert (await post(client, "models/org%2Fembed/load")).json()["state"] == "loaded"
    assert engines.loads == ["org/embed"]
    unloaded = await post(client, "models/org/embed/unload")
    assert (unloaded.status_code, unloaded.json()["state"]) == (200, "unloaded")
    assert engines.embedder.is_closed
    assert (await post(client, "models/embed/unload")).status_code == 200
    assert (await post(client, "models/nobody/load")).json()["error"]["code"] == "model_not_found"


async def test_a_pinned_model_in_use_is_unloaded_when_its_answer_ends(
    tmp_path: Path, engines: ScriptedEngines
) -> None:
    given: dict[str, Any] = {"admin_key": "sesame", "load_wait_s": 0.1}
    async with served(catalog(tmp_path, MODELS), engines, **given) as client:
        await client.post(URL, json=chat())
        async with held(engines.chat.gate, client.post(URL, json=chat())) as answering:
            unloading = await post(client, "models/writer/unload")
            assert (unloading.status_code, unloading.json()["state"]) == (202, "loaded")
        assert answering.result().json()["choices"][0]["message"]["content"] == "hi"
        await until(lambda: engines.chat.is_closed)
        assert (await client.get("/v1/models/writer")).json()["state"] == "unloaded"


async def test_a_load_that_failed_a_moment_ago_is_tried_at_once(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    engines.failing["writer"] = ModelLoadFailed("writer", "model.safetensors is cut off")
    assert (await post(client, "models/writer/load")).status_code == 500
    told = (await client.get("/v1/models/writer", headers=USER)).json()
    assert told["state"] == "failed"
    assert "model.safetensors is cut off" in told["error"]
    engines.failing.clear()
    answer = await client.post(URL, json=chat(), headers=USER)
    assert answer.json()["error"]["code"] == "model_load_failed"
    assert (await post(client, "models/writer/load")).json()["error"] is None
    assert engines.loads == ["writer"] * 2


async def test_a_reload_tells_what_changed(client: AsyncClient, tmp_path: Path) -> None:
    catalog(tmp_path, {"writer": {**MODELS["writer"], "max_context": 9}, "new": MODELS["writer"]})
    answer = await post(client, "reload")
    names = {"added": ["new"], "changed": ["writer"], "removed": ["org/embed"]}
    assert answer.json() == {"object": "reload", **names}
    listed = (await client.get("/v1/models", headers=USER)).json()["data"]
    assert {entry["id"] for entry in listed} == {"writer", "new"}


async def test_a_bad_file_changes_nothing_and_says_why(
    client: AsyncClient, tmp_path: Path, engines: ScriptedEngines
) -> None:
    await post(client, "models/writer/load")
    file = tmp_path / "models.yaml"
    file.write_text("version: 1\nmodels:\n  a: {kind: chta, source: 'path:.'}\n")
    error = error_of(await post(client, "reload"))
    assert error["code"] == "models_file_invalid"
    assert "models.yaml:3" in error["message"]
    answer = await client.post(URL, json=chat(), headers=USER)
    assert answer.status_code == 200
    assert engines.loads == ["writer"]
    file.unlink()
    assert (await post(client, "reload")).status_code == 400


async def test_a_reload_drops_no_request(
    client: AsyncClient, tmp_path: Path, engines: ScriptedEngines
) -> None:
    """An answer under way ends on the old spec; the next one is of the new."""
    asking = client.post(URL, json=chat("a longer text"), headers=USER)
    async with held(engines.chat.gate, asking) as answering:
        catalog(tmp_path, {"writer": {**MODELS["writer"], "max_context": 500}})
        assert (await post(client, "reload")).json()["changed"] == ["writer"]
    assert answering.result().json()["choices"][0]["message"]["content"] == "a longer text"
    assert (await client.post(URL, json=chat(), headers=USER)).status_code == 200
    assert engines.loads == ["writer", "writer"]


async def test_what_a_reload_wants_at_hand_is_loaded(
    client: AsyncClient, tmp_path: Path, engines: ScriptedEngines
) -> None:
    catalog(tmp_path, {"writer": {**MODELS["writer"], "preload": True}})
    await post(client, "reload")
    await until(lambda: engines.loads == ["writer"])


async def read_of(pipe: Path, models: dict[str, Any]) -> None:
    """Wait until somebody reads the pipe, and have them read this file."""
    while True:
        try:
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:  # nobody does
            await asyncio.sleep(0.01)
    with os.fdopen(end, "w") as file:
        json.dump({"version": 1, "models": models}, file)


async def test_of_two_reloads_at_once_the_later_reads_the_later_file(
    client: AsyncClient, tmp_path: Path
) -> None:
    """It waits for the earlier: otherwise the file that was read first might win."""
    file = tmp_path / "models.yaml"
    file.unlink()
    os.mkfifo(file)
    async with asyncio.timeout(60):
        earlier = asyncio.create_task(post(client, "reload"))
        later = asyncio.create_task(post(client, "reload"))
        await read_of(file, MODELS | {"early": MODELS["writer"]})
        done, _ = await asyncio.wait([earlier, later], return_when=asyncio.FIRST_COMPLETED)
        assert [each.result().json()["added"] for each in done] == [["early"]]
        await read_of(file, MODELS | {"late": MODELS["writer"]})
        last = ({earlier, later} - done).pop()
        assert (await last).json()["removed"] == ["early"]
    listed = (await client.get("/v1/models", headers=USER)).json()["data"]
    assert "late" in {entry["id"] for entry in listed}


async def test_a_file_that_does_not_answer_ends_its_reload_and_no_other(
    client: AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.yaml"
    written = file.read_text()
    file.unlink()
    os.mkfifo(file)
    async with asyncio.timeout(60):
        with pytest.raises(httpx2.TimeoutException):
            await client.post("/admin/reload", headers=ADMIN, timeout=0.2)
        monkeypatch.setattr(gateway, "READING_S", 0.3)
        answer = await post(client, "reload")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "models_file_invalid")
        assert "was not read within 0.3 seconds" in answer.json()["error"]["message"]
        file.unlink()
        file.write_text(written)
        assert (await post(client, "reload")).status_code == 200
