from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.embedding.modernbert import BLOCK, make_spans
from gateway.engine.models.encoder_kernels import rotate_by_table, rotation_table
from gateway.errors import ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, rewrite, tiny

MODERNBERT = GOLDEN / "modernbert"
LONG = [2, *(5 + i * 7 % 300 for i in range(600)), 3]


def load(folder: Path, device: Device = Device.CPU, **settings: Any) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=device, **settings)


def changed(path: Path, **changes: Any) -> Path:
    """Copy the tiny model and change its config.json; a key that is None goes."""
    folder = tiny(path, "modernbert")
    rewrite(folder / "config.json", **changes)
    return folder


def test_rotations_equal_those_of_mlx() -> None:
    """The table is for a CPU, where mlx computes each cosine on its own."""
    x = mx.random.normal((2, 3, 50, 8), key=mx.random.key(0))
    for theta in (10_000.0, 160_000.0):
        theirs = mx.fast.rope(x, 8, traditional=False, base=theta, scale=1.0, offset=0)
        ours = rotate_by_table(x, rotation_table(theta, 8, 64))
        assert np.abs(np.array(ours - theirs)).max() <= 1e-5


def seen_pairs(length: int, window: int | None, block: int, mask: mx.array | None) -> np.ndarray:
    """Return (rows, length, length): which keys each query sees."""
    rows = 1 if mask is None else mask.shape[0]
    seen = np.zeros((rows, length, length), dtype=bool)
    for span in make_spans(length, mask, window, block, mx.float32):
        bias = mx.zeros((1, 1, 1, 1)) if span.bias is None else span.bias
        seen[:, span.queries, span.keys] = np.array(bias)[:, 0] == 0
    return seen


@pytest.mark.parametrize("window", [None, 4, 64])
@pytest.mark.parametrize("block", [1, 7, 16, 100])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_query_sees_the_keys_within_its_window(
    window: int | None, block: int, is_padded: bool
) -> None:
    length = 50
    place = np.arange(length)
    near = np.abs(place[:, None] - place[None]) <= (length if window is None else window)
    mask = None
    if is_padded:
        mask = mx.arange(length)[None] < mx.array([[50], [20]])
        near = near[None] & np.array(mask)[:, None]
    assert np.array_equal(
        seen_pairs(length, window, block, mask), np.broadcast_to(near, (1 + is_padded, 50, 50))
    )


def test_a_short_text_needs_no_window() -> None:
    [span] = make_spans(5, None, 4, BLOCK, mx.float32)
    assert span.bias is None


def test_a_text_of_several_blocks_is_embedded_alike_on_both_roads() -> None:
    """Global layers go in blocks too on a CPU; a short text in the pass is mostly padding."""
    assert len(LONG) > 2 * BLOCK
    rows = [LONG, LONG[:300], [2, 9, 3]]
    ours, theirs = (load(MODERNBERT, device).embed(rows) for device in (Device.CPU, Device.METAL))
    assert np.abs(ours - theirs).max() <= 5e-6
    half = load(MODERNBERT, Device.METAL, dtype="float16").embed(rows)
    assert np.abs(ours - half).max() <= 0.02


def test_local_layers_do_not_see_far(tmp_path: Path) -> None:
    """The first token sees twenty others through five local layers of four tokens a side."""
    folder = changed(tmp_path, layer_types=["sliding_attention"] * 5)
    engine = load(folder, pooling="cls")
    near, far = LONG[:], LONG[:]
    near[20], far[21] = 4, 4
    whole = engine.embed([LONG])
    assert np.array_equal(engine.embed([far]), whole)
    assert np.abs(engine.embed([near]) - whole).max() > 0


def test_a_config_of_transformers_4_is_read_alike(tmp_path: Path) -> None:
    """The models on the hub have such configs."""
    older = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0}
    older |= {"local_rope_theta": 10000.0}
    folder = changed(tmp_path, layer_types=None, rope_parameters=None, **older)
    assert np.array_equal(load(folder).embed([LONG]), load(MODERNBERT).embed([LONG]))


@pytest.mark.parametrize("key", ["global_rope_theta", "local_rope_theta"])
def test_both_thetas_matter(tmp_path: Path, key: str) -> None:
    folder = changed(tmp_path, rope_parameters=None, **{key: 500.0})
    assert np.abs(load(folder).embed([LONG]) - load(MODERNBERT).embed([LONG])).max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_bias": True}, "norm_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "mish"}, "mish"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "yarn"),
        ({"num_attention_heads": 5}, "heads"),
        ({"num_hidden_layers": 4}, r"unknown: layers\.4"),
        ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
        ({"intermediate_size": 47}, "shape"),
        ({"hidden_size": "wide"}, "wide"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=named):
        load(changed(tmp_path, **changes))
