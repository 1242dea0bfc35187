"""Models whose files are wrong: each is told by name, and the others go on serving."""

import asyncio
import itertools
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
    (a_folder_in_place_of_a_file, WEIGHTS),
]
if os.geteuid() != 0:  # root reads everything
    SPOILT.append((unreadable, "ermission"))
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 4,
        "temperature": 0,
    },
    "embedding": {"input": "Hello!"},
}
PATHS = {"chat": "/v1/chat/completions", "embedding": "/v1/embeddings"}


KINDS = sorted(PATHS)


async def ask(client: httpx2.AsyncClient, kind: str, quality: str) -> httpx2.Response:
    body = {"model": f"{quality}-{kind}", **BODIES[kind]}
    return await client.post(PATHS[kind], json=body)


def write_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Write a good model of each kind, and as many as there are ways to spoil one."""
    write_chat(folder / "good-chat", seed=1)
    shutil.copytree(GOLDEN / "bert", folder / "good-embedding")
    for (spoil, _), kind in itertools.product(SPOILT, KINDS):
        shutil.copytree(folder / f"good-{kind}", folder / f"{spoil.__name__}-{kind}")
    qualities = ["good", *(spoil.__name__ for spoil, _ in SPOILT)]
    return {
        f"{quality}-{kind}": {"kind": kind, "source": f"path:{quality}-{kind}"}
        for quality, kind in itertools.product(qualities, KINDS)
    }


async def test_a_spoilt_model_is_told_by_name_while_the_others_go_on(tmp_path: Path) -> None:
    """Asked for at once with good ones; the list and /ready tell it too, and it can be mended."""
    read = catalog(tmp_path, write_models(tmp_path))
    for (spoil, _), kind in itertools.product(SPOILT, KINDS):
        spoil(tmp_path / f"{spoil.__name__}-{kind}")
    given: dict[str, Any] = {"warm_up": True, "cache_max_models": 60, "admin_key": "sesame"}
    async with served(read, cpu_engines(), **given) as client:
        for spoil, said in SPOILT:
            asked = [(kind, quality) for kind in KINDS for quality in ("good", spoil.__name__)] * 2
            answers = await asyncio.gather(*(ask(client, *each) for each in asked))
            for (kind, quality), answer in zip(asked, answers, strict=True):
                if quality == "good":
                    assert answer.status_code == 200, (spoil.__name__, answer.text)
                else:
                    check_told(answer, f"{quality}-{kind}", said)
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert listed["good-chat"]["state"] == listed["good-embedding"]["state"] == "loaded"
        assert (await client.get("/ready")).status_code == 200
        for (spoil, said), kind in itertools.product(SPOILT, KINDS):
            name = f"{spoil.__name__}-{kind}"
            assert listed[name]["state"] == "failed"
            assert said in listed[name]["error"]
            mend(tmp_path / name, tmp_path / f"good-{kind}")
            mended = await client.post(
                f"/admin/models/{name}/load", headers={"authorization": "Bearer sesame"}
            )
            assert mended.status_code == 200, mended.text
        for kind in KINDS:
            good, bad = await ask(client, kind, "good"), await ask(client, kind, "garbage")
            key = "choices" if kind == "chat" else "data"
            assert bad.json()[key] == good.json()[key]


def check_told(answer: httpx2.Response, name: str, said: str) -> None:
    assert answer.status_code == 500, (name, answer.text)
    error = answer.json()["error"]
    assert error["code"] == "model_load_failed"
    assert f"`{name}`" in error["message"]
    assert said in error["message"], name
    assert answer.headers["x-should-retry"] == "false"


def mend(folder: Path, good: Path) -> None:
    if folder.exists():
        folder.chmod(0o755)
        shutil.rmtree(folder)
    shutil.copytree(good, folder)


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
