"""A GGUF file as mlx-lm's model: the logits are transformers', however the weights are held."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope

from gateway.engine.device import Device
from gateway.engine.models.gguf import checkpoint as gguf_checkpoint
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, SlowedRoPE, read_gguf_decoder
from gateway.errors import ModelLoadFailed
from tests.engine.models.gguf.opening import ended, open_decoder_of
from tests.gguf_files import KINDS, describe, floats, weigh, write_gguf, write_model

# Written by tests/golden/make_gguf_numbers.py, from files that write_model writes alike.
GOLDEN = np.load(Path(__file__).parents[3] / "golden" / "gguf" / "logits.npz")
IDS = mx.array(GOLDEN["ids"])[None]


def checkpoint(tmp_path: Path, architecture: str = "llama") -> GgufCheckpoint:
    return GgufCheckpoint("mine", write_model(tmp_path / "a.gguf", architecture))


def logits(model: Any) -> npt.NDArray[np.float32]:
    return np.array(model(IDS)[0].astype(mx.float32))


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_logits_are_those_of_transformers(
    tmp_path: Path, architecture: str, is_packed: bool
) -> None:
    """Every type that is read is in one of the three files; their standard deviation is 1.5."""
    model = open_decoder_of(checkpoint(tmp_path, architecture), is_packed=is_packed)
    np.testing.assert_allclose(logits(model), GOLDEN[architecture], atol=2e-4)


def test_a_gpu_keeps_the_numbers_of_the_older_types(tmp_path: Path) -> None:
    """Codes, scales and biases of Q4_0, Q4_1 and Q8_0 are the file's own."""
    file = checkpoint(tmp_path)
    on_cpu: Any = dict(tree_flatten(open_decoder_of(file).parameters()))
    model: Any = open_decoder_of(file, device=Device.METAL)
    layer = model.layers[0].self_attn
    for module, name, bits in (
        (layer.q_proj, "model.layers.0.self_attn.q_proj.weight", 4),
        (layer.k_proj, "model.layers.0.self_attn.k_proj.weight", 4),
        (model.model.embed_tokens, "model.embed_tokens.weight", 8),
    ):
        assert (module.bits, module.group_size) == (bits, 32)
        assert module.scales.dtype == mx.float16
        unpacked = mx.dequantize(
            module.weight,
            module.scales.astype(mx.float32),
            module.biases.astype(mx.float32),
            group_size=32,
            bits=bits,
        )
        np.testing.assert_allclose(np.array(unpacked), np.array(on_cpu[name]), rtol=1e-6, atol=1e-7)


def test_bfloat16_is_kept_as_it_is(tmp_path: Path) -> None:
    file = checkpoint(tmp_path, "qwen3")
    model = open_decoder_of(file, device=Device.METAL)
    weight = model.model.embed_tokens.weight
    assert weight.dtype == mx.bfloat16
    stored = np.frombuffer(weigh("qwen3")["token_embd.weight"].content, "<u2")
    np.testing.assert_array_equal(np.array(weight.view(mx.uint16)).reshape(-1), stored)


def test_a_chunk_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have the lane between two chunks; the loaded weights are the same."""
    file = checkpoint(tmp_path)
    whole = logits(open_decoder_of(file))
    fewer = len(list(read_gguf_decoder(file, device=Device.CPU, dtype=None, is_packed=False)))
    monkeypatch.setattr(gguf_checkpoint, "CHUNK_WEIGHTS", 1000)  # three rows of 256
    steps = list(read_gguf_decoder(file, device=Device.CPU, dtype=None, is_packed=False))
    assert len(steps) > 3 * fewer
    for is_packed in (False, True):
        np.testing.assert_allclose(
            logits(open_decoder_of(file, is_packed=is_packed)), whole, atol=1e-4
        )


def test_a_file_that_has_changed_is_not_read(tmp_path: Path) -> None:
    """The file that was checked is the file that is loaded."""
    file = checkpoint(tmp_path)
    write_model(tmp_path / "new.gguf", "llama", 1).replace(file.path)
    with pytest.raises(ModelLoadFailed, match="has changed since its header was read"):
        open_decoder_of(file)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """It does not end the process, as a mapped file would."""
    file = checkpoint(tmp_path)
    steps = read_gguf_decoder(file, device=Device.CPU, dtype=None, is_packed=False)
    next(steps)
    os.truncate(file.path, file.path.stat().st_size // 2)
    with pytest.raises(ModelLoadFailed, match="cut off while it was read"):
        ended(steps)


def test_llama_3_rotates_as_slowly_as_its_file_says(tmp_path: Path) -> None:
    rule = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    ruled: Any = initialize_rope(32, 20_000.0, True, rule, 512)
    plain = 20_000.0 ** (mx.arange(0, 32, 2, dtype=mx.float32) / 32)
    factors = np.array(ruled._freqs / plain)
    assert factors[0] == pytest.approx(1)
    assert factors[-1] == pytest.approx(8)

    tensors = {**weigh("llama"), "rope_freqs.weight": floats("F32", factors)}
    path = write_gguf(tmp_path / "a.gguf", describe("llama"), tensors)
    model = open_decoder_of(GgufCheckpoint("mine", path))
    assert all(isinstance(layer.self_attn.rope, SlowedRoPE) for layer in model.layers)
    slowed = logits(model)
    for layer in model.layers:
        layer.self_attn.rope = ruled
    np.testing.assert_allclose(logits(model), slowed, atol=1e-4)
    assert np.abs(slowed - GOLDEN["llama"]).max() > 0.01
