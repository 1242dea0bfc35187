"""BERT's packed layers, compared with those of mlx."""

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway.engine.blas import BLAS
from gateway.engine.device import Device
from gateway.engine.embedding import bert, packed
from gateway.engine.embedding.bert import BertLayer, make_layer, pack_layer
from gateway.engine.embedding.packed import (
    Kernels,
    find_kernels,
    pack_dense,
)
from gateway.engine.models.encoder_kernels import PADDING_SCORE, arithmetic
from tests.engine.embedding.harness import GOLDEN
from tests.engine.embedding.test_engine import rows

FOUND = find_kernels()
needs_kernels = pytest.mark.skipif(FOUND is None, reason="needs the wheel's AVX-512 kernels")


@pytest.fixture(params=packed.CORES)
def kernels(request: pytest.FixtureRequest, others: pytest.MonkeyPatch) -> Kernels:
    """Return each core's kernels; all run on any processor with AVX-512."""
    words = [request.param if word in packed.CORES else word for word in config_words()]
    others.setattr(packed, "BLAS", replace(BLAS, config=" ".join(words)))
    found = find_kernels()
    assert found is not None
    return found


def config_words() -> list[str]:
    return str(BLAS.config).split()


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a test change what OpenBLAS is, unseen by other tests."""
    find_kernels.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    find_kernels.cache_clear()


def draw(*shape: int, scale: float = 1.0) -> mx.array:
    drawn = np.random.default_rng(sum(shape)).normal(0, scale, shape)
    return mx.array(drawn.astype(np.float32))


def layer_of(width: int, inner: int, heads: int, *, biased: bool = True) -> BertLayer:
    shapes = {
        **{f"attention.self.{name}": (width, width) for name in ("query", "key", "value")},
        "attention.output.dense": (width, width),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
    }
    weights = {f"{name}.weight": draw(*shape, scale=0.1) for name, shape in shapes.items()}
    if biased:
        weights |= {f"{name}.bias": draw(shape[0]) for name, shape in shapes.items()}
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        weights |= {f"{name}.weight": draw(width) + 1, f"{name}.bias": draw(width)}
    return make_layer(
        weights, arithmetic(Device.CPU, mx.float32, "gelu", width, heads), heads, 1e-5
    )


@needs_kernels
@pytest.mark.parametrize("outputs", [1, 3, 16, 384, 385, 1000])
@pytest.mark.parametrize("inputs", [1, 5, 384, 390, 800])
@pytest.mark.parametrize("count", [1, 2, 17, 130])
def test_a_packed_product_is_the_product(
    kernels: Kernels, count: int, inputs: int, outputs: int
) -> None:
    weight, x = np.array(draw(outputs, inputs)), np.array(draw(count, inputs))
    around = np.full((count + 2, outputs), 7, np.float32)  # nothing beside the sums is written
    layer = pack_dense(mx.array(weight).T, draw(outputs), kernels)
    layer(x, around[1:-1])
    expected = x.astype(np.float64) @ weight.T + np.array(draw(outputs)) + 7
    assert np.abs(around[1:-1] - expected).max() <= 1e-6 * inputs + 1e-5
    assert (around[[0, -1]] == 7).all()


@needs_kernels
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (3, 9), (2, 90), (2, 91), (1, 300)])
def test_a_packed_layer_is_mlx_layer(
    kernels: Kernels, count: int, tokens: int, biased: bool
) -> None:
    """Up to 90 tokens in one product, from 91 on in blocks of queries."""
    layer = layer_of(96, 200, 3, biased=biased)
    lengths = np.linspace(max(1, tokens // 2), tokens, count, dtype=int)
    bias = np.where(np.arange(tokens) < lengths[:, None], 0, PADDING_SCORE)
    scores = bias[:, None, None].astype(np.float32)
    x = draw(count * tokens, 96)
    expected = np.array(layer(x, mx.array(scores), count))
    state = np.array(x)
    pack_layer(layer, kernels)(state, scores, count)
    assert np.abs(state - expected).max() <= 2e-5


@needs_kernels
def test_extreme_states_are_those_of_mlx(kernels: Kernels) -> None:
    layer = layer_of(96, 200, 3)
    for factor in (0.0, 1e-20, 1e4, np.nan):
        x = draw(10, 96) * factor
        state = np.array(x)
        pack_layer(layer, kernels)(state, None, 2)
        assert np.allclose(state, np.array(layer(x, None, 2)), atol=2e-5, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_vectors_and_bytes_are_those_without_packing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_embedding(GOLDEN / name, name="tiny", device=Device.CPU)
    monkeypatch.setattr(bert, "find_kernels", lambda: None)
    plain = load_embedding(GOLDEN / name, name="tiny", device=Device.CPU)
    texts = rows(engine) * 12  # more passes than workers
    vectors = engine.embed(texts)
    assert np.abs(vectors - plain.embed(texts)).max() <= 1e-6
    for row, vector in zip(texts[:12], vectors[:12], strict=True):
        assert np.abs(engine.embed([row])[0] - vector).max() <= 1e-6
    packed_layers = engine._encoder._packed  # type: ignore[attr-defined]
    assert len(packed_layers) == plain._encoder.config.layers  # type: ignore[attr-defined]
    assert engine.nbytes() == plain.nbytes()


@needs_kernels
def test_only_the_pinned_wheels_kernels_are_called(others: pytest.MonkeyPatch) -> None:
    config = str(BLAS.config)
    for changed in (
        {"kind": "system"},
        {"kind": "path"},
        {"config": config.replace("0.3.26", "0.3.27")},
        {"config": "OpenBLAS 0.3.26 DYNAMIC_ARCH Haswell MAX_THREADS=64"},
        {"config": None},
    ):
        others.setattr(packed, "BLAS", replace(BLAS, **changed))
        find_kernels.cache_clear()
        assert find_kernels() is None


@needs_kernels
def test_a_wheel_without_the_functions_is_not_called(others: pytest.MonkeyPatch) -> None:
    others.setattr(packed, "OPENBLAS", object())
    assert find_kernels() is None
