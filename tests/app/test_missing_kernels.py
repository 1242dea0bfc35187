"""Quantized weights that the device has no kernel for: counted, and refused if too large.

The device is called CUDA and is this machine's CPU; MLX's quantized product is a stand-in.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from gateway.app.engines import MlxEngines
from gateway.engine import device
from gateway.engine.device import Device
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.engine.models.test_missing_kernels import NO_SHAPE, lack
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio


def write_quantized(folder: Path) -> Path:
    write_chat(folder)
    model, _ = load_model(folder)
    quantize(model, group_size=32, bits=4)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    file = folder / "config.json"
    packed = {"quantization": {"group_size": 32, "bits": 4}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **packed}))
    return folder


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MlxEngines:
    """Return those of a device without a kernel for anything quantized."""
    write_quantized(tmp_path / "small")
    engines = cpu_engines(cache_max_bytes=1 << 30, kv_allowance_tokens=64)
    monkeypatch.setattr(engines, "_device", Device.CUDA)
    monkeypatch.setattr(device, "configure", lambda *_: None)
    monkeypatch.setattr(MlxEngines, "memory_bytes", 1 << 32)
    lack(monkeypatch, "quantized_matmul", NO_SHAPE, lambda *_, **given: True)
    return engines


async def test_weights_are_counted_as_floating_and_refused_by_name_if_too_large(
    engines: MlxEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = (tmp_path / "small" / "model.safetensors").stat().st_size
    models = catalog(tmp_path, {"small": {"kind": "chat", "source": f"path:{tmp_path / 'small'}"}})
    body = {"model": "small", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    async with served(models, engines) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert (await client.get("/v1/models/small")).json()["bytes"] > 4 * stored
    monkeypatch.setattr(engines, "_budget_bytes", 2 * stored)
    async with served(models, engines) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "model_load_failed"
    assert "without kernels for its quantized weights" in answer.json()["error"]["message"]
