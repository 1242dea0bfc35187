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


def weights(change: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def without(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def configured(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change(config)}))

    return spoil


def not_numbers(folder: Path) -> None:
    arrays: Any = mx.load(str(folder / WEIGHTS))
    spoilt = {name: mx.full(array.shape, float("nan")) for name, array in arrays.items()}
    mx.eval(spoilt)
    mx.save_safetensors(str(folder / WEIGHTS), spoilt)


def a_folder_in_place_of_a_file(folder: Path) -> None:
    """Nobody can read this, root included."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


SPOILT: dict[str, tuple[Spoil, str]] = {
    "garbage": (weights(lambda _: b"\xff" * 5000), WEIGHTS),
    "cut": (weights(lambda whole: whole[:-100]), WEIGHTS),
    "no-weights": (without(WEIGHTS), WEIGHTS),
    "no-tokenizer": (without("tokenizer.json"), "tokenizer"),
    "broken-tokenizer": (written("tokenizer.json", '{"version": "1.0"'), "tokenizer"),
    "another-size": (
        configured(lambda config: {"intermediate_size": 2 * config["intermediate_size"]}),
        "shape",
    ),
    "unknown-type": (configured(lambda _: {"model_type": "perpetuum"}), "perpetuum"),
    "no-config": (without("config.json"), "config.json"),
    "broken-config": (written("config.json", "{"), "config.json"),
    "not-numbers": (not_numbers, "not "),
    "gone": (shutil.rmtree, "no folder"),
    "folder": (a_folder_in_place_of_a_file, WEIGHTS),
}
if os.geteuid() != 0:  # root reads everything
    SPOILT["unreadable"] = (lambda folder: folder.chmod(0), "ermission")
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
    for spoilt, kind in itertools.product(SPOILT, KINDS):
        shutil.copytree(folder / f"good-{kind}", folder / f"{spoilt}-{kind}")
    return {
        f"{quality}-{kind}": {"kind": kind, "source": f"path:{quality}-{kind}"}
        for quality, kind in itertools.product(["good", *SPOILT], KINDS)
    }


async def test_a_spoilt_model_is_told_by_name_while_the_others_go_on(tmp_path: Path) -> None:
    """Asked for at once with good ones; the list and /ready tell it too, and it can be mended."""
    read = catalog(tmp_path, write_models(tmp_path))
    for (name, (spoil, _)), kind in itertools.product(SPOILT.items(), KINDS):
        spoil(tmp_path / f"{name}-{kind}")
    given: dict[str, Any] = {"warm_up": True, "cache_max_models": 60, "admin_key": "sesame"}
    async with served(read, cpu_engines(), **given) as client:
        for spoilt, (_, said) in SPOILT.items():
            asked = [(kind, quality) for kind in KINDS for quality in ("good", spoilt)] * 2
            answers = await asyncio.gather(*(ask(client, *each) for each in asked))
            for (kind, quality), answer in zip(asked, answers, strict=True):
                if quality == "good":
                    assert answer.status_code == 200, (spoilt, answer.text)
                else:
                    check_told(answer, f"{quality}-{kind}", said)
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert listed["good-chat"]["state"] == listed["good-embedding"]["state"] == "loaded"
        assert (await client.get("/ready")).status_code == 200
        for (spoilt, (_, said)), kind in itertools.product(SPOILT.items(), KINDS):
            name = f"{spoilt}-{kind}"
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
