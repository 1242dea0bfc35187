"""EmbeddingGemma 2: a whole model's files, quantized ones, and what config.json may say.

Its text model's vectors are compared in test_engine.py.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.embedding.loading import read_embedding_context
from gateway.engine.models.checkpoint import Checkpoint, weights_bytes
from gateway.errors import EngineFailed, ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, read_weights, rewrite, tiny, write_weights
from tests.fuzz.checkpoints import NUMBERS

TEXT = GOLDEN / "embeddinggemma2"
WHOLE = GOLDEN / "embeddinggemma2-whole"
ROWS: list[list[int]] = json.loads((WHOLE / "rows.json").read_text())
LONG = [2, *(5 + i * 7 % 300 for i in range(600)), 1]
CONFIG: dict[str, Any] = json.loads((TEXT / "config.json").read_text())


def load(folder: Path, device: Device = Device.CPU, **settings: Any) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=device, **settings)


def whole(path: Path, **text: Any) -> Path:
    """Copy the whole model, with the text model's tokenizer; change keys of its text_config."""
    folder = tiny(path, "embeddinggemma2")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(WHOLE / name, folder / name)
    inner = json.loads((folder / "config.json").read_text())["text_config"]
    rewrite(folder / "config.json", text_config={**inner, **text})
    return folder


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("device", [Device.CPU, Device.METAL])
def test_a_whole_model_gets_the_vectors_of_transformers(
    tmp_path: Path, device: Device, prefix: str
) -> None:
    """One row has tokens that stand for images and sound, which are padding in texts."""
    folder = whole(tmp_path)
    weights = read_weights(folder)
    assert any(name.startswith("audio_tower.") for name in weights)
    assert any(name.startswith("vision_tower.") for name in weights)
    write_weights(folder, {prefix + name: array for name, array in weights.items()})
    engine = load(folder, device)
    assert np.abs(engine.embed(ROWS) - np.load(WHOLE / "vectors.npy")).max() <= 5e-6
    assert engine.nbytes() == load(TEXT, device).nbytes()
    assert weights_bytes(Checkpoint("tiny", folder), device, None) == engine.nbytes()


def test_media_tokens_are_plain_tokens_of_the_text_model_alone() -> None:
    vectors, expected = load(TEXT).embed(ROWS), np.load(WHOLE / "vectors.npy")
    assert np.abs(vectors[[0, 2]] - expected[[0, 2]]).max() <= 5e-6
    assert np.abs(vectors[1] - expected[1]).max() > 0.1


def test_texts_of_many_windows_are_alike_on_both_roads_and_in_bfloat16() -> None:
    rows = [LONG, LONG[:300], [2, 9, 1]]
    ours, theirs = (load(TEXT, device).embed(rows) for device in (Device.CPU, Device.METAL))
    assert np.abs(ours - theirs).max() <= 5e-6
    half = load(TEXT, Device.METAL, dtype="bfloat16").embed(rows)
    assert (ours * half).sum(1).min() > 0.999


def pack(folder: Path, bits: int) -> dict[str, mx.array]:
    """Quantize a whole model's linear layers and embeddings; return the weights that result."""
    weights, plain = read_weights(folder), {}
    apart: dict[str, Any] = {}
    for name, array in list(weights.items()):
        module = name.removesuffix(".weight")
        if array.ndim != 2 or not name.startswith("language_model."):
            continue
        if array.shape[1] % 32:  # mlx-vlm writes false for what it leaves
            apart[module] = False
            continue
        own = 8 if "ple_block" in name else bits
        apart[module] = {"group_size": 32, "bits": own}
        parts = mx.quantize(array, group_size=32, bits=own)
        weights |= dict(zip((name, f"{module}.scales", f"{module}.biases"), parts, strict=True))
        plain[name] = mx.dequantize(*parts, group_size=32, bits=own)
    write_weights(folder, weights)
    rewrite(folder / "config.json", quantization={"group_size": 32, "bits": bits, **apart})
    return plain


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_gets_the_vectors_of_its_own_weights(tmp_path: Path, bits: int) -> None:
    packed, plain = whole(tmp_path / "packed"), whole(tmp_path / "plain")
    weights = pack(packed, bits)
    assert "language_model.embed_tokens.weight" in weights
    assert "language_model.layers.0.ple_block.per_layer_input_gate.weight" in weights
    write_weights(plain, read_weights(plain) | weights)
    expected = load(plain).embed(ROWS)
    for device in (Device.CPU, Device.METAL):
        engine = load(packed, device)
        assert np.abs(engine.embed(ROWS) - expected).max() <= 5e-6
        assert weights_bytes(Checkpoint("tiny", packed), device, None) == engine.nbytes()
    assert engine.nbytes() < load(plain).nbytes() * (0.6 if bits == 8 else 0.5)


WIDE = {"head_dim": 16, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"per_layer_config": {"01": WIDE, "03": WIDE}},
        {"hidden_activation": None, "rms_norm_eps": None, "attention_bias": None},
        {"layer_types": [*CONFIG["layer_types"][:3], "sliding_attention"]},  # the last is full
        {"partial_rotary_factor": 0.5, "rope_traditional": True, "enable_moe_block": True},
        {"num_kv_shared_layers": 2, "attention_k_eq_v": True, "global_head_dim": 4},
    ],
)
def test_other_spellings_of_a_config_give_the_same_vectors(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Sources: the published config.json, and transformers' configuration_embedding_gemma2.py."""
    folder = tiny(tmp_path, "embeddinggemma2")
    rewrite(folder / "config.json", **changes)
    assert np.array_equal(load(folder).embed(ROWS), load(TEXT).embed(ROWS))


ROPE = CONFIG["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"model_type": "gemma4_text"}, "model_type 'gemma4_text'"),
        ({"sliding_window": -1}, "sliding_window -1"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": None}, "config.json has an invalid value"),
        ({"per_layer_config": {"1": {**WIDE, "num_attention_heads": 2}}}, "per_layer_config"),
        ({"per_layer_config": {"last": WIDE}}, "last"),
        ({"per_layer_config": {}}, "self_attn"),
        ({"rope_parameters": {"full_attention": ROPE["full_attention"]}}, "rope_parameters"),
        (
            {"rope_parameters": {**ROPE, "full_attention": {"rope_type": "yarn", "rope_theta": 1}}},
            "rope_parameters .*yarn",
        ),
        ({"embedding_dim": 32}, "embedding_projection"),
        ({"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}, r"layers\.4\."),
    ],
)
def test_a_config_that_would_give_wrong_vectors_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=named):
        load(whole(tmp_path, **changes))


def test_texts_end_where_the_card_says_and_not_at_all_positions(tmp_path: Path) -> None:
    """The published files state 262,144 positions and no max_seq_length."""
    for folder in (whole(tmp_path, max_position_embeddings=262_144),):
        rewrite(folder / "tokenizer_config.json", model_max_length=int(1e30))
        assert load(folder).max_tokens == 8192
        assert read_embedding_context(folder, None, None, None) == 8192
        assert load(folder, max_context=512).max_tokens == 512


KEYS = st.sampled_from(
    [
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "global_head_dim", "num_global_key_value_heads"),
        *("vocab_size", "max_position_embeddings", "rms_norm_eps", "sliding_window"),
        *("sliding_window_pattern", "layer_types", "per_layer_config", "rope_parameters"),
        *("hidden_size_per_layer_input", "embedding_dim", "pad_token_id", "hidden_activation"),
        *("attention_bias", "model_type", "quantization", "text_config", "image_token_id"),
        *("num_kv_shared_layers", "attention_k_eq_v", "enable_moe_block", "rope_traditional"),
    ]
)
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-3, 70),
    st.dictionaries(st.sampled_from(["1", "3", "x", "full_attention"]), st.just(WIDE)),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", 3]), max_size=5),
)


@pytest.mark.generator
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1, max_size=2), is_inner=st.booleans())
@example(changes={"rope_traditional": True}, is_inner=True)
@example(changes={"num_kv_shared_layers": 2, "attention_k_eq_v": True}, is_inner=True)
def test_a_changed_config_gives_a_model_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, changes: Mapping[str, Any], is_inner: bool
) -> None:
    folder = whole(tmp_path_factory.mktemp("m"), **(changes if is_inner else {}))
    if not is_inner:
        rewrite(folder / "config.json", **changes)
    try:
        engine = load(folder)
        vectors = engine.embed([row for row in ROWS if len(row) <= engine.max_tokens])
    except (ModelLoadFailed, EngineFailed):
        return
    assert np.isfinite(vectors).all()
    assert vectors.shape[1] == 24
