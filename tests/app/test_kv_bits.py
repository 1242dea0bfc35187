"""A model with `kv_bits` over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio


def entry(folder: str, **given: Any) -> dict[str, Any]:
    return {"kind": "chat", "source": f"path:{folder}", "sampling": {"temperature": 0}, **given}


async def asked(client: httpx2.AsyncClient, words: str) -> httpx2.Response:
    messages = [{"role": "user", "content": words}]
    body = {"model": "small", "max_tokens": 12, "messages": messages}
    return await client.post("/v1/chat/completions", json=body)


async def test_answers_share_batches_and_prefixes(tmp_path: Path) -> None:
    """Its self-test passes, eight at once say what each says alone, and a prompt asked again is
    taken from what was kept.
    """
    write_chat(tmp_path / "small", head_dim=32)
    models = catalog(tmp_path, {"small": entry("small", kv_bits=8)})
    given: dict[str, Any] = {"self_test": True, "self_test_folder": tmp_path / "verdicts"}
    engines = cpu_engines(prefix_cache_bytes=1 << 24)
    words = [f"{'Where is the library? ' * 20} {i}" for i in range(8)]
    async with served(models, engines, **given) as client:
        alone = [(await asked(client, each)).json() for each in words]
        shown = (await client.get("/v1/models/small")).json()
        together = [
            each.json() for each in await asyncio.gather(*(asked(client, w) for w in words))
        ]
    assert shown["batching"] == {"rows": "together", "self_test": "passed", "problem": None}
    said = [
        [each["choices"][0]["message"]["content"] for each in all_] for all_ in (alone, together)
    ]
    assert said[0] == said[1]
    kept = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in together]
    assert min(kept) >= 64


async def test_a_model_that_cannot_have_it_is_refused_by_name(tmp_path: Path) -> None:
    write_chat(tmp_path / "small")
    models = catalog(tmp_path, {"small": entry("small", kv_bits=4)})
    async with served(models, cpu_engines()) as client:
        answer = await asked(client, "Hi")
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["code"] == "model_load_failed"
    assert "The model `small` failed to load: its heads have 16 numbers" in error["message"]
