"""A device's bounds besides its memory, and that passes keep to them."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from benchmarks.loading import load_embedding
from benchmarks.tiny_models import names, tiny_config, tiny_model
from gateway.engine.device import (
    METAL_BUFFERS,
    PASS_S,
    Device,
    DeviceBounds,
    KeptBuffers,
    read_bounds,
)
from gateway.engine.kv.layers import make_batch_caches
from gateway.engine.kv.prefix_cache import BLOCK, PrefixCache, PrefixPool
from gateway.engine.models.decoders import LayerGroups
from gateway.engine.models.kv_costs import measure_kv
from tests.checkpoints import write_chat
from tests.engine.generation.harness import answers, job, open_engine

GOLDEN = Path(__file__).parents[1] / "golden"
# Those that cannot be made here: docs/architectures.md says why.
UNMADE = {"bitnet", "muse_spark", "olmo", "phi3small", "prism_hadamard_qwen35"}
# One of each kind of layer and cache; the others are `slow`.
FAMILIES = {
    *("llama", "gemma3_text", "llama4", "deepseek_v3", "gpt_oss", "lfm2", "qwen3_next", "mamba2"),
    *("falcon_h1", "rwkv7", "iquestloopcoder"),
}
ARCHITECTURES = [
    pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.slow)
    for name in names()
    if name not in UNMADE
]
PART_BY_PART = {"mlx_lm.models.iquestloopcoder"}  # its layers are not called: it stays whole
LAYERS = 200  # more than any model has
TOKENS = range(3, 36)


@pytest.fixture(scope="module", autouse=True)
def _uncompiled() -> Iterator[None]:
    """Compiling for the CPU takes seconds a model, and a compiled node stands for several."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(tiny_config(request.param))


def count_arrays(*outputs: mx.array) -> int:
    """Count the arrays of the graph behind these, unevaluated."""
    drawn = io.StringIO()
    export: Any = mx.export_to_dot  # a file-like object will do; the stubs know none
    export(drawn, *outputs)
    return drawn.getvalue().count("rectangle")


def leaves(caches: Any) -> list[mx.array]:
    named: Any = tree_flatten([layer.state for layer in caches])
    return [leaf for _, leaf in named if isinstance(leaf, mx.array)]


def read(model: Any, caches: Any, tokens: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=caches)[:, -1]
    return logits


def test_no_pass_has_more_arrays_than_a_device_bears_and_none_grows(model: Any) -> None:
    """A graph that grows with the tokens written would end with Metal out of buffers."""
    caches = make_batch_caches(model)
    mx.eval(read(model, caches, list(TOKENS)), leaves(caches))
    counts = []
    for step in range(16):
        logits = read(model, caches, [7])
        if step in (0, 5, 11, 15):  # drawing a graph takes as long as computing it
            counts.append(count_arrays(logits, *leaves(caches)))
        mx.eval(logits, leaves(caches))
    assert counts[-1] <= max(counts[:-1])  # a few come on top when a window fills up
    layers = len(make_prompt_cache(model))
    assert max(counts) / layers * LAYERS < METAL_BUFFERS / 2


def test_the_largest_array_of_kv_is_as_large_as_is_planned(model: Any) -> None:
    plane = measure_kv(model).plane
    caches = make_prompt_cache(model)
    mx.eval(read(model, caches, list(TOKENS)), leaves(caches))
    for array in leaves(caches):
        if array.ndim == 4 and array.shape[2] == len(TOKENS):
            assert array.nbytes <= plane * len(TOKENS)


def test_a_pass_in_parts_computes_what_it_computes_whole(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer a part, as after a pass that took as many seconds as there are layers."""
    whole = read(model, make_prompt_cache(model), list(TOKENS))
    groups = LayerGroups(1e-9)
    with groups.applied(model):
        read(model, make_prompt_cache(model), list(TOKENS))
    evaluated: list[Any] = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.append(arrays))
    with groups.applied(model):
        logits = read(model, make_prompt_cache(model), list(TOKENS))
    is_called = type(model).__module__ not in PART_BY_PART
    assert len(evaluated) >= (len(model.layers) - 1) * is_called
    monkeypatch.undo()
    assert mx.allclose(whole, logits, rtol=1e-5, atol=1e-5)


def test_a_pass_that_raises_leaves_the_layers_as_they_were() -> None:
    model = tiny_model(tiny_config("llama"))
    kind: Any = type(model.layers[0])
    call = kind.__call__
    groups = LayerGroups(1e-9)
    with groups.applied(model):
        pass
    with groups.applied(model):
        assert kind.__call__ is not call
    with pytest.raises(ValueError, match="rms_norm"), groups.applied(model):
        model.layers[0](mx.zeros((1, 2, 3)))
    assert kind.__call__ is call


def test_metal_states_its_bounds_and_others_have_none() -> None:
    info = {"resource_limit": 1000, "max_buffer_length": 1 << 30}
    metal = read_bounds(Device.METAL, info)
    assert (metal.buffer_bytes, metal.pass_s, metal.kept.limit) == (1 << 30, PASS_S, 500)
    assert read_bounds(Device.METAL, {}).kept.limit == METAL_BUFFERS / 2
    for device in (Device.CPU, Device.CUDA):
        assert read_bounds(device, info) == DeviceBounds()
        assert read_bounds(device, info).kept.limit == math.inf


def test_kept_prompts_of_all_models_share_the_buffers_that_there_may_be() -> None:
    kept = KeptBuffers(limit=8)  # two planes a block: four blocks
    empty: Any = KVCache
    caches = [PrefixCache([empty()], PrefixPool(1 << 30, kept)) for _ in range(2)]
    layers = make_layers(3 * BLOCK)
    for cache in caches:
        cache.store(range(3 * BLOCK), layers, 0)
    assert kept.count == 8
    assert [cache.count_known(range(3 * BLOCK)) // BLOCK for cache in caches] == [3, 1]
    caches[1].store([*range(1000, 1000 + BLOCK)], make_layers(BLOCK), 0)
    assert [cache.count_known(range(3 * BLOCK)) // BLOCK for cache in caches] == [3, 0]
    for cache in caches:
        cache.clear()
    assert kept.count == 0


def make_layers(tokens: int) -> list[Any]:
    """Make the caches of a model of one layer that has read `tokens` tokens."""
    layers = make_batch_caches(tiny_model(tiny_config("llama")))[:1]
    planes = mx.ones((1, 2, tokens, 16))
    layers[0].update_and_fetch(planes, planes)
    return layers


def test_on_a_gpu_all_passes_are_of_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams of one device, or one on two threads, assert in Metal (vllm-mlx #16, #128)."""
    streams: set[str] = set()
    enter: Any = mx.stream

    def note(stream: Any) -> Any:
        streams.add(str(stream))
        return enter(stream)

    monkeypatch.setattr(mx, "stream", note)
    monkeypatch.setattr(mx, "new_stream", lambda _: pytest.fail("another stream"))
    embedder = load_embedding(GOLDEN / "bert", name="bert", device=Device.METAL)
    embedder.embed(embedder.encode([f"text {n}" for n in range(40)]))
    engine = open_engine(write_chat(tmp_path / "tiny"), device=Device.METAL, speculate_rows=2)
    answers(engine, [job("Hello " * n) for n in range(1, 5)])
    engine.close()
    assert streams <= {str(mx.default_stream(mx.default_device()))}
