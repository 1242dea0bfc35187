"""BERT's packed layers, compared with those of mlx."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loading import load_cross_encoder, load_embedding
from gateway.engine.blas import BLAS, OPENBLAS
from gateway.engine.device import Device
from gateway.engine.embedding import bert, packed
from gateway.engine.embedding.bert import BertLayer, make_layer, pack_layer
from gateway.engine.embedding.engine import EmbeddingEngine, EncoderEngine
from gateway.engine.embedding.packed import (
    Kernels,
    PackedLayers,
    find_kernels,
    pack_dense,
)
from gateway.engine.models.encoder_kernels import PADDING_SCORE, arithmetic
from tests.engine.embedding.harness import GOLDEN, read_weights, rewrite, tiny, write_weights
from tests.engine.embedding.test_engine import rows

FOUND = find_kernels()
needs_kernels = pytest.mark.skipif(FOUND is None, reason="needs the wheel's AVX-512 kernels")
# The kernels of a core may use what these flags of a processor stand for.
FLAGS = {"SkylakeX": "avx512bw", "Cooperlake": "avx512_bf16", "SapphireRapids": "avx512_fp16"}
CPU_INFO = Path("/proc/cpuinfo")
HERE = set(CPU_INFO.read_text().split()) if CPU_INFO.exists() else set()
CORES = [core for core in packed.CORES if FLAGS[core] in HERE]


@pytest.fixture(params=CORES)
def kernels(request: pytest.FixtureRequest, others: pytest.MonkeyPatch) -> Kernels:
    """Return the kernels of each core that runs here."""
    others.setattr(packed, "BLAS", replace(BLAS, config=request.param))
    found = find_kernels()
    assert found is not None
    return found


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
@pytest.mark.parametrize("core", CORES)
def test_kernels_touch_nothing_beside_their_arrays(core: str) -> None:
    """All arrays begin, or end, at a page that nobody may touch; with a float less, it is."""
    assert multiply_guarded(core, missing=0) == 0
    assert multiply_guarded(core, missing=1) == -signal.SIGSEGV


def multiply_guarded(core: str, missing: int) -> int:
    command = [sys.executable, "-m", "tests.engine.embedding.guarded_products"]
    ended = subprocess.run([*command, core, str(missing)], capture_output=True, timeout=300)
    return ended.returncode


@needs_kernels
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (3, 9), (2, 90), (2, 91), (1, 300)])
def test_a_packed_layer_is_mlx_layer(
    kernels: Kernels, count: int, tokens: int, biased: bool
) -> None:
    """Up to 90 tokens have one product for all heads, more have one for each head."""
    layer = layer_of(96, 200, 3, biased=biased)
    assert difference(layer, kernels, count, tokens, threads=2) <= 2e-5


@needs_kernels
@pytest.mark.generator
@given(
    heads=st.integers(1, 4),
    size=st.integers(1, 40),
    inner=st.integers(1, 500),
    count=st.integers(1, 5),
    tokens=st.integers(1, 200),
    threads=st.integers(1, 5),
    is_shared=st.booleans(),
)
def test_packed_layers_of_any_shape_are_mlx_layers(
    heads: int, size: int, inner: int, count: int, tokens: int, threads: int, is_shared: bool
) -> None:
    assert FOUND is not None
    layer = layer_of(heads * size, inner, heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "WORTH_SHARING", 0 if is_shared else 1 << 40)
        assert difference(layer, FOUND, count, tokens, threads) <= 2e-5


def difference(layer: BertLayer, kernels: Kernels, count: int, tokens: int, threads: int) -> float:
    """Return the largest difference of a layer's states, some of whose tokens are padding."""
    lengths = np.linspace(max(1, tokens // 2), tokens, count, dtype=int)
    bias = np.where(np.arange(tokens) < lengths[:, None], 0, PADDING_SCORE)
    scores = mx.array(bias[:, None, None].astype(np.float32))
    x = draw(count * tokens, layer.norm.weight.size)
    layers = PackedLayers(threads)
    layers.layers.append(pack_layer(layer, kernels))
    *_, state = layers(x, scores, count)
    return float(mx.abs(state - layer(x, scores, count)).max())


@needs_kernels
def test_extreme_states_are_those_of_mlx(kernels: Kernels) -> None:
    layer = layer_of(96, 200, 3)
    for factor in (0.0, 1e-20, 1e4, np.nan):
        x = draw(10, 96) * factor
        layers = PackedLayers(1)
        layers.layers.append(pack_layer(layer, kernels))
        *_, state = layers(x, None, 2)
        assert np.allclose(state, layer(x, None, 2), atol=2e-5, equal_nan=True)


def load_both(folder: Path, load: Any = load_embedding, **options: Any) -> tuple[Any, Any]:
    """Load a model with and without packed layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bert, "cpu_threads", lambda: 2)
        engine = load(folder, name="tiny", device=Device.CPU, **options)
        patch.setattr(bert, "find_kernels", lambda: None)
        plain = load(folder, name="tiny", device=Device.CPU, **options)
    assert count_packed(plain) == 0
    return engine, plain


def count_packed(engine: EncoderEngine) -> int:
    return len(engine._encoder._packed.layers)  # type: ignore[attr-defined]


@needs_kernels
@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_vectors_and_bytes_are_those_without_packing(name: str) -> None:
    engine, plain = load_both(GOLDEN / name)
    assert count_packed(engine) == 2
    texts = rows(engine) * 12  # more passes than workers
    vectors = engine.embed(texts)
    assert np.abs(vectors - plain.embed(texts)).max() <= 1e-6
    for row, vector in zip(texts[:12], vectors[:12], strict=True):
        assert np.abs(engine.embed([row])[0] - vector).max() <= 1e-6
    assert engine.nbytes() == plain.nbytes()
    assert engine.token_s == plain.token_s


@needs_kernels
@pytest.mark.parametrize(
    "name", ["bge-m3", "splade-bert", "splade-xlm-roberta", "colbert-bert", "colbert-stanford"]
)
@pytest.mark.parametrize("is_shared", [True, False])
def test_all_outputs_are_those_without_packing(
    name: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "WORTH_SHARING", 0 if is_shared else 1 << 40)
    engine, plain = load_both(GOLDEN / name)
    assert count_packed(engine) == 2
    texts = rows(engine)
    for row, each, other in zip(
        texts, *(e.embed_outputs(texts, e.outputs) for e in (engine, plain)), strict=True
    ):
        *steps, [alone] = engine.in_steps([row], engine.outputs)
        assert len(steps) > count_packed(engine)
        for outputs in (each, alone):
            for mine, its in (
                (outputs.dense, other.dense),
                (outputs.multi_vector, other.multi_vector),
                (outputs.sparse and outputs.sparse.weights, other.sparse and other.sparse.weights),
            ):
                assert mine is its is None or np.allclose(mine, its, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("name", ["bert-reranker", "xlm-roberta-reranker"])
def test_scores_are_those_without_packing(name: str) -> None:
    engine, plain = load_both(GOLDEN / name, load_cross_encoder)
    assert count_packed(engine) == 2
    pairs = engine.encode_pairs("a question", ["an answer", "another answer, which is longer"])
    assert np.abs(engine.score(pairs) - plain.score(pairs)).max() <= 1e-5


@needs_kernels
def test_a_row_whose_steps_end_early_leaves_the_model_whole() -> None:
    engine, plain = load_both(GOLDEN / "bert")
    row = rows(engine)[0]
    steps = engine.in_steps([row], engine.outputs)
    for _ in range(2):
        next(steps)
    steps.close()
    assert np.abs(engine.embed([row]) - plain.embed([row])).max() <= 1e-6
    engine.close()


@needs_kernels
def test_weights_are_packed_as_the_float32_that_they_become(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bert")
    weights = {name: w.astype(mx.bfloat16) for name, w in read_weights(folder).items()}
    write_weights(folder, weights)
    engine, plain = load_both(folder)
    assert count_packed(engine) == 2
    assert np.abs(engine.embed(rows(engine)) - plain.embed(rows(engine))).max() <= 1e-6
    module = "encoder.layer.0.intermediate.dense"
    parts = mx.quantize(weights.pop(f"{module}.weight"), 32, 8)
    names = [f"{module}.{part}" for part in ("weight", "scales", "biases")]
    write_weights(folder, weights | dict(zip(names, parts, strict=True)))
    rewrite(folder / "config.json", quantization={"group_size": 32, "bits": 8})
    engine, plain = load_both(folder)
    assert count_packed(engine) == 2
    assert np.abs(engine.embed(rows(engine)) - plain.embed(rows(engine))).max() <= 1e-6


@needs_kernels
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {"dtype": "float16"}),
        ("bert", {"dtype": "bfloat16"}),
        ("nomic-bert", {}),
        ("gte", {}),
        ("jina-v3", {}),
    ],
)
def test_what_packed_layers_cannot_compute_is_not_packed(
    name: str, options: dict[str, str]
) -> None:
    engine, _ = load_both(GOLDEN / name, **options)
    assert count_packed(engine) == 0


@needs_kernels
def test_nothing_is_packed_where_openblas_has_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "cpu_threads", lambda: 3)
    engine: EmbeddingEngine = load_embedding(GOLDEN / "bert", name="tiny", device=Device.CPU)
    assert count_packed(engine) == 0


@needs_kernels
def test_only_the_pinned_wheels_kernels_are_called(others: pytest.MonkeyPatch) -> None:
    for changed in (
        {"kind": "system"},
        {"kind": "path"},
        {"config": "OpenBLAS 0.3.26 DYNAMIC_ARCH Haswell MAX_THREADS=64"},
        {"config": "OpenBLAS 0.3.26 DYNAMIC_ARCH Zen MAX_THREADS=64"},
        {"config": "OpenBLAS 0.3.26 DYNAMIC_ARCH neoversen1 MAX_THREADS=64"},
        {"config": None},
    ):
        others.setattr(packed, "BLAS", replace(BLAS, **changed))
        find_kernels.cache_clear()
        assert find_kernels() is None


@needs_kernels
@pytest.mark.parametrize("versions", [[], ["0.3.27.0.0"], ["0.3.26.0.4", "0.3.26.0.3"]])
def test_no_other_wheels_kernels_are_called(
    versions: list[str], others: pytest.MonkeyPatch
) -> None:
    wheels = [SimpleNamespace(version=version) for version in versions]
    others.setattr(packed, "metadata", SimpleNamespace(distributions=lambda name: wheels))
    assert find_kernels() is None


@needs_kernels
def test_a_wheel_without_the_functions_is_not_called(others: pytest.MonkeyPatch) -> None:
    others.setattr(packed, "OPENBLAS", object())
    assert find_kernels() is None


@needs_kernels
def test_kernels_with_wrong_products_are_not_called(others: pytest.MonkeyPatch) -> None:
    """They compute the products of the other operand's order, or none."""
    assert OPENBLAS is not None
    core = next(word for word in str(BLAS.config).split() if word in packed.CORES).upper()
    names = [f"mlx_gateway_sgemm_{part}_{core}" for part in ("incopy", "oncopy", "kernel")]
    right = {name: getattr(OPENBLAS, name) for name in names}
    exchanged = {names[0]: right[names[1]], names[1]: right[names[0]]}
    for wrong in (exchanged, {names[2]: lambda *_: 0}):
        library = SimpleNamespace(**right | wrong, cblas_sgemm=OPENBLAS.cblas_sgemm)
        others.setattr(packed, "OPENBLAS", library)
        find_kernels.cache_clear()
        assert find_kernels() is None


@needs_kernels
def test_an_engine_on_another_core_gives_the_same_vectors() -> None:
    """OPENBLAS_CORETYPE makes OpenBLAS take the kernels of an older core."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_HASWELL, str(GOLDEN / "bert")],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_CORETYPE": "Haswell"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    engine, _ = load_both(GOLDEN / "bert")
    expected = engine.embed(rows(engine)).astype(float)
    assert np.abs(np.array(json.loads(done.stdout)) - expected).max() <= 1e-5


_ON_HASWELL = """
import json, sys
from pathlib import Path
from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.packed import find_kernels
from tests.engine.embedding.test_engine import rows
assert find_kernels() is None
engine = load_embedding(Path(sys.argv[1]), name="tiny", device=Device.CPU)
print(json.dumps(engine.embed(rows(engine)).tolist()))
"""
