import json
import math
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.bert import position_ids
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.models.encoder_kernels import (
    LEAST,
    LOG2_E,
    LONG,
    MOST,
    Activation,
    attend_base2,
    attend_fused,
    exp2,
    gelu,
    gelu_tanh,
    layer_norm_by_products,
)
from gateway.errors import ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, read_weights, rewrite, tiny, write_weights

GRID = np.concatenate([np.linspace(-12, 12, 200_001), [-1e4, -100, 0, 1e-30, 100, 1e4]])


def float32(values: Any) -> mx.array:
    return mx.array(np.asarray(values, dtype=np.float32))


def load(folder: Path, device: Device = Device.CPU, dtype: str | None = None) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=device, dtype=dtype)


def vectors(engine: EmbeddingEngine) -> np.ndarray[Any, np.dtype[np.float32]]:
    return engine.embed([[2, 9, 8, 7, 3], [2, 30, 31, 3], list(range(2, 40))])


def test_gelu_is_within_a_millionth_of_the_exact_one() -> None:
    """The fitted erfc replaces a scalar erf; the bound is on GELU itself, in float32."""
    points = GRID.astype(np.float32).astype(np.float64)
    exact = np.array([0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in points])
    error = np.abs(np.array(gelu(float32(GRID))) - exact)
    assert (error[np.abs(points) <= 12]).max() <= 1e-6
    assert (error / np.maximum(1, np.abs(exact))).max() <= 1e-6


def test_gelu_tanh_is_within_a_millionth_of_its_formula() -> None:
    """Written as x * sigmoid over the same exp2."""
    points = GRID.astype(np.float32).astype(np.float64)
    exact = 0.5 * points * (1 + np.tanh(math.sqrt(2 / math.pi) * (points + 0.044715 * points**3)))
    error = np.abs(np.array(gelu_tanh(float32(GRID))) - exact)
    assert (error / np.maximum(1, np.abs(exact))).max() <= 1e-6


def test_exp2_stays_in_its_range() -> None:
    """The bits of a larger exponent would run into the sign's."""
    ends = float32([-math.inf, -1e9, LEAST, MOST, 1e9, math.inf])
    low, high = 2.0**LEAST, 2.0**MOST
    assert exp2(ends).tolist() == [low, low, low, high, high, high]


def test_a_value_that_is_not_a_number_stays_one() -> None:
    """Bit tricks must not turn a broken weight into a plausible vector."""
    for function in (gelu, gelu_tanh, exp2):
        assert np.isnan(np.array(function(float32([np.nan])))).all()


@pytest.mark.parametrize("function", [gelu, gelu_tanh, exp2])
def test_what_is_compiled_once_takes_every_shape_and_layout(function: Activation) -> None:
    x = mx.array(np.random.default_rng(0).normal(size=(24, 35)).astype(np.float32))
    got = function(x)
    for shape in ((840,), (1, 840), (4, 6, 35), (2, 3, 4, 35)):
        assert mx.allclose(function(x.reshape(shape)), got.reshape(shape), rtol=1e-6, atol=1e-7)
    views = ((each.T, each[:, ::2], each[3:4], each[:0]) for each in (x, got))
    for view, expected in zip(*views, strict=True):
        assert mx.allclose(function(view), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("function", [gelu, gelu_tanh, exp2])
def test_what_is_compiled_serves_every_thread_and_stream(function: Activation) -> None:
    """A trace names the stream it was made on."""
    x = np.linspace(-3, 3, 99, dtype=np.float32)
    results: list[Any] = []

    def compute() -> None:
        for stream in (mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)):
            with mx.stream(stream):
                results.append(np.array(function(mx.array(x))))
        mx.clear_streams()

    for _ in range(2):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(each, results[0]) for each in results)


@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_layer_norm_equals_mlx_layer_norm(mean: float) -> None:
    """Averages by a product, whose rounding is no worse, far from zero as well."""
    rng = np.random.default_rng(0)
    x, weight, bias = (float32(rng.normal(size=s)) for s in ((7, 384), 384, 384))
    wide = (x + mean, weight, bias, 1e-12)
    exact = np.array(wide[0], dtype=np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / exact.std(1, keepdims=True)
    exact = exact * np.array(weight) + np.array(bias)
    ours, theirs = layer_norm_by_products(384)(*wide), mx.fast.layer_norm(*wide)
    assert np.abs(np.array(ours) - exact).max() <= 2e-6 * (1 + mean)
    assert np.abs(np.array(theirs) - exact).max() <= 2e-6 * (1 + mean)


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_attention_equals_mlx_attention(spread: float) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (float32(rng.normal(size=(2, 3, 16, 8)) * spread) for _ in range(3))
    bias = mx.where(mx.arange(16) < 11, 0.0, -1e9)[None, None, None]
    for mask in (None, bias):
        fused = np.array(attend_fused(q, k, v, mask))
        base2 = np.array(attend_base2(q * LOG2_E, k, v, mask))
        assert np.allclose(fused, base2, atol=2e-6 * spread**2)


def test_attention_to_a_long_text_holds_the_scores_of_some_queries_only() -> None:
    """All at once they would take gigabytes; the numbers are the same but for rounding."""
    tokens, heads = 5 * LONG + 5, 4
    q, k, v = (mx.random.normal((1, heads, tokens, 8), key=mx.random.key(i)) for i in range(3))
    bias = mx.where(mx.arange(tokens) < tokens - 7, 0.0, -1e9)[None, None, None]
    whole = attend_fused(q, k, v, bias)
    mx.eval(whole)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ours = attend_base2(q * LOG2_E, k, v, bias)
    mx.eval(ours)
    assert mx.get_peak_memory() - before < 2 * heads * tokens**2 * 4
    assert np.abs(np.array(ours - whole)).max() <= 1e-5  # rounding of 1,285 terms


def test_positions_count_real_tokens_from_the_padding_id() -> None:
    """A padding token inside a text is skipped as well, as transformers does."""
    tokens = mx.array([[0, 5, 6, 2, 1, 1], [0, 1, 6, 2, 1, 1]])
    assert position_ids(tokens, 1).tolist() == [[2, 3, 4, 5, 1, 1], [2, 1, 3, 4, 1, 1]]


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_the_gpu_functions_give_the_same_vectors(name: str) -> None:
    """The functions of Metal and CUDA, run on this CPU: mlx's own GELU and attention."""
    ours, theirs = load(GOLDEN / name), load(GOLDEN / name, device=Device.METAL)
    assert np.abs(vectors(ours) - vectors(theirs)).max() <= 2e-6


def test_half_precision_asked_for_on_the_cpu_works() -> None:
    """The float32 bit tricks are left out then."""
    engine = load(GOLDEN / "bert", dtype="float16")
    assert np.abs(vectors(engine) - vectors(load(GOLDEN / "bert"))).max() <= 0.02
    assert engine.nbytes() * 2 == load(GOLDEN / "bert").nbytes()


@pytest.mark.parametrize(
    ("name", "prefix", "heads"),
    [
        ("bert", "bert.", ("cls.predictions.bias", "bert.embeddings.position_ids")),
        ("xlm-roberta", "roberta.", ("lm_head.bias", "roberta.embeddings.position_ids")),
        ("modernbert", "model.", ("head.norm.weight", "decoder.bias")),
    ],
)
def test_names_with_a_prefix_and_a_head_load_alike(
    tmp_path: Path, name: str, prefix: str, heads: tuple[str, ...]
) -> None:
    folder = tiny(tmp_path, name)
    renamed = {prefix + n: a for n, a in read_weights(folder).items()}
    write_weights(folder, renamed | {head: mx.zeros(3) for head in heads})
    assert np.array_equal(vectors(load(folder)), vectors(load(GOLDEN / name)))


def test_the_names_of_old_checkpoints_are_understood(tmp_path: Path) -> None:
    """bert-base-uncased's own file says gamma and beta."""
    folder = tiny(tmp_path, "bert")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): a
        for n, a in read_weights(folder).items()
    }
    write_weights(folder, old)
    assert np.array_equal(vectors(load(folder)), vectors(load(GOLDEN / "bert")))


@pytest.mark.parametrize("device", [Device.CPU, Device.METAL])
def test_quantized_weights_are_unpacked(tmp_path: Path, device: Device) -> None:
    """The hub has encoders in 4 and 8 bits, one module perhaps otherwise than the rest."""
    folder, packed = tiny(tmp_path, "bert"), {}
    odd = "embeddings.word_embeddings"
    for name, array in read_weights(folder).items():
        module, _, part = name.rpartition(".")
        if part != "weight" or array.ndim < 2 or array.shape[-1] % 32:
            packed[name] = array
            continue
        parts = mx.quantize(array, 32, 4 if module == odd else 8)
        packed |= zip([name, f"{module}.scales", f"{module}.biases"], parts, strict=True)
    write_weights(folder, packed)
    sizes: dict[str, Any] = {"group_size": 32, "bits": 8, odd: {"group_size": 32, "bits": 4}}
    rewrite(folder / "config.json", quantization=sizes)
    cosines = (vectors(load(folder, device=device)) * vectors(load(GOLDEN / "bert"))).sum(axis=1)
    assert cosines.min() > 0.98
    rewrite(folder / "config.json", quantization={"group_size": 64, "bits": 3})
    with pytest.raises(ModelLoadFailed):
        load(folder)


def test_an_architecture_that_is_not_supported_hears_which_are(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bert")
    rewrite(folder / "config.json", model_type="deberta-v2")
    with pytest.raises(ModelLoadFailed, match=r"`deberta-v2`.*bert, roberta, .*mlx-lm 0"):
        load(folder)


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bert")
    whole = read_weights(folder)
    names = sorted(whole)
    halves = {"a-1-of-2.safetensors": names[::2], "a-2-of-2.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for file, part in halves.items():
        mx.save_safetensors(str(folder / file), {n: whole[n] for n in part})
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert np.array_equal(vectors(load(folder)), vectors(load(GOLDEN / "bert")))
    (folder / "a-2-of-2.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match="a-2-of-2"):
        load(folder)


def test_missing_and_unknown_weights_are_named(tmp_path: Path) -> None:
    """Never filled with noise, as transformers does; one nobody uses means another architecture."""
    folder = tiny(tmp_path, "bert")
    whole = read_weights(folder)
    write_weights(folder, {n: a for n, a in whole.items() if "layer.1.output.dense" not in n})
    with pytest.raises(ModelLoadFailed, match=r"missing: encoder\.layer\.1\.output\.dense\.bias"):
        load(folder)
    write_weights(folder, whole | {"encoder.relative_attention_bias.weight": mx.zeros(3)})
    with pytest.raises(ModelLoadFailed, match=r"unknown: encoder\.relative_attention_bias"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "mish"}, "mish"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"intermediate_size": 65}, "shape"),
        ({"num_attention_heads": 5}, "multiple"),
        ({"hidden_size": "wide"}, "wide"),
        ({"model_type": "nosuch"}, "nosuch"),
        ({"model_type": None}, "model_type"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = tiny(tmp_path, "bert")
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ModelLoadFailed, match=named):
        load(folder)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu"])
def test_other_activations_give_other_vectors_alike_on_both_roads(
    tmp_path: Path, activation: str
) -> None:
    folder = tiny(tmp_path, "bert")
    rewrite(folder / "config.json", hidden_act=activation)
    ours = vectors(load(folder))
    assert np.abs(ours - vectors(load(folder, device=Device.METAL))).max() <= 2e-6
    assert np.abs(ours - vectors(load(GOLDEN / "bert"))).max() > 1e-5
