"""GGUF files served over HTTP."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint, Listing, kv_bytes, weights_bytes
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.engine.models.test_checkpoint import quantized
from tests.gguf_files import write_model
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}


def entry(source: str) -> dict[str, Any]:
    return {"tiny": {"kind": "chat", "source": source, "sampling": {"temperature": 0}}}


async def asked(client: httpx2.AsyncClient) -> str:
    answer = await client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["message"]["content"]
    return said


async def test_a_file_is_a_model(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf")
    given: dict[str, Any] = {"self_test": True, "self_test_folder": tmp_path / "verdicts"}
    engines = cpu_engines()
    async with served(catalog(tmp_path, entry("path:tiny.gguf")), engines, **given) as client:
        assert await asked(client)
        shown = (await client.get("/v1/models/tiny")).json()
        assert shown["batching"]["self_test"] == "passed"


@pytest.mark.parametrize("source", ["path:tiny.gguf", "path:folder"])
async def test_weights_stay_quantized_where_the_budget_has_no_room(
    tmp_path: Path, source: str
) -> None:
    """A quantized folder stays so too. A warning is logged only where float32 has no room."""
    checkpoint: Listing
    if source == "path:folder":
        checkpoint = Checkpoint("tiny", quantized(write_chat(tmp_path / "folder")))
    else:
        checkpoint = GgufCheckpoint("tiny", write_model(tmp_path / "tiny.gguf", "qwen2"))
    kv = kv_bytes(checkpoint, Device.CPU, None, 512)
    needed = weights_bytes(checkpoint, Device.CPU, None) + kv
    texts, warned = [], []
    for budget in (needed + 4 * kv, needed - 1):
        engines = cpu_engines(kv_allowance_tokens=512, cache_max_bytes=budget)
        with structlog.testing.capture_logs() as logged:
            async with served(
                catalog(tmp_path, entry(source)), engines, cache_max_bytes=budget
            ) as client:
                texts.append(await asked(client))
                held = (await client.get("/v1/models/tiny")).json()["bytes"]
        assert held <= budget
        warned.append([e["model"] for e in logged if e["event"] == "weights_stay_quantized"])
    assert texts[0] == texts[1]
    assert warned == [[], ["tiny"]]
