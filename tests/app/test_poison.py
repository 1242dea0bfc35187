"""Models whose files are wrong: each is told by name, and the others go on serving."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from gateway.engine.hub import Hub
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
GOLDEN = Path(__file__).parents[1] / "golden"
NO_HUB = Hub(endpoint="http://127.0.0.1:9")
WEIGHTS = "model.safetensors"
Spoil = Callable[[Path], object]


def garbage(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 5000)


def cut(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


def another_size(folder: Path) -> None:
    """Write a config of another model: its weights have other shapes."""
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "perpetuum"}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def not_numbers(folder: Path) -> None:
    arrays: Any = mx.load(str(folder / WEIGHTS))
    spoilt = {name: mx.full(array.shape, float("nan")) for name, array in arrays.items()}
    mx.eval(spoilt)
    mx.save_safetensors(str(folder / WEIGHTS), spoilt)


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def unreadable(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    folder.chmod(0)


def a_folder_in_place_of_a_file(folder: Path) -> None:
    """Nobody can read this, root included."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


SPOILT: list[tuple[Spoil, str]] = [
    (garbage, WEIGHTS),
    (cut, WEIGHTS),
    (no_weights, WEIGHTS),
    (no_tokenizer, "tokenizer"),
    (broken_tokenizer, "tokenizer"),
    (another_size, "shape"),
    (unknown_type, "perpetuum"),
    (no_config, "config.json"),
    (broken_config, "config.json"),
    (not_numbers, "not "),
    (gone, "no folder"),
    (unreadable, "ermission"),
    (a_folder_in_place_of_a_file, WEIGHTS),
]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 4,
        "temperature": 0,
    },
    "embedding": {"input": "Hello!"},
}
PATHS = {"chat": "/v1/chat/completions", "embedding": "/v1/embeddings"}


async def ask(client: httpx2.AsyncClient, kind: str, quality: str) -> httpx2.Response:
    body = {"model": f"{quality}-{kind}", **BODIES[kind]}
    return await client.post(PATHS[kind], json=body)


@pytest.mark.parametrize("kind", ["chat", "embedding"])
@pytest.mark.parametrize(("spoil", "said"), SPOILT, ids=[each.__name__ for each, _ in SPOILT])
async def test_a_spoilt_model_is_told_by_name_while_the_others_go_on(
    tmp_path: Path, spoil: Spoil, said: str, kind: str
) -> None:
    """Asked for at once with good ones; the list and /ready tell it too, and it can be mended."""
    models = {}
    for quality in ("good", "bad"):
        write_chat(tmp_path / f"{quality}-chat", seed=1)
        shutil.copytree(GOLDEN / "bert", tmp_path / f"{quality}-embedding")
        for each in PATHS:
            models[f"{quality}-{each}"] = {"kind": each, "source": f"path:{quality}-{each}"}
    given: dict[str, Any] = {"warm_up": True, "cache_max_models": 4, "admin_key": "sesame"}
    read = catalog(tmp_path, models)
    folder = tmp_path / f"bad-{kind}"
    spoil(folder)
    async with served(read, cpu_engines(), **given) as client:
        asked = [(each, "good") for each in PATHS] + [(kind, "bad")]
        answers = await asyncio.gather(*(ask(client, *each) for each in asked * 3))
        for (each, quality), answer in zip(asked * 3, answers, strict=True):
            assert answer.status_code == (500 if quality == "bad" else 200), (each, answer.text)
            if quality == "bad":
                error = answer.json()["error"]
                assert error["code"] == "model_load_failed"
                assert f"`bad-{kind}`" in error["message"]
                assert said in error["message"]
                assert answer.headers["x-should-retry"] == "false"
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert listed[f"bad-{kind}"]["state"] == "failed"
        assert said in listed[f"bad-{kind}"]["error"]
        assert listed["good-chat"]["state"] == listed["good-embedding"]["state"] == "loaded"
        assert (await client.get("/ready")).status_code == 200
        if folder.exists():
            folder.chmod(0o755)
            shutil.rmtree(folder)
        shutil.copytree(tmp_path / f"good-{kind}", folder)
        mended = await client.post(
            f"/admin/models/bad-{kind}/load", headers={"authorization": "Bearer sesame"}
        )
        assert mended.status_code == 200, mended.text
        good, bad = await ask(client, kind, "good"), await ask(client, kind, "bad")
        key = "choices" if kind == "chat" else "data"
        assert bad.json()[key] == good.json()[key]


@pytest.mark.parametrize("kind", ["chat", "embedding"])
async def test_without_a_warm_up_weights_that_are_no_numbers_fail_the_request(
    tmp_path: Path, kind: str
) -> None:
    """By name, rather than answer nonsense."""
    if kind == "chat":
        write_chat(tmp_path / "bad-chat")
    else:
        shutil.copytree(GOLDEN / "bert", tmp_path / "bad-embedding")
    not_numbers(tmp_path / f"bad-{kind}")
    models = {f"bad-{kind}": {"kind": kind, "source": f"path:bad-{kind}"}}
    async with served(catalog(tmp_path, models), cpu_engines()) as client:
        answer = await ask(client, kind, "bad")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_failed"
        assert f"`bad-{kind}`" in answer.json()["error"]["message"]
