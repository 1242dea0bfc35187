"""A GGUF file listed as the model that mlx-lm has of it, or refused by name."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint, kv_bytes, must_stay_packed, weights_bytes
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, open_checkpoint
from gateway.errors import ModelLoadFailed
from tests.engine.models.gguf.opening import open_decoder_of
from tests.gguf_files import (
    CONTEXT,
    KINDS,
    LAYERS,
    Number,
    Stored,
    describe,
    floats,
    weigh,
    write_gguf,
    write_model,
)


def checkpoint(tmp_path: Path, architecture: str = "llama", **changed: Any) -> GgufCheckpoint:
    return GgufCheckpoint("mine", write_model(tmp_path / "a.gguf", architecture, **changed))


def test_a_path_says_whether_it_is_a_folder_or_a_file(tmp_path: Path) -> None:
    """Its name alone decides, in upper or lower case."""
    path = write_model(tmp_path / "a.GGUF")
    assert isinstance(open_checkpoint("mine", path), GgufCheckpoint)
    assert isinstance(open_checkpoint("mine", tmp_path), Checkpoint)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0, "original_context_length": 128},
         {"type": "linear", "factor": 4.0}),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True},
         {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
          "beta_fast": 32.0, "beta_slow": 1.0}),
        ({"type": "yarn", "factor": 2.0, "original_context_length": 64, "yarn_beta_fast": 16.0,
          "yarn_beta_slow": 2.0},
         {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
          "beta_fast": 16.0, "beta_slow": 2.0}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("architecture", KINDS)
def test_rotations_are_scaled_as_the_file_says(
    tmp_path: Path, architecture: str, keys: dict[str, Any], scaling: Any
) -> None:
    named = {f"{architecture}.rope.scaling.{key}": value for key, value in keys.items()}
    file = checkpoint(tmp_path, architecture, **named)
    assert file.config()["rope_scaling"] == scaling
    open_decoder_of(file)


def test_a_window_bounds_the_context(tmp_path: Path) -> None:
    """Texts within the window are attended to whole, and longer ones are not served."""
    file = checkpoint(tmp_path, "llama", **{"llama.attention.sliding_window": 96})
    assert file.config()["max_position_embeddings"] == 96
    file = checkpoint(tmp_path, "llama", **{"llama.attention.sliding_window": 4096})
    assert file.config()["max_position_embeddings"] == CONTEXT


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    own = {"rope.dimension_count": 32, "expert_count": 0, "attention.causal": True}
    keys: dict[str, Any] = {f"llama.{key}": value for key, value in own.items()}
    keys |= {"general.type": "model", "split.count": Number("H", 0), "another.key": 7}
    checkpoint(tmp_path, **keys)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"general.architecture": "gemma3"}, "is 'gemma3'; .* are llama, qwen2, qwen3"),
        ({"general.architecture": ["llama"]}, "architecture is"),
        ({"general.type": "mmproj"}, "general.type is 'mmproj': it holds no model"),
        ({"split.count": Number("H", 3)}, "one of 3 pieces: join them with"),
        ({"general.quantization_version": 1}, "quantization_version is 1"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": "2"}, "llama.block_count is '2'"),
        ({"llama.block_count": (1 << 31) - 1}, "no tensors for 2,147,483,647 layers"),
        ({"llama.block_count": 3}, "weights are missing: blk.2.attn_k.weight, .* and 4 more"),
        ({"llama.block_count": 1}, "weights are unknown: blk.1.attn_k.weight"),
        ({"llama.embedding_length": 128}, "token_embd.weight is .263, 256., .* asks for .263, 128"),
        ({"llama.feed_forward_length": [512, 512]}, "feed_forward_length is .512, 512."),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count": 7}, "7 heads cannot share 4"),
        ({"llama.attention.value_length": 64}, "of different lengths"),
        ({"llama.rope.dimension_count": 16}, "a part of each head"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "no llama.attention.layer_norm_rms_eps"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
         "no llama.rope.scaling.original_context_length"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor is 4.0, .* not served"),
        ({"llama.rope.scale_linear": 4.0}, "llama.rope.scale_linear is 4.0"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not served here"),
        ({"llama.attention.causal": True, "llama.pooling_type": 3}, "llama.pooling_type is 3"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"qwen2.attention.key_length": 64, "qwen2.attention.value_length": 64},
         "8 heads of 64 do not make 256 dimensions"),
        ({"qwen3.pooling_type": 3}, "qwen3.pooling_type is 3"),
    ],
)  # fmt: skip
def test_what_is_missing_senseless_or_not_served_is_named(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    architecture = next(iter(changed)).partition(".")[0]
    with pytest.raises(ModelLoadFailed, match=reason):
        checkpoint(tmp_path, architecture if architecture in KINDS else "llama", **changed)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"token_embd.weight": None}, "missing: token_embd.weight"),
        ({"blk.0.attn_q.bias": floats("F32", np.zeros(256, np.float32))},
         "missing: blk.0.attn_k.bias"),
        ({"blk.0.attn_qkv.weight": floats("F32", np.zeros((2, 2), np.float32))},
         "unknown: blk.0.attn_qkv.weight"),
        ({"token_embd.weight": floats("F32", np.zeros(263 * 256, np.float32))},
         "token_embd.weight is .67328,., where"),
        ({"blk.0.attn_q.weight": Stored("MXFP4", (256, 256), bytes(256 * 8 * 17))},
         "weights of types that are not read here: MXFP4"),
        ({"rope_freqs.weight": floats("F32", np.ones(15, np.float32))}, "rope_freqs.weight is F32"),
        ({"rope_freqs.weight": floats("F32", np.zeros(16, np.float32))}, "not positive and finite"),
        ({"rope_freqs.weight": floats("F16", np.ones(16, np.float32))}, "is F16"),
    ],
)  # fmt: skip
def test_other_tensors_than_the_models_are_named(
    tmp_path: Path, changed: dict[str, Stored | None], reason: str
) -> None:
    tensors = {**weigh("llama"), **changed}
    there = {name: stored for name, stored in tensors.items() if stored is not None}
    path = write_gguf(tmp_path / "a.gguf", describe("llama"), there)
    with pytest.raises(ModelLoadFailed, match=reason):
        open_decoder_of(GgufCheckpoint("mine", path))


def test_factors_of_rotations_are_llamas_alone(tmp_path: Path) -> None:
    """Others turn other pairs of dimensions."""
    tensors = {**weigh("qwen3"), "rope_freqs.weight": floats("F32", np.ones(64, np.float32))}
    path = write_gguf(tmp_path / "a.gguf", describe("qwen3"), tensors)
    with pytest.raises(ModelLoadFailed, match=r"unknown: rope_freqs\.weight"):
        GgufCheckpoint("mine", path)


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(
    ("device", "dtype", "is_packed"),
    [
        (Device.CPU, None, False),
        (Device.CPU, "bfloat16", False),
        (Device.CPU, None, True),
        (Device.METAL, None, True),
        (Device.METAL, "float32", True),
    ],
)
def test_the_size_is_known_before_anything_is_read(
    tmp_path: Path, architecture: str, device: Device, dtype: str | None, is_packed: bool
) -> None:
    file = checkpoint(tmp_path, architecture)
    model = open_decoder_of(file, device=device, dtype=dtype, is_packed=is_packed)
    named: Any = tree_flatten(model.parameters())
    held = sum(array.nbytes for _, array in named)
    assert weights_bytes(file, device, dtype, is_packed=is_packed) == held


def test_what_a_gpu_holds_is_listed_as_mlx_lm_would_write_it(tmp_path: Path) -> None:
    """Names, shapes and types: the self-test's digest depends on them."""
    file = checkpoint(tmp_path)
    model: Any = open_decoder_of(file, device=Device.METAL)
    named: Any = tree_flatten(model.parameters())
    kinds = {mx.uint32: "U32", mx.float16: "F16"}
    assert {name: (kinds[array.dtype], tuple(array.shape)) for name, array in named} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in file.tensors().items()
    }


def test_kv_is_counted_by_the_config(tmp_path: Path) -> None:
    file = checkpoint(tmp_path)
    assert kv_bytes(file, Device.CPU, None, 100) == 100 * 2 * 3 * 4 * 32 * 4
    assert kv_bytes(file, Device.METAL, None, 100) == 100 * 2 * 3 * 4 * 32 * 2


def test_weights_stay_quantized_on_a_cpu_only_where_there_is_no_room(tmp_path: Path) -> None:
    """They are slower there, and better than none; for an unquantized file there is no choice."""
    file = checkpoint(tmp_path)
    unpacked = weights_bytes(file, Device.CPU, None)
    assert not must_stay_packed(file, Device.CPU, None, unpacked)
    assert must_stay_packed(file, Device.CPU, None, unpacked - 1)
    assert not must_stay_packed(file, Device.METAL, None, 1)
    assert not must_stay_packed(checkpoint(tmp_path, "qwen3"), Device.CPU, None, 1)


def test_what_no_device_holds_quantized_is_told_with_its_cost(tmp_path: Path) -> None:
    cost = checkpoint(tmp_path).widen_types()
    assert cost is not None
    assert cost.types == ("Q2_K", "Q3_K", "Q6_K")
    weights = LAYERS * (2 * 512 * 256 + 128 * 256)
    assert cost.bytes == 2 * weights
    assert cost.stored_bytes == LAYERS * (512 * (84 + 110) + 128 * 210)
    assert checkpoint(tmp_path, "qwen3").widen_types() is None


@pytest.mark.parametrize(
    ("architecture", "kinds", "dtype"),
    [
        ("llama", {}, "F16"),
        ("qwen3", {}, "BF16"),
        ("qwen3", {"ffn_up": "Q8_0"}, "BF16"),
        ("qwen3", dict.fromkeys(KINDS["qwen3"], "F32"), "F32"),
        ("qwen3", dict.fromkeys(KINDS["qwen3"], "F32") | {"ffn_up": "F16"}, "F16"),
    ],
)
def test_floating_weights_have_one_type(
    tmp_path: Path, architecture: str, kinds: dict[str, str], dtype: str
) -> None:
    """A mixture would make each product as slow as its slowest; bfloat16 is never narrowed."""
    path = write_gguf(tmp_path / "a.gguf", describe(architecture), weigh(architecture, 0, **kinds))
    assert GgufCheckpoint("mine", path).dtype == dtype
