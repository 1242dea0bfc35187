from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text
from mlx_lm.utils import load_model

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.errors import ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, read_weights, rewrite, tiny, write_weights

QWEN3 = GOLDEN / "qwen3"


def load(folder: Path, device: Device = Device.CPU) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=device)


def save_whole(folder: Path, **more: mx.array) -> None:
    """Save the bare model's weights again under the names a whole model has."""
    write_weights(folder, {f"model.{n}": a for n, a in read_weights(folder).items()} | more)


@pytest.mark.parametrize("key", ["is_causal", "use_bidirectional_attention"])
def test_a_decoder_that_looks_ahead_is_refused(tmp_path: Path, key: str) -> None:
    """mlx_lm's classes are causal, and would give plausible wrong vectors."""
    folder = tiny(tmp_path, "qwen3")
    rewrite(folder / "config.json", **{key: key != "is_causal"})
    with pytest.raises(ModelLoadFailed, match=key):
        load(folder)


def test_a_decoder_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """A model's own Python is never run."""
    folder = tiny(tmp_path, "qwen3")
    rewrite(folder / "config.json", model_file="evil.py")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelLoadFailed, match=r"evil\.py"):
        load(folder)


def test_a_decoder_saved_whole_gives_the_same_vectors(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3")
    save_whole(folder, **{"lm_head.weight": mx.zeros((320, 32))})
    for tied in (True, False):
        rewrite(folder / "config.json", tie_word_embeddings=tied)
        engine = load(folder)
        assert np.array_equal(engine.embed([[5, 6, 7]]), load(QWEN3).embed([[5, 6, 7]]))
        assert engine.nbytes() == load(QWEN3).nbytes()


def test_a_quantised_decoder_is_float32_on_the_cpu(tmp_path: Path) -> None:
    """Quantised products are the slowest of all there; the vectors stay close."""
    folder = tiny(tmp_path, "qwen3")
    save_whole(folder)
    model, _ = load_model(folder)
    quantize(model, group_size=32, bits=8)
    packed = dict(tree_flatten(model.parameters()))
    write_weights(folder, packed)
    rewrite(folder / "config.json", quantization={"group_size": 32, "bits": 8})
    engine = load(folder)
    assert engine.nbytes() == load(QWEN3).nbytes()
    cosine = engine.embed([[5, 6, 7]]) @ load(QWEN3).embed([[5, 6, 7]]).T
    assert cosine.item() > 0.999
    kept = load(folder, Device.METAL)
    assert kept.nbytes() < engine.nbytes() / 2
    assert np.abs(kept.embed([[5, 6, 7]]) - engine.embed([[5, 6, 7]])).max() < 1e-3


def test_a_gemma3_saved_without_its_head_is_loaded(tmp_path: Path) -> None:
    """mlx-lm's own class drops the head that it has made, and must find it."""
    folder = tiny(tmp_path, "qwen3")
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window_pattern": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    }
    rewrite(folder / "config.json", **config)
    classes: Any = gemma3_text
    model = classes.Model(classes.ModelArgs.from_dict(config))
    named: Any = tree_flatten(model.parameters())
    bare = {n.removeprefix("model."): a for n, a in named if not n.startswith("lm_head")}
    write_weights(folder, bare)
    vectors = load(folder).embed([[5, 6, 7], [8, 9]])
    assert vectors.shape == (2, 32)
    assert np.isfinite(vectors).all()
