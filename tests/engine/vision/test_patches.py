"""Sizes and patches are transformers' own, to the last bit: see tests/golden/vision."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision.patches import PixtralPatches, QwenPatches, read_pixtral, read_qwen
from gateway.engine.vision.pictures import decode, measure
from gateway.errors import ModelLoadFailed
from gateway.serving.sandbox import Sandbox
from tests.golden.vision.make_pixels import MERGES, list_sizes

PICTURES = Path(__file__).parents[2] / "golden" / "vision"
GOLDEN = json.loads((PICTURES / "golden.json").read_text(encoding="utf-8"))
PIXTRAL = json.loads((PICTURES / "golden_pixtral.json").read_text(encoding="utf-8"))
NO_NUMBERS = (float("inf"), float("nan"), 10**400, True)
JPEGS = sorted(file.name for file in PICTURES.glob("*.jpg"))


def write(
    folder: Path, settings: Any, file: str = "preprocessor_config.json", **more: Any
) -> Checkpoint:
    content = {**settings, **more} if isinstance(settings, dict) else settings
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return Checkpoint("qwen", folder)


def family(folder: Path, case: dict[str, Any]) -> QwenPatches | PixtralPatches:
    if case["file"] not in MERGES:
        return read_qwen(write(folder, GOLDEN["files"][case["file"]]))
    settings, merge = PIXTRAL["files"][case["file"]], MERGES[case["file"]]
    patch = {"pixtral": 16, "mistral3": 14}[case["file"]]
    config = {"vision_config": {"patch_size": patch}, "spatial_merge_size": merge}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_pixtral(write(folder, settings))


def described(case: dict[str, Any]) -> str:
    return "-".join(str(case[key]) for key in ("name", "file", "max_tokens") if key in case)


@pytest.mark.parametrize("case", GOLDEN["pixels"] + PIXTRAL["pixels"], ids=described)
def test_patches_are_those_of_transformers(
    box: Sandbox, tmp_path: Path, case: dict[str, Any]
) -> None:
    name = case["name"]
    data = (PICTURES / (f"{name}.png" if name in JPEGS else name)).read_bytes()
    qwen = family(tmp_path, case)
    size = qwen.size(*measure(box, data, name), case["max_tokens"])
    patches = qwen.to_patches(decode(box, data, *size, qwen.resample, name))
    assert list(qwen.grid(*size)) == case["grid"]
    assert patches.dtype == np.float32
    rows, columns = qwen.grid(*size)
    assert patches.shape == (rows * columns, 3 * qwen.frames * qwen.patch * qwen.patch)
    assert hashlib.sha256(patches.astype("<f4").tobytes()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_has_the_same_pixels_on_each_platform(box: Sandbox, name: str) -> None:
    """Its decoders may round a level otherwise, so that its patches are compared after a PNG."""
    files = [(PICTURES / each).read_bytes() for each in (name, f"{name}.png")]
    sizes = [measure(box, data, name) for data in files]
    assert sizes[0] == sizes[1]
    seen, kept = (decode(box, data, *sizes[0], "bicubic", name).astype(int) for data in files)
    assert np.abs(seen - kept).max() <= 2


@pytest.mark.parametrize("case", GOLDEN["sizes"] + PIXTRAL["sizes"], ids=described)
def test_sizes_are_those_of_transformers(tmp_path: Path, case: dict[str, Any]) -> None:
    qwen = family(tmp_path, case)
    sizes = [list(qwen.size(*size, case["max_tokens"])) for size in list_sizes()]
    assert sizes[:20] == case["first"]
    assert hashlib.sha256(json.dumps(sizes).encode()).hexdigest() == case["sha256"]


def test_both_spellings_and_both_files_say_the_same(tmp_path: Path) -> None:
    """Files of transformers 5 nest it; the older spelling counts where a file has both."""
    one = read_qwen(write(tmp_path, {"min_pixels": 4096, "max_pixels": 65536}))
    edges = {"shortest_edge": 4096, "longest_edge": 65536}
    assert read_qwen(write(tmp_path, {"size": edges})) == one
    assert read_qwen(write(tmp_path, {"size": {"min_pixels": 4096, "max_pixels": 65536}})) == one
    old = {"min_pixels": 4096, "max_pixels": 65536, "size": {"shortest_edge": 1}}
    assert read_qwen(write(tmp_path, old)) == one
    nested = {"image_processor": {"size": edges, "min_pixels": None}, "processor_class": "Any"}
    write(tmp_path, {"min_pixels": 1})
    assert read_qwen(write(tmp_path, nested, "processor_config.json")) == one


def test_keys_that_a_file_lacks_have_the_values_of_transformers(tmp_path: Path) -> None:
    qwen = read_qwen(write(tmp_path, {"image_std": 0.5, "resample": 2}))
    assert (qwen.patch, qwen.merge, qwen.frames) == (14, 2, 2)
    assert (qwen.least_pixels, qwen.most_pixels) == (56 * 56, 28 * 28 * 1280)
    assert (qwen.std, qwen.resample) == ((0.5, 0.5, 0.5), "bilinear")
    assert qwen.scale == 1 / 255


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({}, "neither"),
        ([1], "no JSON object"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": True}, "patch_size"),
        ({"merge_size": 1 << 20}, "merge_size"),
        ({"temporal_patch_size": "2"}, "temporal_patch_size"),
        ({"size": {"longest_edge": 1 << 40}}, "longest_edge"),
        ({"size": 336}, "size"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"rescale_factor": "much"}, "much"),
        *(({"rescale_factor": each}, "rescale_factor") for each in (*NO_NUMBERS, 0, -1)),
        *(({"image_mean": each}, "image_mean") for each in NO_NUMBERS),
        *(({"image_std": each}, "image_std") for each in (*NO_NUMBERS, 0, -1)),
        ({"resample": 9}, "resample"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_a_file_with_a_wrong_key_is_refused_by_its_name(
    tmp_path: Path, wrong: Any, word: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=word):
        read_qwen(write(tmp_path, wrong))


@pytest.mark.parametrize("limit", [70, 256, 2048])
@pytest.mark.parametrize("file", ["patch 16", *MERGES])
def test_an_image_keeps_to_the_tokens_it_may_have(tmp_path: Path, file: str, limit: int) -> None:
    qwen = family(tmp_path, {"file": file})
    for width, height in ((4032, 3024), (800, 600), (1, 1), (16384, 3906)):
        size = qwen.size(width, height, limit)
        assert qwen.tokens(*size) <= limit


def test_the_processor_decides_the_patches_of_pixtral(tmp_path: Path) -> None:
    """Its image processor's own patch_size is not read, as in transformers."""
    config = {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = read_pixtral(write(tmp_path, {"patch_size": 99}))
    assert (read.patch, read.merge, read.longest_edge) == (14, 2, 1024)
    processor = {"patch_size": 16, "spatial_merge_size": 1, "image_processor": {"resample": 3}}
    read = read_pixtral(write(tmp_path, processor, "processor_config.json"))
    assert (read.patch, read.merge, read.frames, read.resample) == (16, 1, 1, "bicubic")


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"size": {"longest_edge": 0}}, "longest_edge"),
        ({"size": {"height": 1024, "width": 1024}}, "longest_edge"),
        ({"size": {"longest_edge": 1 << 30}}, "longest_edge"),
        ({"do_resize": False}, "do_resize"),
        ({"image_std": [0, 1, 1]}, "image_std"),
    ],
)
def test_a_file_of_pixtral_with_a_wrong_key_is_refused_by_its_name(
    tmp_path: Path, wrong: Any, word: str
) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {"patch_size": 14}}', "utf-8")
    with pytest.raises(ModelLoadFailed, match=word):
        read_pixtral(write(tmp_path, wrong))
