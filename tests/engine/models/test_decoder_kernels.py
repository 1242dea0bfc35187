"""SwiGLU and attention on a CPU: mlx's own numbers, of fewer instructions."""

import itertools
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.activations
import mlx_lm.models.base
import mlx_lm.models.llama
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoder_kernels import attend, swiglu
from gateway.engine.models.decoders import open_decoder
from gateway.engine.models.encoder_kernels import exp2
from tests.checkpoints import write_chat

llama: Any = mlx_lm.models.llama
own_swiglu: Any = mlx_lm.models.activations.swiglu
own_attention: Any = mlx_lm.models.base.scaled_dot_product_attention
BOTH: Any = attend, own_attention
SCALE = 0.125
ATOL = {mx.float32: 1e-5, mx.bfloat16: 1e-2}


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def heads(rows: int, tokens: int, places: int, *, own: int = 6, shared: int = 2) -> list[mx.array]:
    """Draw queries, keys and values; the values are half as wide again."""
    shapes = (rows, own, tokens, 16), (rows, shared, places, 16), (rows, shared, places, 24)
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def test_exp2_is_within_three_ten_millionths() -> None:
    """Relative error, over the range that attention uses and gelu_tanh needs."""
    points = np.linspace(-125, 126, 400_001).astype(np.float32)
    got = np.array(exp2(mx.array(points))).astype(np.float64)
    assert (np.abs(got / np.exp2(points.astype(np.float64)) - 1)).max() <= 3e-7


def test_swiglu_is_as_exact_as_float32_is() -> None:
    gates = np.linspace(-80, 80, 400_001).astype(np.float32)
    exact = gates.astype(np.float64) / (1 + np.exp(-gates.astype(np.float64)))
    got = np.array(swiglu(mx.array(gates)[None], mx.ones((1, gates.size))))[0].astype(np.float64)
    error = np.abs(got - exact)
    assert (error / np.maximum(1, np.abs(gates))).max() <= 3e-7
    assert (error / np.maximum(np.abs(exact), 1e-30))[np.abs(gates) <= 18].max() <= 1.5e-6


@pytest.mark.parametrize(
    "shape", [(1, 1, 96), (64, 1, 96), (65, 1, 96), (2, 200, 96), (3, 5, 4, 1, 32), (0, 96)]
)
def test_swiglu_of_any_shape_is_that_of_mlx_lm(shape: tuple[int, ...]) -> None:
    gate, x = normal(*shape), normal(*shape, seed=1)
    got = swiglu(gate, x)
    assert got.shape == shape
    assert mx.allclose(got, own_swiglu(gate, x), rtol=3e-6, atol=1e-7)


def test_swiglu_of_large_numbers_is_finite_where_mlx_lms_is() -> None:
    gate = mx.array([[-1e30, -200.0, -0.0, 200.0, 1e30, math.inf, -math.inf, math.nan]])
    got, own = (np.array(f(gate, mx.ones(gate.shape))) for f in (swiglu, own_swiglu))
    assert np.array_equal(np.isfinite(got), np.isfinite(own))
    np.testing.assert_allclose(got[0, :5], own[0, :5], atol=1e-6)
    large = mx.array([[-1000.0]]), mx.array([[1e36]])
    assert mx.isfinite(swiglu(*large)).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_are_mlx_lms_to_compute(dtype: mx.Dtype) -> None:
    gate, x = normal(3, 8).astype(dtype), normal(3, 8, seed=1).astype(dtype)
    got = swiglu(gate, x)
    assert got.dtype == dtype
    assert mx.array_equal(got, own_swiglu(gate, x))
    queries, keys, values = (each.astype(dtype) for each in heads(1, 20, 20))
    asked: Any = {"cache": None, "scale": SCALE, "mask": "causal"}
    got = attend(queries, keys, values, **asked)
    assert mx.array_equal(got, own_attention(queries, keys, values, **asked))


@pytest.mark.parametrize("kept", [0, 1, 100])
@pytest.mark.parametrize("tokens", [1, 15, 16, 64, 65, 200])
@pytest.mark.parametrize("mask", ["causal", None])
def test_attention_is_that_of_mlx_lm(mask: str | None, tokens: int, kept: int) -> None:
    given: Any = heads(2, tokens, kept + tokens)
    got, own = (f(*given, None, SCALE, mask) for f in BOTH)
    assert got.shape == own.shape
    assert mx.allclose(got, own, rtol=1e-5, atol=2e-6)


def test_rows_of_different_lengths_attend_to_their_own_places() -> None:
    lengths, tokens = np.array([3, 90, 40]), 70
    places = lengths.max() + tokens
    own = lengths[:, None, None, None] + np.arange(tokens)[None, None, :, None]
    mask = mx.array(np.arange(places) <= own)
    given: Any = heads(3, tokens, places)
    got, theirs = (f(*given, None, SCALE, mask) for f in BOTH)
    assert mx.allclose(got, theirs, rtol=1e-5, atol=2e-6)


def test_a_score_below_all_others_is_still_above_what_is_masked() -> None:
    queries, keys, values = heads(1, 32, 32)
    asked: Any = {"cache": None, "scale": 1e10, "mask": "causal"}
    got, own = (f(queries, keys, values, **asked) for f in BOTH)
    assert mx.allclose(got, own, rtol=1e-4, atol=1e-4)


def test_a_row_that_is_not_a_number_stays_so_and_alone() -> None:
    queries, keys, values = heads(2, 32, 32)
    keys[1, :, 7] = math.nan
    got = attend(queries, keys, values, cache=None, scale=SCALE, mask=None)
    assert mx.isfinite(got[0]).all()
    assert mx.isnan(got[1]).all()


@pytest.mark.parametrize(
    "special",
    [
        {"mask": normal(1, 6, 32, 32, seed=9)},
        {"mask": "causal", "sinks": normal(6)},
        {"mask": mx.arange(32) < 9},
        {"mask": mx.arange(32)[None, None, None] < 9},
    ],
    ids=["added", "sinks", "flat", "of one row"],
)
def test_masks_of_other_forms_are_mlx_lms(special: dict[str, Any]) -> None:
    queries, keys, values = heads(1, 32, 32)
    got, own = (f(queries, keys, values, cache=None, scale=SCALE, **special) for f in BOTH)
    assert mx.allclose(got, own, rtol=1e-5, atol=2e-6)


def test_a_mask_that_is_none_is_refused() -> None:
    queries, keys, values = heads(1, 32, 32)
    with pytest.raises(ValueError, match="mask"):
        attend(queries, keys, values, None, SCALE, "sideways")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_keys_give_what_mlx_lms_attention_gives(
    bits: int, size: int, dtype: mx.Dtype
) -> None:
    cache: Any = QuantizedKVCache(group_size=min(size, 64), bits=bits)
    keys, values = (normal(3, 2, 40, size, seed=seed).astype(dtype) for seed in (1, 2))
    stored = cache.update_and_fetch(keys, values)
    exact = [(codes, *(each.astype(mx.float32) for each in more)) for codes, *more in stored]
    masks: list[Any] = [None, "causal", mx.arange(40) < mx.array([7, 40, 33])[:, None, None, None]]
    for tokens, mask in itertools.product((1, 5), masks):
        queries = normal(3, 6, tokens, size, seed=3).astype(dtype)
        asked = {"cache": cache, "scale": size**-0.5, "mask": mask}
        got = attend(queries, *stored, **asked)
        assert got.dtype == dtype
        own = own_attention(queries.astype(mx.float32) + 0, *exact, **asked)  # it scales in place
        assert np.allclose(got.astype(mx.float32), own, atol=ATOL[dtype])


def test_a_masked_place_of_quantized_keys_counts_for_nothing() -> None:
    cache: Any = QuantizedKVCache(group_size=32, bits=8)
    keys, values = normal(1, 2, 9, 32, seed=1), normal(1, 2, 9, 32, seed=2)
    keys[:, :, 5:], values[:, :, 5:] = 1e3, 1e3
    stored = cache.update_and_fetch(keys, values)
    queries = normal(1, 6, 1, 32)
    got = attend(queries, stored[0], stored[1], cache, SCALE, mx.arange(9)[None] < 5)
    exact = own_attention(queries, keys[:, :, :5], values[:, :, :5], None, SCALE, None)
    assert np.allclose(got, exact, atol=0.05)


def test_a_model_on_a_cpu_computes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "swiglu", own_swiglu)
    monkeypatch.setattr(llama, "scaled_dot_product_attention", own_attention)
    checkpoint = Checkpoint("tiny", write_chat(tmp_path / "m"))
    tokens = mx.arange(5, 105)[None]
    model, _ = open_decoder(checkpoint, device=Device.METAL, dtype="float32")
    own = model(tokens)
    mx.eval(own)
    assert (llama.swiglu, llama.scaled_dot_product_attention) == (own_swiglu, own_attention)
    model, _ = open_decoder(checkpoint, device=Device.CPU, dtype=None)
    assert (llama.swiglu, llama.scaled_dot_product_attention) == (swiglu, attend)
    assert mx.allclose(model(tokens), own, rtol=1e-4, atol=1e-4)
