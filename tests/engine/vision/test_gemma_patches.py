"""Gemma's sizes and pixels are those of transformers' PIL processors, to the last bit."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision.gemma_patches import GemmaPatches, read_gemma3, read_gemma4
from gateway.engine.vision.pictures import decode, measure
from gateway.errors import ModelLoadFailed
from gateway.serving.sandbox import Sandbox
from tests.golden.vision.make_pixels import list_sizes
from tests.golden_gemma import GEMMA3_PROCESSOR, GEMMA4_PROCESSOR, PICTURES, stored
from tests.golden_vision import FOLDER

CONFIG = {"vision_config": {"patch_size": 14}, "mm_tokens_per_image": 256}


def write(folder: Path, settings: Any, **more: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}), "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), "utf-8")
    return Checkpoint("gemma", folder)


def read_pixels(box: Sandbox, patches: GemmaPatches, name: str, most: int | None) -> Any:
    """Return a picture's patches in rows, (rows, columns, patch, patch, 3)."""
    data = (FOLDER / name).read_bytes()
    wide, high = patches.size(*measure(box, data, name), most)
    found = patches.to_patches(decode(box, data, wide, high, patches.resample, name))
    (rows, columns), merge, side = patches.grid(wide, high), patches.merge, patches.patch
    assert len(found) == rows * columns == patches.tokens(wide, high) * merge**2
    tokens = found.reshape(rows // merge, columns // merge, merge, merge, 3, side, side)
    return tokens.transpose(0, 2, 1, 3, 5, 6, 4).reshape(rows, columns, side, side, 3)


def digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_of_gemma_3_are_those_of_transformers(
    box: Sandbox, tmp_path: Path, name: str
) -> None:
    patches = read_gemma3(write(tmp_path, GEMMA3_PROCESSOR))
    assert (patches.merge, patches.most_tokens) == (4, 256)
    pixels = read_pixels(box, patches, name, 2048).transpose(0, 2, 1, 3, 4).reshape(896, 896, 3)
    assert digest(pixels) == stored()["pixels"]["gemma3"][name]


@pytest.mark.parametrize("tokens", [70, 280])
@pytest.mark.parametrize("name", PICTURES)
def test_patches_of_gemma_4_are_those_of_transformers(
    box: Sandbox, tmp_path: Path, name: str, tokens: int
) -> None:
    patches = read_gemma4(write(tmp_path, {**GEMMA4_PROCESSOR, "max_soft_tokens": tokens}))
    pixels = read_pixels(box, patches, name, 2048)
    assert digest(pixels) == stored()["pixels"]["gemma4"][f"{name} {tokens}"]


@pytest.mark.parametrize("tokens", [70, 140, 280, 560, 1120])
def test_sizes_of_gemma_4_are_those_of_transformers(tmp_path: Path, tokens: int) -> None:
    patches = read_gemma4(write(tmp_path, {**GEMMA4_PROCESSOR, "max_soft_tokens": tokens}))
    sizes = [list(patches.size(*size)) for size in list_sizes()]
    text = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
    assert text == stored()["pixels"]["sizes"][str(tokens)]
    assert max(patches.tokens(*size) for size in sizes) <= tokens


@pytest.mark.parametrize(
    ("limit", "most"), [(None, 280), (1, 70), (256, 140), (2048, 280), (8192, 1120)]
)
def test_detail_chooses_among_the_sizes_of_gemma_4(
    tmp_path: Path, limit: int | None, most: int
) -> None:
    patches = read_gemma4(write(tmp_path, GEMMA4_PROCESSOR))
    tokens = patches.tokens(*patches.size(1000, 1000, limit))
    assert most * 0.8 < tokens <= most


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan is true"),
        ({"size": {"height": 896, "width": 448}}, "256 tokens in a square"),
        ({"size": {"height": 900, "width": 900}}, "256 tokens in a square"),
        ({"resample": 9}, "resample"),
        ({"do_normalize": False}, "do_normalize is false"),
        ({"image_std": 0}, "image_std"),
        ({"rescale_factor": float("nan")}, "rescale_factor"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"size": {"height": "896", "width": 896}}, "height"),
    ],
)
def test_settings_of_gemma_3_that_are_not_served_are_named(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        read_gemma3(write(tmp_path, {**GEMMA3_PROCESSOR, **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_soft_tokens": 256}, "max_soft_tokens"),
        ({"pooling_kernel_size": 0}, "pooling_kernel_size"),
        ({"patch_size": 1.5}, "patch_size"),
        ({"do_resize": False}, "do_resize is false"),
    ],
)
def test_settings_of_gemma_4_that_are_not_served_are_named(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        read_gemma4(write(tmp_path, {**GEMMA4_PROCESSOR, **changes}))
