"""Gemma's towers give the same features from each layout and type of the files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision import parts
from gateway.engine.vision.image_setup import reads_images
from gateway.engine.vision.kinds import Tower
from gateway.engine.vision.towers import open_tower
from gateway.errors import ModelLoadFailed
from tests.engine.vision.golden import Arrays, read_tower, rewrite, run, whole
from tests.engine.vision.harness import write_gemma
from tests.engine.vision.test_gemma import NAMES, patches_of
from tests.golden_gemma import cases, paint_grid, write_model


def encode(tower: Tower, name: str) -> list[mx.array]:
    images = enumerate(cases()[name].grids)
    pixels = [(patches_of(name).to_patches(paint_grid(*grid, n)), grid) for n, grid in images]
    return [whole(tower.encode(mx.array(each), grid)) for each, grid in pixels]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    case: str = request.param
    return case


def of_mlx_vlm(arrays: Arrays) -> Arrays:
    named = {key.removeprefix("model."): each for key, each in arrays.items()}
    return {
        key: each.transpose(0, 2, 3, 1) if each.ndim == 4 else each for key, each in named.items()
    }


def of_transformers_4(arrays: Arrays) -> Arrays:
    return {
        key.replace("vision_tower.", "vision_tower.vision_model."): each
        for key, each in of_mlx_vlm(arrays).items()
    }


@pytest.mark.parametrize("change", [of_mlx_vlm, of_transformers_4])
def test_features_of_other_layouts_are_the_same(
    tmp_path: Path, name: str, change: Callable[[Arrays], Arrays]
) -> None:
    if change is of_transformers_4 and name != "gemma3":
        return  # Gemma 4 is younger
    folder = write_model(name, tmp_path)
    expected = encode(read_tower(folder), name)
    rewrite(folder, change)
    for one, other in zip(encode(read_tower(folder), name), expected, strict=True):
        assert mx.abs(one - other).max() < 1e-4  # the size of parts follows their time


def test_features_do_not_depend_on_the_size_of_parts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = read_tower(write_model(name, tmp_path))
    expected = encode(tower, name)
    monkeypatch.setattr(parts, "MOST_PATCHES", 4)
    tower._heavy = parts.Pace(1, 1, 1)
    for one, other in zip(encode(tower, name), expected, strict=True):
        assert mx.abs(one - other).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpus_functions_give_the_features_of_mlxs_own(
    tmp_path: Path, name: str, dtype: str
) -> None:
    checkpoint = Checkpoint("tiny", write_model(name, tmp_path))
    ours, theirs = (
        encode(run(open_tower(checkpoint, device=device, dtype=dtype)), name)
        for device in (Device.CPU, Device.METAL)
    )
    for own, other in zip(ours, theirs, strict=True):
        right = np.array(other.astype(mx.float32))
        bound = 1e-5 * right.std() if dtype == "float32" else 0
        assert np.abs(np.array(own.astype(mx.float32)) - right).max() <= bound


def test_bfloat16_gives_nearly_the_same(tmp_path: Path, name: str) -> None:
    folder = write_model(name, tmp_path)
    exact = encode(read_tower(folder), name)
    for one, other in zip(encode(read_tower(folder, "bfloat16"), name), exact, strict=True):
        assert one.dtype == mx.bfloat16
        assert mx.abs(one - other).max() < 0.15 * mx.std(other)


def pack(folder: Path) -> dict[str, Any]:
    """Quantize the products of a tower's layers in the files, by 8 bits."""
    file = str(folder / "model.safetensors")
    arrays: Any = mx.load(file)
    packed: dict[str, mx.array] = {}
    for key, each in arrays.items():
        if "vision_tower.encoder" in key and each.ndim == 2:
            base = key.removesuffix("weight")
            packed[key], packed[f"{base}scales"], packed[f"{base}biases"] = mx.quantize(each, 32, 8)
        else:
            packed[key] = each
    mx.eval(packed)
    mx.save_safetensors(file, packed, {"format": "mlx"})
    return {"group_size": 32, "bits": 8}


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_quantized_tower_gives_nearly_the_same(
    tmp_path: Path, name: str, is_packed: bool
) -> None:
    folder = write_model(name, tmp_path)
    exact = encode(read_tower(folder), name)
    write_model(name, folder, quantization=pack(folder))
    pack(folder)
    found = encode(read_tower(folder, is_packed=is_packed), name)
    for one, other in zip(found, exact, strict=True):
        assert mx.abs(one - other).max() < 0.3 * mx.std(other)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 5}, "a tower of 5 layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"patch_size": 1 << 40}, "patch_size"),
        ({"num_attention_heads": 7}, "heads|weights"),
        ({"hidden_size": "x"}, "invalid value"),
    ],
)
def test_configs_that_fit_no_weights_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], reason: str
) -> None:
    vision = {**cases()[name].config["vision_config"], **changes}
    with pytest.raises(ModelLoadFailed, match=reason):
        read_tower(write_model(name, tmp_path, vision_config=vision))


def test_a_folder_with_a_tower_reads_images(tmp_path: Path, name: str) -> None:
    folder = write_gemma(name, tmp_path / "model")
    assert reads_images(folder)
    processor = (folder / "preprocessor_config.json").read_text("utf-8")
    (folder / "preprocessor_config.json").unlink()
    assert not reads_images(folder)
    (folder / "preprocessor_config.json").write_text(processor, "utf-8")
    rewrite(folder, lambda arrays: {k: v for k, v in arrays.items() if "vision" not in k})
    rewrite(folder, lambda arrays: {k: v for k, v in arrays.items() if "multi_modal" not in k})
    assert not reads_images(folder)
