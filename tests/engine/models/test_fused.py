"""Projections of one input as one product: the same numbers, and not a byte more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize

from gateway.engine.device import Device
from gateway.engine.generation.loading import DraftSetup, load_generation_in_steps, read_chat_setup
from gateway.engine.models.decoder_kernels import FusedProjection, fuse_projections
from gateway.engine.models.decoders import Numbers, parameters, read_decoder
from gateway.engine.models.gguf.checkpoint import open_checkpoint
from tests.checkpoints import SLIDING, write_chat
from tests.engine.models.gguf.opening import ended

TOKENS = mx.arange(5, 105)[None]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"model_type": "qwen2"},
    "normed": {"model_type": "qwen3", "head_dim": 16},
    "sliding": SLIDING,
}


def opened(files: Path, **options: Any) -> Any:
    checkpoint = open_checkpoint("tiny", files)
    numbers = Numbers(is_packed=True, **options)
    return ended(read_decoder(checkpoint, device=Device.CPU, numbers=numbers))


def nbytes(model: Any) -> int:
    return sum(array.nbytes for array in parameters(model))


def fused_parts(model: Any) -> int:
    return sum(isinstance(part, FusedProjection) for part in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_has_the_same_logits_and_size(tmp_path: Path, family: str) -> None:
    folder = write_chat(tmp_path / family, **FAMILIES[family])
    own, fused = opened(folder), opened(folder, is_fused=True)
    assert fused_parts(fused) == 5 * len(own.layers)
    assert nbytes(fused) == nbytes(own)
    assert mx.allclose(fused(TOKENS), own(TOKENS), rtol=1e-4, atol=1e-3)


def test_quantized_projections_are_fused_as_they_are(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "tiny")
    own, fused = opened(folder), opened(folder)
    for model in (own, fused):
        quantize(model, group_size=32, bits=4)
    assert ended(fuse_projections(fused)) == 2 * len(own.layers)
    assert nbytes(fused) == nbytes(own)
    assert mx.allclose(fused(TOKENS), own(TOKENS), rtol=1e-4, atol=1e-3)


def test_projections_of_unlike_formats_stay_apart(tmp_path: Path) -> None:
    model = opened(write_chat(tmp_path / "tiny"))
    mixed, half, *_ = model.layers
    mixed.mlp.up_proj = mixed.mlp.up_proj.to_quantized(group_size=32, bits=8)
    half.self_attn.v_proj.weight = half.self_attn.v_proj.weight.astype(mx.float16)
    own = model(TOKENS)
    mx.eval(own)
    assert ended(fuse_projections(model)) == 3
    assert type(mixed.mlp.gate_proj) is type(half.self_attn.v_proj) is Linear
    assert isinstance(half.self_attn.k_proj, FusedProjection)
    assert mx.allclose(model(TOKENS), own, rtol=1e-4, atol=1e-3)


def test_each_group_that_is_fused_is_a_step_of_loading(tmp_path: Path) -> None:
    """Others may have the lane in between. A draft is fused if its own entry says so."""
    folder = write_chat(tmp_path / "tiny")
    setup = read_chat_setup(folder, name="tiny", max_context=None)

    def count_steps(numbers: Numbers, draft: DraftSetup | None = None) -> int:
        steps = load_generation_in_steps(
            setup, device=Device.CPU, numbers=numbers, speculate_rows=4, draft=draft
        )
        return len([*steps])

    groups, plain, fused = 4, Numbers(), Numbers(is_fused=True)
    draft = DraftSetup(setup.checkpoint, setup.vocab_size, setup.max_context, plain)
    alone, drafted = count_steps(plain), count_steps(plain, draft)
    assert count_steps(fused) == alone + groups
    assert count_steps(plain, replace(draft, numbers=fused)) == drafted + groups
