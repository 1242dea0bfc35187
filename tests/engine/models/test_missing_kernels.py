"""A product that a device lacks is computed another way from the load on; no pass finds out.

There is no CUDA here. Stand-ins in the place of MLX's own functions raise CUDA's texts; the CPU's
own missing kernel, mx.gather_mm in 16 bits, is real.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantize
from mlx.utils import tree_flatten
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model

from benchmarks.tiny_models import tiny_config, tiny_model
from gateway.engine.device import Device
from gateway.engine.models.decoders import Numbers, parameters, read_decoder
from gateway.engine.models.gguf.checkpoint import open_checkpoint
from gateway.engine.models.missing_kernels import (
    LoopedExperts,
    WidenedWeights,
    replace_missing,
    widen,
)
from gateway.errors import ModelLoadFailed
from tests.checkpoints import write_chat
from tests.engine.models.gguf.opening import ended

NO_SHAPE = (
    "[quantized_matmul] No implementation for problem shape: 1x64x96x1, transpose: true, "
    'activation: bfloat16, bits: 4, group size: 32, mode: "affine".'
)
NO_BITS = "[quantized_matmul] 1-bit quantization is not supported."
TOKENS = mx.arange(5, 25)[None]


class Lacking:
    """One of mx's products, which raises for those that `lacks` says have no kernel; and counts."""

    def __init__(self, name: str, text: str, lacks: Callable[..., bool]) -> None:
        self._own = getattr(mx, name)
        self._lacks = lacks
        self._text = text
        self.refused = 0

    def __call__(self, *args: Any, **given: Any) -> mx.array:
        if self._lacks(*args, **given):
            self.refused += 1
            raise RuntimeError(self._text)
        product: mx.array = self._own(*args, **given)
        return product


def lack(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, lacks: Callable[..., bool]
) -> Lacking:
    lacking = Lacking(name, text, lacks)
    monkeypatch.setattr(mx, name, lacking)
    return lacking


def made(name: str, bits: int = 4, **config: Any) -> Any:
    model = tiny_model({**tiny_config(name), **config}, width=1)

    def can_be(_: str, layer: Any) -> bool:
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0

    quantize(model, group_size=32, bits=bits, class_predicate=can_be)
    mx.eval(model.parameters())
    return model


def said(model: Any) -> mx.array:
    logits: mx.array = model(TOKENS)
    mx.eval(logits)
    return logits


def replaced(model: Any, device: Device = Device.CUDA) -> list[WidenedWeights]:
    reports: list[WidenedWeights] = []
    ended(replace_missing("tiny", model, device, mx.float32, reports.append))
    return reports


def kinds(model: Any) -> set[Any]:
    return {type(layer) for layer in model.modules()}


def is_of(outputs: int) -> Callable[..., bool]:
    return lambda x, w, *_, **given: bool(w.shape[-2] == outputs)


def test_layers_of_a_shape_without_a_kernel_become_floating_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made("llama")
    expected = said(model)
    before = sum(array.nbytes for array in parameters(model))
    lacking = lack(monkeypatch, "quantized_matmul", NO_SHAPE, is_of(96))  # gate and up
    (report,) = replaced(model)
    assert lacking.refused == 1
    assert (report.model, report.layers) == ("tiny", 8)
    assert report.shapes == ("QuantizedLinear 64x96 of 4 bits, group 32, affine",)
    assert report.bytes == 8 * 64 * 96 * 4
    after = sum(array.nbytes for array in parameters(model))
    assert (after, after - before) == (report.total_bytes, report.bytes - report.stored_bytes)
    assert {type(layer.mlp.up_proj) for layer in model.layers} == {Linear}
    assert {type(layer.mlp.down_proj) for layer in model.layers} == {QuantizedLinear}
    assert mx.allclose(model(TOKENS), expected, rtol=1e-3, atol=1e-3)
    assert lacking.refused == 1


@pytest.mark.parametrize("rows", [1, 9])
def test_each_shape_is_tried_with_one_row_and_with_nine(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Decode and prefill take different kernels: either may be missing."""
    model = made("llama")
    lack(
        monkeypatch, "quantized_matmul", NO_SHAPE, lambda x, *_, **given: bool(x.shape[-2] == rows)
    )
    (report,) = replaced(model)
    assert report.layers == 4 * 7 + 2
    assert not kinds(model) & {QuantizedLinear, QuantizedEmbedding}


def test_weights_are_dequantized_by_the_processor_where_the_device_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made("llama", bits=1, tie_word_embeddings=True)
    expected = said(model)
    lack(monkeypatch, "quantized_matmul", NO_BITS, lambda *_, **given: bool(given["bits"] == 1))
    text = NO_BITS.replace("quantized_matmul", "dequantize")
    lack(monkeypatch, "dequantize", text, lambda *_, stream=None, **given: stream is None)
    (report,) = replaced(model)
    assert "QuantizedEmbedding 64x320 of 1 bits, group 32, affine" in report.shapes
    assert mx.allclose(model(TOKENS), expected, rtol=1e-3, atol=1e-3)


LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize(
    ("name", "config", "product", "given", "kind"),
    [
        # One row's product, or that of many sorted ones.
        ("qwen3_moe", {}, "gather_qmm", ("sorted_indices", False), QuantizedSwitchLinear),
        ("qwen3_moe", {}, "gather_qmm", ("sorted_indices", True), QuantizedSwitchLinear),
        # Prefill multiplies with latent heads the other way round than a decode step.
        ("deepseek_v3", LATENT, "quantized_matmul", ("transpose", False), QuantizedMultiLinear),
    ],
)
def test_experts_and_latent_heads_without_a_kernel_become_floating(
    monkeypatch: pytest.MonkeyPatch, name: str, config: Any, product: str, given: Any, kind: Any
) -> None:
    model = made(name, **config)
    assert kind in kinds(model)
    expected = said(model)
    key, value = given
    text = NO_SHAPE.replace("quantized_matmul", product)
    lack(monkeypatch, product, text, lambda *_, **given: given[key] is value)
    replaced(model)
    assert kind not in kinds(model)
    assert mx.allclose(model(TOKENS), expected, rtol=1e-3, atol=1e-3)


def test_experts_with_a_scale_of_their_own_keep_it() -> None:
    """mlx-lm's own dequantize_model drops it: `global_scale` of NVIDIA's nvfp4 exports."""
    floating: Any = SwitchLinear(64, 32, 4, bias=False)
    floating.weight = floating.weight * 100
    layer = floating.to_quantized(16, 4, "nvfp4", global_scale=True)
    holder: Any = tiny_model(tiny_config("llama"))
    holder.experts = layer
    widen(holder, mx.float32)
    error = mx.abs(holder.experts.weight - floating.weight).max() / mx.abs(floating.weight).max()
    assert float(error) < 0.2


def test_all_layers_become_floating_without_being_read(tmp_path: Path) -> None:
    """They are read in slices, later: here they would all be in memory at once, packed too."""
    model = made("llama")
    file = str(tmp_path / "model.safetensors")
    mx.save_safetensors(file, dict(tree_flatten(model.parameters())))
    loaded: Any = mx.load(file)
    model.load_weights(list(loaded.items()))
    before = mx.get_active_memory()
    widen(model, mx.float32)
    assert mx.get_active_memory() <= before + 4096  # keys of random numbers, never drawn
    assert not kinds(model) & {QuantizedLinear, QuantizedEmbedding}


def test_another_error_of_a_trial_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cudaMallocAsync(&data, size, stream) failed: out of memory"
    lack(monkeypatch, "quantized_matmul", text, lambda *_, **given: True)
    with pytest.raises(RuntimeError, match="out of memory"):
        replaced(made("llama"))


def test_nothing_quantized_is_tried_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = lack(monkeypatch, "quantized_matmul", NO_SHAPE, lambda *_, **given: True)
    assert not replaced(made("llama"), Device.CPU)
    assert lacking.refused == 0


def test_what_a_report_raises_ends_the_load_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made("llama")
    lack(monkeypatch, "quantized_matmul", NO_SHAPE, lambda *_, **given: True)

    def refuse(widened: WidenedWeights) -> None:
        raise ModelLoadFailed(widened.model, "too large")

    before = mx.get_active_memory()
    with pytest.raises(ModelLoadFailed, match="too large"):
        ended(replace_missing("tiny", model, Device.CUDA, mx.float32, refuse))
    assert mx.get_active_memory() <= before + 4096  # the trials' zeros


def test_a_loaded_model_answers_alike_with_and_without_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {"quantization": {"group_size": 32, "bits": 4}}
    folder = write_chat(tmp_path / "tiny")
    model, _ = load_model(folder)
    quantize(model, group_size=32, bits=4)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    expected = said(model)
    lack(monkeypatch, "quantized_matmul", NO_SHAPE, is_of(96))
    reports: list[WidenedWeights] = []
    steps = read_decoder(
        open_checkpoint("tiny", folder),
        device=Device.CUDA,
        numbers=Numbers(is_fused=True),
        report=reports.append,
    )
    assert mx.allclose(ended(steps)(TOKENS), expected, rtol=1e-3, atol=1e-3)
    assert [report.layers for report in reports] == [4]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 80])
def test_looped_experts_multiply_as_gathered_ones(tokens: int, has_bias: bool) -> None:
    layer: Any = SwitchLinear(24, 40, 16, bias=has_bias)
    if has_bias:
        layer.bias = mx.random.normal((16, 40))
    looped = LoopedExperts(layer)
    chosen = mx.random.randint(0, 16, (1, tokens, 2)).astype(mx.uint32)
    ordered = mx.sort(chosen.flatten())
    for x, indices in (
        (mx.random.normal((1, tokens, 1, 1, 24)), chosen),
        (mx.random.normal((1, tokens, 2, 1, 24)), chosen),
        (mx.random.normal((2 * tokens, 1, 24)), ordered),
    ):
        expected = layer(x, indices)
        found = looped(x, indices)
        assert found.shape == expected.shape
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_mixture_in_16_bits_computes_what_one_in_float32_does_on_a_cpu(dtype: mx.Dtype) -> None:
    """MLX's own mx.gather_mm raises there, which nothing here provokes. All experts are asked, lest
    rounding decide which.
    """
    config = {**tiny_config("qwen3_moe"), "num_experts": 16, "num_experts_per_tok": 16}
    exact, model = tiny_model(config, width=1), tiny_model(config, width=1)
    model.set_dtype(dtype)
    with pytest.raises(RuntimeError, match="GatherMM"):
        mx.eval(model(TOKENS))
    replaced(model, Device.CPU)
    assert LoopedExperts in kinds(model)
    for tokens in (TOKENS[:, :1], TOKENS):
        found, expected = model(tokens), exact(tokens)
        assert found.dtype == dtype
        assert mx.allclose(found.astype(mx.float32), expected, rtol=0, atol=0.1)


def test_a_mixture_that_can_be_gathered_stays_as_it_is() -> None:
    model = tiny_model(tiny_config("qwen3_moe"))
    replaced(model, Device.CPU)
    assert LoopedExperts not in kinds(model)
