"""Towers whose files do not fit together are not read: their model is refused or reads text, and
says why, before it takes anything.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from tests.engine.vision.golden import Arrays, rewrite
from tests.engine.vision.harness import PREPROCESSING, complaint, paint, write_seeing
from tests.golden_vision import cases

HUGE = 10**9
SOON_S = 20.0  # a load takes half a second
TOWER = "model.visual."


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing("qwen3_vl", tmp_path_factory.mktemp("towers") / "model")


def copy_of(written: Path, folder: Path, file: str = "", content: Any = None) -> Path:
    """Link a model's files, one of them with another content."""
    folder.mkdir()
    for each in written.iterdir():
        (folder / each.name).hardlink_to(each)
    if file:
        (folder / file).unlink()
        (folder / file).write_text(json.dumps(content), "utf-8")
    return folder


def reason(folder: Path) -> str:
    """Return the reason why a model is not loaded or reads text alone, which comes soon."""
    began = time.process_time()
    said = complaint(folder)
    assert time.process_time() - began < SOON_S
    return said


def config(vision: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return config.json with some keys of the tower changed; None takes one away."""
    whole = cases()["qwen3_vl"].config
    changed = {**whole["vision_config"], **vision}
    changed = {key: each for key, each in changed.items() if each is not None}
    return {**whole, "vision_config": changed, **changes}


@pytest.mark.parametrize(
    ("vision", "named"),
    [
        ({"depth": HUGE}, "depth"),
        ({"depth": 900}, "900 layers"),
        ({"depth": 0}, "depth"),
        ({"depth": -1}, "depth"),
        ({"depth": "many"}, "many"),
        ({"depth": None}, "27 layers"),
        ({"depth": [3]}, "depth"),
        ({"depth": 2}, "blocks.2"),
        ({"hidden_size": HUGE}, "hidden_size"),
        ({"hidden_size": 1 << 22}, "another shape"),
        ({"hidden_size": 64}, "another shape"),
        ({"hidden_size": -32}, "hidden_size"),
        ({"hidden_size": {}}, "hidden_size"),
        ({"intermediate_size": 1 << 24}, "another shape"),
        ({"num_heads": 3}, "num_heads"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 16}, "num_heads"),
        ({"patch_size": 1 << 24}, "patch"),
        ({"temporal_patch_size": 1 << 24}, "patch"),
        ({"in_channels": 1 << 24}, "channels"),
        ({"in_channels": 4}, "channels"),
        ({"spatial_merge_size": 1 << 24}, "merge"),
        ({"out_hidden_size": 1 << 24}, "out_hidden_size"),
        ({"num_position_embeddings": 35}, "no square"),
        ({"num_position_embeddings": 49}, "another shape"),
        ({"num_position_embeddings": 10**400}, "num_position_embeddings"),
        ({"deepstack_visual_indexes": [0, 3]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": [-1, 0]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": [0] * 100_000}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": ["a"]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": 5}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": [0]}, "deepstack_merger_list.1"),
        ({"deepstack_visual_indexes": [0, 1, 2]}, "deepstack_merger_list.2"),
    ],
)
def test_numbers_of_a_tower_that_cannot_be_are_named(
    written: Path, tmp_path: Path, vision: dict[str, Any], named: str
) -> None:
    folder = copy_of(written, tmp_path / "copy", "config.json", config(vision))
    assert named in reason(folder)


@pytest.mark.parametrize("vision", [None, [], "large", 7, {}])
def test_a_config_without_numbers_of_a_tower_says_so(
    written: Path, tmp_path: Path, vision: Any
) -> None:
    """The files have its arrays."""
    content = config({}, vision_config=vision)
    folder = copy_of(written, tmp_path / "copy", "config.json", content)
    said = reason(folder)
    assert "vision_config" in said or "config.json" in said


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({}, "mrope_section"),
        ({"mrope_section": []}, "mrope_section"),
        ({"mrope_section": ["a", "b", "c"]}, "mrope_section"),
        ({"mrope_section": 3}, "mrope_section"),
    ],
)
def test_sections_of_positions_that_cannot_be_are_named(
    written: Path, tmp_path: Path, rope: dict[str, Any], named: str
) -> None:
    content = config({})
    plain = {"rope_theta": 10000.0, "rope_type": "default"}
    content["text_config"] = {**content["text_config"], "rope_parameters": {**plain, **rope}}
    folder = copy_of(written, tmp_path / "copy", "config.json", content)
    assert named in reason(folder)


def without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {key: each for key, each in arrays.items() if key != name}


def with_one(name: str, *shape: int) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, name: np.zeros(shape, np.float32)}


@pytest.mark.parametrize(
    ("change", "fault", "name"),
    [
        (without(f"{TOWER}blocks.1.attn.qkv.bias"), "missing", "blocks.1.attn.qkv.bias"),
        (without(f"{TOWER}merger.norm.weight"), "missing", "merger.norm.weight"),
        (without(f"{TOWER}pos_embed.weight"), "missing", "pos_embed.weight"),
        (without(f"{TOWER}patch_embed.proj.weight"), "missing", "patch_embed.proj.weight"),
        (with_one(f"{TOWER}blocks.0.attn.gate", 3), "unknown", "blocks.0.attn.gate"),
        (with_one(f"{TOWER}blocks.3.norm1.bias", 32), "unknown", "blocks.3.norm1.bias"),
        (with_one(f"{TOWER}pos_embed.weight", 36, 8), "another shape", "pos_embed.weight"),
        (with_one(f"{TOWER}patch_embed.proj.weight", 32, 96), "", ""),
        (with_one(f"{TOWER}patch_embed.proj.weight", 32), "another shape", "patch_embed"),
        (
            with_one(f"{TOWER}patch_embed.proj.weight", 32, 5, 5, 5, 5),
            "another shape",
            "patch_embed.proj.weight",
        ),
        (with_one(f"{TOWER}blocks.0.attn.qkv.scales", 96, 1), "quantized", "blocks.0.attn.qkv"),
    ],
)
def test_arrays_that_are_not_those_of_the_config_are_refused_by_name(
    written: Path,
    tmp_path: Path,
    change: Callable[[Arrays], Arrays],
    fault: str,
    name: str,
) -> None:
    """A projection that is a matrix already is one that a tower may have."""
    folder = copy_of(written, tmp_path / "copy")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(weights)
    rewrite(folder, change)
    if not fault:
        engine = load_generation(folder, name="tiny", device=Device.CPU, image_sandbox=paint)
        assert engine.facts.images is not None
        engine.close()
        return
    said = reason(folder)
    assert fault in said
    assert name in said


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"patch_size": 8}, "patch"),
        ({"merge_size": 1}, "merge"),
        ({"merge_size": 4}, "merge"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
    ],
)
def test_patches_that_are_not_those_of_the_tower_are_named(
    written: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """Otherwise an image would have more tokens than features, and they would be laid wrong."""
    content = {**PREPROCESSING, **changes}
    folder = copy_of(written, tmp_path / "copy", "preprocessor_config.json", content)
    assert named in reason(folder)


def test_features_that_are_no_embeddings_of_the_decoder_are_not_read(
    written: Path, tmp_path: Path
) -> None:
    """A tower that is whole, of another decoder."""
    content = config({"out_hidden_size": 32})
    folder = copy_of(written, tmp_path / "copy", "config.json", content)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(weights)

    def narrow(arrays: Arrays) -> Arrays:
        return {
            key: each[:32] if TOWER in key and "linear_fc2" in key and "merger" in key else each
            for key, each in arrays.items()
        }

    rewrite(folder, narrow)
    assert "out_hidden_size" in reason(folder)


def test_more_layers_of_features_than_the_decoder_has_are_not_read(
    written: Path, tmp_path: Path
) -> None:
    content = config({})
    content["text_config"] = {**content["text_config"], "num_hidden_layers": 1}
    folder = copy_of(written, tmp_path / "copy", "config.json", content)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(weights)
    others = tuple(f"layers.{number}." for number in (1, 2, 3))
    rewrite(
        folder,
        lambda arrays: {
            key: each
            for key, each in arrays.items()
            if TOWER in key or not any(each in key for each in others)
        },
    )
    assert "deepstack_visual_indexes" in reason(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"image_token_id": None},
        {"vision_end_token_id": -1},
        {"vision_end_token_id": 10**9},
        {"image_token_id": 320},
    ],
)
def test_a_model_without_ids_of_the_marks_reads_text_and_says_why(
    written: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    content = {key: each for key, each in config({}, **changes).items() if each is not None}
    folder = copy_of(written, tmp_path / "copy", "config.json", content)
    assert "reads no images" in reason(folder)


@pytest.mark.parametrize("changes", [{"patch_size": "x"}, {"image_std": [0, 0, 0]}, {"size": 7}])
def test_a_model_whose_patches_cannot_be_reads_text_and_says_why(
    written: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    content = {**PREPROCESSING, **changes}
    folder = copy_of(written, tmp_path / "copy", "preprocessor_config.json", content)
    assert "image processor" in reason(folder)
