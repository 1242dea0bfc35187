"""A load that failed holds nothing: neither the arrays it read nor those computed from them."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def without_template(folder: Path) -> None:
    """Remove the chat template, as base models on the hub have none."""
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    file.write_text(json.dumps(config), encoding="utf-8")


def not_numbers(folder: Path) -> None:
    """Found by the first pass, when all weights have been read."""
    weights = mx.load(str(folder / "model.safetensors"))
    broken = tree_map(lambda array: mx.full(array.shape, float("nan")), weights)
    mx.save_safetensors(str(folder / "model.safetensors"), broken)


@pytest.mark.parametrize("spoil", [without_template, not_numbers])
async def test_a_load_that_fails_lets_go_of_its_weights(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """The error that is kept for those who ask again has no frames that would hold them."""
    write_chat(tmp_path / "bad", hidden_size=256, intermediate_size=1024)
    spoil(tmp_path / "bad")
    models = {"bad": {"kind": "chat", "source": "path:bad"}}
    engines = cpu_engines()
    gc.collect()
    before = mx.get_active_memory()
    async with served(catalog(tmp_path, models), engines, warm_up=True) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "bad", **ASKED})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "model_load_failed"
        gc.collect()
        assert engines.active_bytes - before < 100_000, "the weights are 9 MB"


async def test_a_missing_template_is_found_before_the_weights_are_read(tmp_path: Path) -> None:
    """A base model's gigabytes are not read for an answer that its small files give."""
    write_chat(tmp_path / "base", hidden_size=512, intermediate_size=2048)
    without_template(tmp_path / "base")
    models = {"base": {"kind": "chat", "source": "path:base"}}
    engines = cpu_engines()
    async with served(catalog(tmp_path, models), engines) as client:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        answer = await client.post("/v1/chat/completions", json={"model": "base", **ASKED})
        assert answer.status_code == 500
        assert "chat template" in answer.json()["error"]["message"]
        assert mx.get_peak_memory() - before < 1_000_000
