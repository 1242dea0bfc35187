"""A model's size before it is loaded: the bytes that its engine measures afterwards."""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.utils import load_model, quantize_model, save_model

from benchmarks.loading import load_embedding, load_generation
from gateway.engine.device import Device
from gateway.engine.models.checkpoint import TOWER, Checkpoint, kv_bytes, weights_bytes
from gateway.engine.models.context import full_attention_share
from gateway.errors import ModelLoadFailed
from tests.checkpoints import HYBRID, LLAMA, SLIDING, STATEFUL, write_chat

GOLDEN = Path(__file__).parents[2] / "golden"


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint("mine", folder)


def measured(folder: Path, dtype: str | None = None) -> int:
    return load_generation(folder, name="mine", device=Device.CPU, dtype=dtype).nbytes()


def quantized(folder: Path, bits: int = 4, **own: Any) -> Path:
    """Quantize a checkpoint where it is, as mlx_lm.convert does."""
    model, config = load_model(folder)
    model, config = quantize_model(model, config, group_size=32, bits=bits, **own)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_size_is_what_the_engine_measures(tmp_path: Path, dtype: str | None) -> None:
    folder = write_chat(tmp_path / "plain")
    assert weights_bytes(checkpoint(folder), Device.CPU, dtype) == measured(folder, dtype)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_quantized_weights_count_as_what_they_become(tmp_path: Path, bits: int) -> None:
    """float32 on a CPU; on a GPU they stay as they are."""
    folder = quantized(write_chat(tmp_path / "packed"), bits)
    assert weights_bytes(checkpoint(folder), Device.CPU, None) == measured(folder)
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    packed = sum(array.nbytes for array in arrays.values())
    assert weights_bytes(checkpoint(folder), Device.METAL, None) == packed


def test_a_layer_may_have_a_group_size_of_its_own(tmp_path: Path) -> None:
    own = {"group_size": 64, "bits": 4}

    def predicate(path: str, module: Any) -> Any:
        return own if "down_proj" not in path and "lm_head" in path else True

    folder = quantized(write_chat(tmp_path / "mixed"), quant_predicate=predicate)
    assert weights_bytes(checkpoint(folder), Device.CPU, None) == measured(folder)


def test_an_embedding_model_is_measured_alike() -> None:
    folder = GOLDEN / "bert"
    engine = load_embedding(folder, name="mine", device=Device.CPU)
    size = weights_bytes(checkpoint(folder), Device.CPU, None)
    assert engine.nbytes() <= size <= engine.nbytes() * 1.2


def test_kv_is_counted_for_the_given_tokens_but_at_most_the_context(tmp_path: Path) -> None:
    """Two layers and one being copied, two heads of 16, keys and values, float32 on a CPU."""
    folder = checkpoint(write_chat(tmp_path / "plain"))
    a_token = 2 * 3 * 2 * 16 * 4
    assert kv_bytes(folder, Device.CPU, None, 100) == 100 * a_token
    assert kv_bytes(folder, Device.CPU, "bfloat16", 100) == 50 * a_token
    assert kv_bytes(folder, Device.CPU, None, 10**9) == 4096 * a_token


def test_a_config_in_other_words_has_no_kv_to_count(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "plain", **STATEFUL)
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    assert kv_bytes(checkpoint(folder), Device.CPU, None, 100) == 0


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, kept: int) -> None:
    file = write_chat(tmp_path / "plain") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelLoadFailed, match=r"model.safetensors is not a whole safetensors"):
        weights_bytes(checkpoint(file.parent), Device.CPU, None)


@pytest.mark.parametrize("header", [b"[]", b"{}", b"not json", b'{"a": {}}', b'{"a": 1}'])
def test_a_header_that_is_none_is_named(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadFailed, match=r"model.safetensors"):
        weights_bytes(checkpoint(tmp_path), Device.CPU, None)


@pytest.mark.parametrize(
    "index", [None, ["a"], {"a": 1}, {"a": ["x"]}, {"a": 1, "b": "x"}, {"a": "x" * 5000}, {}]
)
def test_an_index_that_names_no_files_is_named(tmp_path: Path, index: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors\.index\.json"):
        Checkpoint("tiny", tmp_path).all_tensors()


def test_quantized_weights_without_a_group_size_are_refused(tmp_path: Path) -> None:
    folder = quantized(write_chat(tmp_path / "packed"))
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if "quantization" not in key}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadFailed, match=r"config.json does not say the group_size"):
        weights_bytes(checkpoint(folder), Device.CPU, None)


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({}, 1.0),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 0.5),
        ({"sliding_window_pattern": 4}, 0.25),
        ({"full_attention_interval": 4}, 0.25),
    ],
)
def test_a_share_of_the_layers_keeps_every_token(config: dict[str, Any], share: float) -> None:
    assert full_attention_share(config) == share


def write_with_tower(folder: Path, names: Sequence[str], **config: Any) -> Path:
    """Write a chat model with arrays of these modules beside it, one of them quantized."""
    write_chat(folder, **config)
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    for name in names:
        weights[f"{name}.layers.0.fc1.weight"] = mx.ones((64, 64))
        weights[f"{name}.layers.0.fc2.weight"] = mx.zeros((64, 8), mx.uint32)
        weights[f"{name}.layers.0.fc2.scales"] = mx.ones((64, 2))
        weights[f"{name}.layers.0.fc2.biases"] = mx.ones((64, 2))
    mx.save_safetensors(str(file), weights)
    return folder


SIGHTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gemma3": (
        {"model_type": "gemma3", "text_config": {**LLAMA, **SLIDING, "vocab_size": 1026}},
        ("vision_tower", "multi_modal_projector"),
    ),
    "qwen3_5": (
        {
            "model_type": "qwen3_5",
            "text_config": {
                **LLAMA,
                **HYBRID,
                "model_type": "qwen3_5_text",
                "num_experts": 0,
                "vocab_size": 1026,
            },
        },
        ("model.visual", "vision_tower", "mtp"),
    ),
}


@pytest.mark.parametrize("name", SIGHTED)
def test_towers_that_no_class_holds_are_not_counted(tmp_path: Path, name: str) -> None:
    config, towers = SIGHTED[name]
    blind = weights_bytes(checkpoint(write_chat(tmp_path / "blind", **config)), Device.CPU, None)
    folder = write_with_tower(tmp_path / "sighted", towers, **config)
    assert weights_bytes(checkpoint(folder), Device.CPU, None) == blind == measured(folder)
    assert weights_bytes(checkpoint(folder), Device.METAL, None) == blind


def test_one_class_of_mlx_lm_holds_towers_and_its_are_counted(tmp_path: Path) -> None:
    """Any other that assigns a module by such a name would be counted as too small."""
    sighted = {
        file.stem
        for file in Path(mlx_lm.models.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if re.fullmatch(TOWER, node.attr)
    }
    assert sighted == {"muse_spark"}
    folder = write_with_tower(tmp_path, ["vision_tower"])
    assert "vision_tower.layers.0.fc1.weight" not in checkpoint(folder).tensors()
    (folder / "config.json").write_text('{"model_type": "muse_spark"}')
    assert "vision_tower.layers.0.fc1.weight" in checkpoint(folder).tensors()
