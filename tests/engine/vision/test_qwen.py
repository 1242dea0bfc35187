"""Qwen's seeing models give transformers' logits: whole, in chunks, in each layout of the files."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import open_decoder
from gateway.engine.vision import parts
from gateway.engine.vision.parts import Grid
from gateway.engine.vision.qwen_windows import order_by_window
from gateway.engine.vision.reading import Row
from gateway.engine.vision.towers import open_tower
from gateway.errors import BadRequest, ModelLoadFailed
from tests.engine.generation.harness import answers
from tests.engine.vision.golden import (
    CLOSE,
    Arrays,
    Opened,
    apart,
    encode,
    layout,
    read_tower,
    reference,
    rewrite,
    run,
)
from tests.engine.vision.harness import CAT, paint, see, write_seeing
from tests.golden_vision import cases, draw_patches, reference_logits, write_model

CASES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")
DENSE = ("qwen3_5", "qwen3_vl", "qwen2_5_vl")
TOWER = "visual."  # in the names of transformers' two layouts
PACKED = {"group_size": 32, "bits": 8}
# A layer with numbers of its own.
FINER = dict.fromkeys(CASES, "blocks.0.mlp.linear_fc1") | {"qwen2_5_vl": "blocks.0.mlp.up_proj"}


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    name = request.param
    return Opened.open(write_model(name, tmp_path_factory.mktemp(name)), cases()[name])


def test_all_cases_are_tested() -> None:
    assert {*CASES} == {name for name in cases() if name.startswith("qwen")}


@pytest.mark.parametrize("chunk", [1000, 7, 5, 3, 1])
def test_logits_are_those_of_transformers_in_any_chunks(opened: Opened, chunk: int) -> None:
    logits, tokens = opened.read(chunk)
    assert apart(logits, reference(opened)) < CLOSE
    assert tokens == opened.case.greedy


def test_positions_of_text_alone_would_give_other_logits(opened: Opened) -> None:
    """The comparison with transformers is one of rows and columns too."""
    logits, _ = opened.read(row=Row(None, opened.row.images))
    assert np.abs(logits - reference(opened)).max() > 1


def test_rows_and_columns_that_are_exchanged_would_give_other_logits(opened: Opened) -> None:
    right = layout(opened.case)
    points = right.points[:, [0, 2, 1]]
    turned = type(right)(points, right.shift)
    logits, _ = opened.read(row=Row(turned, opened.row.images))
    assert np.abs(logits - reference(opened)).max() > 0.1


def test_images_that_are_exchanged_would_give_other_logits(opened: Opened) -> None:
    [(first, features), (second, others)] = opened.row.images
    few = min(len(features), len(others))
    swapped = [(first, others[:few]), (second, mx.concatenate([features[:few], others[few:]]))]
    logits, _ = opened.read(row=Row(opened.row.layout, swapped))
    assert np.abs(logits - reference(opened)).max() > 1


def test_rows_of_a_pass_read_as_each_does_alone(opened: Opened) -> None:
    """Text rows, and rows whose images lie elsewhere, share a pass with padding."""
    model, decoder, row, prompt = opened.model, opened.decoder, opened.row, opened.case.prompt
    plain = [5 + i for i in range(len(prompt))]
    logits = decoder(mx.array([prompt, plain]), [row, Row()], [0, 0])
    mx.eval(logits)
    assert apart(logits[0], reference(opened)) < CLOSE
    alone = model(mx.array([plain]))[0]
    assert apart(logits[1], alone) < CLOSE


def test_a_pass_leaves_nothing_for_the_next_one(opened: Opened) -> None:
    text = mx.array([[5, 6, 7, 8]])
    before = np.array(opened.model(text))
    opened.read()
    assert np.array_equal(np.array(opened.model(text)), before)


def test_a_pass_that_fails_leaves_nothing_for_the_next_one(opened: Opened) -> None:
    text = mx.array([[5, 6, 7, 8]])
    before = np.array(opened.model(text))
    start = opened.row.images[0][0]
    prompt = mx.array([opened.case.prompt])
    layer = opened.model.layers[0]
    norm, layer.input_layernorm = layer.input_layernorm, None
    with pytest.raises(TypeError):
        opened.decoder(prompt, [opened.row], [0])
    with pytest.raises(TypeError):
        opened.decoder(prompt[:, :start], [opened.row], [0])
    layer.input_layernorm = norm
    assert np.array_equal(np.array(opened.model(text)), before)


def of_mlx_vlm(folder: Path, arrays: Arrays) -> Arrays:
    """Name arrays as mlx-vlm does, channels of a patch last; mlx-lm's class names the others."""
    model, _ = open_decoder(Checkpoint("tiny", folder), device=Device.CPU, dtype=None)
    named: Any = tree_flatten(model.parameters())
    renamed = {name: np.array(each) for name, each in named}
    for name, each in arrays.items():
        if TOWER in name:
            channels_last = each.transpose(0, 2, 3, 4, 1) if each.ndim == 5 else each
            renamed[f"vision_tower.{name.partition(TOWER)[2]}"] = channels_last
    return renamed


@pytest.mark.parametrize("name", CASES)
def test_the_layout_of_mlx_vlm_gives_the_same(tmp_path: Path, name: str) -> None:
    case = cases()[name]
    write_model(name, tmp_path)
    rewrite(tmp_path, lambda arrays: of_mlx_vlm(tmp_path, arrays))
    logits, tokens = Opened.open(tmp_path, case).read()
    assert apart(logits, reference_logits(name)) < CLOSE
    assert tokens == case.greedy


def test_the_former_layout_of_transformers_gives_the_same(tmp_path: Path) -> None:
    write_model("qwen3_vl", tmp_path)

    def formerly(arrays: Arrays) -> Arrays:
        pairs = (("model.visual.", "visual."), ("model.language_model.", "model."))
        for new, old in pairs:
            arrays = {name.replace(new, old): each for name, each in arrays.items()}
        return arrays

    rewrite(tmp_path, formerly)
    logits, _ = Opened.open(tmp_path, cases()["qwen3_vl"]).read()
    assert apart(logits, reference_logits("qwen3_vl")) < CLOSE


def test_the_config_of_published_files_gives_the_same(tmp_path: Path) -> None:
    """Qwen2.5-VL's keys of the text model are not nested, and some have other names."""
    case = cases()["qwen2_5_vl"]
    write_model("qwen2_5_vl", tmp_path)
    text, vision = (dict(case.config[key]) for key in ("text_config", "vision_config"))
    rope = text.pop("rope_parameters")
    flat = {**text, **case.config, "model_type": "qwen2_5_vl", "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat["vision_config"] = {**vision, "model_type": "qwen2_5_vl", "in_chans": 3}
    del flat["text_config"], flat["vision_config"]["in_channels"]
    (tmp_path / "config.json").write_text(json.dumps(flat), "utf-8")
    logits, tokens = Opened.open(tmp_path, case).read()
    assert apart(logits, reference_logits("qwen2_5_vl")) < CLOSE
    assert tokens == case.greedy


@pytest.mark.parametrize(
    ("vision", "reason"),
    [
        ({"fullatt_block_indexes": [3]}, "fullatt_block_indexes"),
        ({"fullatt_block_indexes": None}, "fullatt_block_indexes"),
        ({"window_size": 4}, "window_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_settings_of_windows_that_are_not_supported_are_refused(
    tmp_path: Path, vision: dict[str, Any], reason: str
) -> None:
    config = {**cases()["qwen2_5_vl"].config["vision_config"], **vision}
    write_model("qwen2_5_vl", tmp_path, vision_config=config)
    with pytest.raises(ModelLoadFailed, match=reason):
        read_tower(tmp_path)


@given(st.tuples(st.integers(1, 20), st.integers(1, 20)), st.integers(1, 9))
def test_each_token_is_in_the_window_of_its_row_and_column(grid: Grid, side: int) -> None:
    order, runs = order_by_window(grid, side)
    assert sorted(order.tolist()) == [*range(grid[0] * grid[1])]
    assert sum(count for _, count in runs) == len(order)
    windows, at = [], 0
    for size, count in runs:
        windows += [order[at + i : at + i + size] for i in range(0, count, size)]
        at += count
    squares = {
        frozenset(
            row * grid[1] + column
            for row in range(top, min(top + side, grid[0]))
            for column in range(left, min(left + side, grid[1]))
        )
        for top in range(0, grid[0], side)
        for left in range(0, grid[1], side)
    }
    assert {frozenset(each.tolist()) for each in windows} == squares
    assert len(windows) == len(squares)


def test_windows_are_encoded_in_steps(tmp_path: Path) -> None:
    """Other work gets the lane between two windows' parts."""
    tower = read_tower(write_model("qwen2_5_vl", tmp_path))
    tower._heavy = parts.Pace(1, 1, 1)
    patches = mx.array(draw_patches(cases()["qwen2_5_vl"].config["vision_config"], 16, 24))
    steps = [*tower.encode(patches, (16, 24))]
    windows = 16 * 24 // 16
    assert len(steps) > 2 * windows  # two of the layers attend within windows


def pack(folder: Path, name: str, prefix: str) -> None:
    """Quantize the layers of a tower in the files, one of them by fewer bits."""

    def packed(arrays: Arrays) -> Arrays:
        if prefix != TOWER:
            arrays = of_mlx_vlm(folder, arrays)
        changed: Arrays = {}
        for key, each in arrays.items():
            is_layer = prefix in key and key.endswith(".weight") and each.ndim == 2
            if not is_layer or "pos_embed" in key:
                changed[key] = each
                continue
            bits = 4 if FINER[name] in key else PACKED["bits"]
            parts = mx.quantize(mx.array(each), group_size=32, bits=bits)
            for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
                changed[key.replace(".weight", f".{part}")] = np.array(array)
        return changed

    own = f"{prefix}{FINER[name]}"
    if prefix == TOWER and name != "qwen2_5_vl":
        own = f"model.{own}"
    numbers = {**PACKED, own: {"group_size": 32, "bits": 4}}
    write_model(name, folder, quantization=numbers)
    rewrite(folder, packed)


@pytest.mark.parametrize("prefix", [TOWER, "vision_tower."])
@pytest.mark.parametrize("name", DENSE)
def test_a_quantized_tower_gives_nearly_the_same_packed_or_not(
    tmp_path: Path, name: str, prefix: str
) -> None:
    case = cases()[name]
    whole = encode(read_tower(write_model(name, tmp_path)), case)
    pack(tmp_path, name, prefix)
    wide = read_tower(tmp_path)
    packed = read_tower(tmp_path, is_packed=True)
    assert wide.blocks[0].attn.qkv.weight.dtype == mx.float32
    assert packed.blocks[0].attn.qkv.weight.dtype == mx.uint32
    finer = getattr(packed.blocks[0].mlp, FINER[name].rpartition(".")[2])
    assert (packed.blocks[0].attn.qkv.bits, finer.bits) == (8, 4)
    for one, other, exact in zip(encode(wide, case), encode(packed, case), whole, strict=True):
        assert mx.abs(one - other).max() < 1e-3
        # A gated product errs more.
        assert mx.abs(one - exact).max() < (0.7 if name == "qwen2_5_vl" else 0.35) * mx.std(exact)
        assert mx.abs(one - exact).max() > 0


@pytest.mark.parametrize("name", DENSE)
def test_a_model_with_a_quantized_tower_is_served(tmp_path: Path, name: str) -> None:
    folder = write_seeing(name, tmp_path / "model")
    pack(folder, name, TOWER)
    given: dict[str, Any] = {"name": "tiny", "device": Device.CPU, "image_sandbox": paint}
    told = []
    for is_packed in (True, False):
        engine = load_generation(folder, **given, is_packed=is_packed)
        told.append(answers(engine, [see("What is @?", CAT)])[0])
        engine.close()
    assert told[0].error is None
    assert told[0].ids == told[1].ids


@pytest.mark.parametrize("most", [4, 8, 24, 100])
@pytest.mark.parametrize("name", DENSE)
def test_a_layer_in_parts_gives_the_features_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    case = cases()[name]
    tower = read_tower(write_model(name, tmp_path))
    whole = encode(tower, case)
    monkeypatch.setattr(parts, "MOST_PATCHES", most)
    for one, other in zip(encode(tower, case), whole, strict=True):
        assert mx.abs(one - other).max() < 1e-4
    tower._heavy = parts.Pace(1, 1, 1)  # as few patches attend at a time as can be
    for one, other in zip(encode(tower, case), whole, strict=True):
        assert mx.abs(one - other).max() < 1e-4


def test_parts_shrink_while_they_take_long_and_grow_while_they_do_not() -> None:
    pace = parts.Pace(4, 128, 512)
    sizes = []
    for seconds in (1.0, 0.0):
        for _ in range(10):
            sizes.append(pace.choose(1, 4))
            pace.note(seconds)
    assert sizes == [128, 64, 32, 16, 8, *[4] * 5, 4, 8, 16, 32, 64, 128, 256, *[512] * 3]


@pytest.mark.parametrize("name", DENSE)
def test_weights_in_bfloat16_give_nearly_the_same(tmp_path: Path, name: str) -> None:
    case = cases()[name]
    whole = encode(read_tower(write_model(name, tmp_path)), case)
    file = str(tmp_path / "model.safetensors")
    arrays: Any = mx.load(file)
    mx.eval(arrays)
    mx.save_safetensors(file, {key: each.astype(mx.bfloat16) for key, each in arrays.items()})
    for dtype, expected in ((None, mx.float32), ("bfloat16", mx.bfloat16)):
        tower = read_tower(tmp_path, dtype)
        for one, exact in zip(encode(tower, case), whole, strict=True):
            assert one.dtype == expected
            assert mx.abs(one - exact).max() < 0.2 * mx.std(exact)
        logits, _ = Opened.open(tmp_path, case, dtype).read()
        correlation = np.corrcoef(logits.reshape(-1), reference_logits(name).reshape(-1))
        assert correlation[0, 1] > 0.98


@pytest.mark.parametrize("name", DENSE)
def test_a_folder_without_arrays_of_a_tower_is_a_text_model(tmp_path: Path, name: str) -> None:
    """A conversion for text keeps `vision_config`."""
    folder = write_seeing(name, tmp_path / "model")
    rewrite(folder, lambda arrays: {key: each for key, each in arrays.items() if TOWER not in key})
    engine = load_generation(folder, name="tiny", device=Device.CPU, image_sandbox=paint)
    assert engine._sight is None
    assert engine.facts.images is None
    assert not engine.facts.notes
    [told] = answers(engine, [see("What is this?")])
    assert told.ends
    engine.close()


def test_a_model_type_without_a_tower_of_ours_is_a_text_model(tmp_path: Path) -> None:
    folder = write_seeing("qwen3_vl", tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**config, "model_type": "qwen3_vl_of_tomorrow"}), "utf-8")
    rewrite(folder, lambda arrays: arrays)
    with pytest.raises(Exception, match="qwen3_vl_of_tomorrow"):
        load_generation(folder, name="tiny", device=Device.CPU, image_sandbox=paint)


@pytest.mark.parametrize("name", DENSE)
def test_without_a_sandbox_for_images_the_tower_stays_unread(tmp_path: Path, name: str) -> None:
    engine = load_generation(write_seeing(name, tmp_path / "m"), name="tiny", device=Device.CPU)
    assert engine.facts.images is None
    with pytest.raises((BadRequest, AssertionError)):
        engine.prepare(see("What is @?", CAT))
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpus_functions_give_the_features_of_mlxs_own(tmp_path: Path, dtype: str) -> None:
    """numpy computes float32 alone; other types are mlx's on each device."""
    case, checkpoint = cases()["qwen3_vl"], Checkpoint("tiny", write_model("qwen3_vl", tmp_path))
    ours, theirs = (
        encode(run(open_tower(checkpoint, device=device, dtype=dtype)), case)
        for device in (Device.CPU, Device.METAL)
    )
    for own, other in zip(ours, theirs, strict=True):
        right = np.array(other.astype(mx.float32))
        bound = 1e-5 * right.std() if dtype == "float32" else 0
        assert np.abs(np.array(own.astype(mx.float32)) - right).max() <= bound
