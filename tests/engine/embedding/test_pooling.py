import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.pooling import (
    Mode,
    pool,
    read_recipe,
    shorten,
    unit,
    weight_folders,
)
from gateway.engine.models.checkpoint import Checkpoint, weights_bytes
from gateway.errors import ModelLoadFailed
from tests.engine.embedding.harness import rewrite, tiny

PACKAGE = "sentence_transformers.models."


def folder(
    path: Path, modules: list[str] | None, pooling: dict[str, Any] | None = None, **normalize: Any
) -> Checkpoint:
    """Write a model's folder with these modules and this pooling config."""
    if modules is not None:
        listing = [
            {"idx": i, "name": str(i), "path": f"{i}_{m}" if i else "", "type": PACKAGE + m}
            for i, m in enumerate(modules)
        ]
        (path / "modules.json").write_text(json.dumps(listing))
        for i, m in enumerate(modules):
            (path / f"{i}_{m}").mkdir()
    if pooling is not None:
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if normalize:
        (path / "2_Normalize" / "config.json").write_text(json.dumps(normalize))
    return Checkpoint("it", path)


ALL = ["Transformer", "Pooling", "Normalize"]


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"embedding_dimension": 8, "pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
    ],
)
def test_pooling_is_read_from_old_and_new_keys(
    tmp_path: Path, config: dict[str, Any], mode: str
) -> None:
    """sentence-transformers before 6 wrote a boolean a mode; 6 writes the name."""
    recipe = read_recipe(folder(tmp_path, ALL, config), None, None)
    assert (recipe.pooling, recipe.normalize) == (mode, True)


def test_a_listing_without_normalize_means_not_normalized(tmp_path: Path) -> None:
    """modules.json is complete: a step that it does not list does not happen."""
    checkpoint = folder(tmp_path, ALL[:2], {"pooling_mode": "mean"})
    assert read_recipe(checkpoint, None, None).normalize is False
    recipe = read_recipe(checkpoint, "cls", True)
    assert (recipe.pooling, recipe.normalize) == ("cls", True)


@pytest.mark.parametrize(
    ("pooling", "normalize", "key"),
    [(None, None, "`pooling:`"), (None, True, "`pooling:`"), ("mean", None, "`normalize:`")],
)
def test_a_bare_folder_is_refused_naming_the_key_to_set(
    tmp_path: Path, pooling: str | None, normalize: bool | None, key: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=key):
        read_recipe(folder(tmp_path, None), pooling, normalize)


@pytest.mark.parametrize(
    ("modules", "config", "named"),
    [
        (["Transformer", "Pooling", "LayerNorm"], {"pooling_mode": "mean"}, "LayerNorm"),
        (["Transformer", "Dense"], None, "order"),
        (["Transformer", "Pooling", "Normalize", "Dense"], None, "order"),
        (["Transformer", "CNN", "Pooling"], None, "CNN"),
        (["WordEmbeddings", "Pooling"], None, "WordEmbeddings"),
        (["Transformer", "Normalize", "Pooling"], None, "order"),
        (ALL, {"pooling_mode": "max"}, "max"),
        (ALL, {"pooling_mode": ["mean", "cls"]}, "cls, mean"),
        (ALL, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max, mean"),
        (ALL, {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (ALL, {}, "0 pooling modes"),
        (ALL, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, modules: list[str], config: dict[str, Any] | None, named: str
) -> None:
    """A module or mode that is not known would make other vectors than the model's."""
    with pytest.raises(ModelLoadFailed, match=named):
        read_recipe(folder(tmp_path, modules, config), None, None)


def test_normalizing_anything_but_the_vector_is_refused(tmp_path: Path) -> None:
    """sentence-transformers 6 can normalize token vectors instead."""
    checkpoint = folder(tmp_path, ALL, {"pooling_mode": "mean"}, module_input_name="tokens")
    with pytest.raises(ModelLoadFailed, match="tokens"):
        read_recipe(checkpoint, None, None)


def test_linear_layers_are_counted_with_the_model(tmp_path: Path) -> None:
    """Both sizes count them: the one before loading, and the engine's own."""
    folder = tiny(tmp_path, "embeddinggemma")
    parts = weight_folders(Checkpoint("it", folder), None, None)
    assert [part.folder.name for part in parts] == ["embeddinggemma", "2_Dense", "3_Dense"]
    engine = load_embedding(folder, name="it", device=Device.CPU)
    assert engine.nbytes() == sum(weights_bytes(part, Device.CPU, None) for part in parts)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_function": "torch.nn.modules.activation.GELU"}, "GELU"),
        ({"activation_function": ["Tanh"]}, "Tanh"),
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"module_output_name": "else"}, "else"),
        ({"in_features": 63}, "shape"),
        ({"bias": False}, r"unknown: linear\.bias"),
        ({"out_features": None}, "out_features"),
    ],
)
def test_a_linear_layer_that_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = tiny(tmp_path, "embeddinggemma")
    rewrite(folder / "3_Dense" / "config.json", **changes)
    with pytest.raises(ModelLoadFailed, match=named):
        load_embedding(folder, name="it", device=Device.CPU)


def test_linear_layers_that_do_not_follow_one_another_are_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "embeddinggemma")
    listing = json.loads((folder / "modules.json").read_text())
    listing[2]["path"], listing[3]["path"] = listing[3]["path"], listing[2]["path"]
    (folder / "modules.json").write_text(json.dumps(listing))
    with pytest.raises(ModelLoadFailed, match="64 inputs, where vectors have 32 dimensions"):
        load_embedding(folder, name="it", device=Device.CPU)


def test_a_module_path_outside_the_folder_is_refused(tmp_path: Path) -> None:
    """modules.json comes with the model and may not point at other files."""
    listing = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "../../etc"}]
    (tmp_path / "modules.json").write_text(json.dumps(listing))
    with pytest.raises(ModelLoadFailed, match="outside"):
        read_recipe(Checkpoint("it", tmp_path), None, None)


@pytest.mark.parametrize("content", ["{", '{"a": 1}', '[{"path": ""}]'])
def test_a_broken_listing_and_an_unknown_setting_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelLoadFailed, match="mean, cls, last or splade"):
        read_recipe(folder(tmp_path, None), "average", True)
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelLoadFailed, match=r"modules\.json"):
        read_recipe(Checkpoint("it", tmp_path), None, None)


@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
def test_padding_never_reaches_the_vector(mode: Mode) -> None:
    hidden = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    lengths = np.array([4, 2])
    mask = np.arange(4)[None] < lengths[:, None]
    expected = {
        "mean": np.stack([hidden[0].mean(0), hidden[1, :2].mean(0)]),
        "cls": hidden[:, 0],
        "last": np.stack([hidden[0, 3], hidden[1, 1]]),
    }[mode]
    got = pool(mx.array(hidden), mx.array(lengths), mx.array(mask), mode)
    assert np.allclose(np.array(got), expected, atol=1e-6)
    whole = pool(mx.array(hidden[:1]), mx.array(lengths[:1]), None, mode)
    assert np.allclose(np.array(whole), expected[:1], atol=1e-6)


def test_half_precision_states_are_pooled_in_float32() -> None:
    """Sums of many float16 values would lose digits."""
    hidden = mx.ones((1, 3, 2), dtype=mx.float16)
    assert pool(hidden, mx.array([3]), None, "mean").dtype == mx.float32


def test_unit_vectors_have_length_one_and_zero_stays_zero() -> None:
    vectors = np.array(unit(mx.array([[3.0, 4.0], [0.0, 0.0]])))
    assert np.allclose(vectors, [[0.6, 0.8], [0.0, 0.0]])


def test_shortened_vectors_are_unit_length_again() -> None:
    """Matryoshka: the first dimensions, renormalized."""
    vectors = np.array([[0.6, 0.0, 0.8], [0.0, 0.0, 1.0]], dtype=np.float32)
    short = shorten(vectors, 2)
    assert short.dtype == np.float32
    assert np.allclose(short, [[1.0, 0.0], [0.0, 0.0]])
    assert np.allclose(shorten(vectors, 2, normalize=False), vectors[:, :2])
    with pytest.raises(ValueError, match="from 1 to 3"):
        shorten(vectors, 4)
