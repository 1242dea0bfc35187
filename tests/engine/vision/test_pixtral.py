"""Pixtral, Mistral 3 and Ministral 3 give transformers' logits, whole and in chunks."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision import parts
from gateway.engine.vision.image_setup import reads_images
from gateway.engine.vision.reading import Row
from gateway.engine.vision.towers import open_tower, tower_tensors
from gateway.errors import ModelLoadFailed
from gateway.jobs.images import FIRST_IMAGE_ID
from tests.engine.generation.harness import answers
from tests.engine.vision.golden import (
    CLOSE,
    Arrays,
    Opened,
    apart,
    encode,
    read_tower,
    reference,
    rewrite,
    run,
)
from tests.engine.vision.harness import (
    CAT,
    DOG,
    alone,
    complaint,
    open_seeing,
    see,
    sight_of,
    write_seeing,
)
from tests.golden_vision import BREAK, END, cases, merge_of, reference_logits, write_model

CASES = ("mistral3", "ministral3", "pixtral")
PARTS = ("vision_tower.", "multi_modal_projector.")


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    name = request.param
    return Opened.open(write_model(name, tmp_path_factory.mktemp(name)), cases()[name])


def test_all_cases_are_tested() -> None:
    assert {*CASES} == {name for name in cases() if name.endswith(("stral3", "pixtral"))}


@pytest.mark.parametrize("chunk", [1000, 7, 5, 3, 1])
def test_logits_are_those_of_transformers_in_any_chunks(opened: Opened, chunk: int) -> None:
    logits, tokens = opened.read(chunk)
    assert apart(logits, reference(opened)) < CLOSE
    assert tokens == opened.case.greedy


def test_images_that_are_exchanged_would_give_other_logits(opened: Opened) -> None:
    [(first, features), (second, others)] = opened.row.images
    few = min(len(features), len(others))
    swapped = [(first, others[:few]), (second, mx.concatenate([features[:few], others[few:]]))]
    logits, _ = opened.read(row=Row(None, swapped))
    assert np.abs(logits - reference(opened)).max() > 1


def test_rows_of_an_image_that_end_with_another_token_would_give_other_logits(
    opened: Opened,
) -> None:
    [(first, features), second] = opened.row.images
    columns = opened.case.grids[0][1] // merge_of(opened.case.config)
    changed = mx.array(features)
    changed[columns] = opened.decoder.embed([END])
    logits, _ = opened.read(row=Row(None, [(first, changed), second]))
    assert np.abs(logits - reference(opened)).max() > 0.1


def test_rows_of_a_pass_read_as_each_does_alone(opened: Opened) -> None:
    model, decoder, row, prompt = opened.model, opened.decoder, opened.row, opened.case.prompt
    plain = [5 + i for i in range(len(prompt))]
    logits = decoder(mx.array([prompt, plain]), [row, Row()], [0, 0])
    mx.eval(logits)
    assert apart(logits[0], reference(opened)) < CLOSE
    assert apart(logits[1], model(mx.array([plain]))[0]) < CLOSE


def of_mlx_vlm(arrays: Arrays) -> Arrays:
    """Name arrays as mlx-vlm does, channels of a patch last."""
    renamed: Arrays = {}
    for name, each in arrays.items():
        own = name.replace("vision_tower.", "vision_tower.vision_model.")
        renamed[own] = each.transpose(0, 2, 3, 1) if each.ndim == 4 else each
    return renamed


def of_transformers_5(arrays: Arrays) -> Arrays:
    """Name arrays as the modules of transformers 5 are."""
    pairs = [
        ("language_model.lm_head", "lm_head"),
        ("language_model.model", "model.language_model"),
    ]
    pairs += [(part, f"model.{part}") for part in PARTS]
    for old, new in pairs:
        arrays = {name.replace(old, new): each for name, each in arrays.items()}
    return arrays


@pytest.mark.parametrize("change", [of_mlx_vlm, of_transformers_5])
@pytest.mark.parametrize("name", CASES)
def test_other_layouts_give_the_same(tmp_path: Path, name: str, change: Any) -> None:
    is_mlx_vlms = name == "pixtral" and change is of_mlx_vlm
    changes = {"model_type": "pixtral"} if is_mlx_vlms else {}
    write_model(name, tmp_path, **changes)
    rewrite(tmp_path, change)
    case = cases()[name]
    logits, tokens = Opened.open(tmp_path, case).read()
    assert apart(logits, reference_logits(name)) < CLOSE
    assert tokens == case.greedy


@pytest.mark.parametrize("name", CASES)
def test_a_quantized_tower_gives_nearly_the_same_packed_or_not(tmp_path: Path, name: str) -> None:
    case = cases()[name]
    whole = encode(read_tower(write_model(name, tmp_path)), case)
    write_model(name, tmp_path, quantization={"group_size": 32, "bits": 8})

    def packed(arrays: Arrays) -> Arrays:
        changed: Arrays = {}
        for key, each in arrays.items():
            if not key.startswith(PARTS) or each.ndim != 2:
                changed[key] = each
                continue
            scaled = mx.quantize(mx.array(each), group_size=32, bits=8)
            for part, array in zip(("weight", "scales", "biases"), scaled, strict=True):
                changed[key.replace(".weight", f".{part}")] = np.array(array)
        return changed

    rewrite(tmp_path, packed)
    wide, small = read_tower(tmp_path), read_tower(tmp_path, is_packed=True)
    assert small.multi_modal_projector.linear_1.weight.dtype == mx.uint32
    for one, other, exact in zip(encode(wide, case), encode(small, case), whole, strict=True):
        assert mx.abs(one - other).max() < 1e-3
        assert 0 < mx.abs(one - exact).max() < 0.2 * mx.std(exact)


@pytest.mark.parametrize("most", [4, 8, 24])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_in_parts_gives_the_features_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    tower = read_tower(write_model(name, tmp_path))
    whole = encode(tower, cases()[name])
    monkeypatch.setattr(parts, "MOST_PATCHES", most)
    for one, other in zip(encode(tower, cases()[name]), whole, strict=True):
        assert mx.abs(one - other).max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_a_cpus_functions_give_the_features_of_mlxs_own(tmp_path: Path, name: str) -> None:
    case, checkpoint = cases()[name], Checkpoint("tiny", write_model(name, tmp_path))
    ours, theirs = (
        encode(run(open_tower(checkpoint, device=device, dtype="float32")), case)
        for device in (Device.CPU, Device.METAL)
    )
    for own, other in zip(ours, theirs, strict=True):
        assert mx.abs(own - other).max() <= 1e-5 * mx.std(other)


@pytest.mark.parametrize("name", CASES)
def test_weights_in_bfloat16_give_nearly_the_same(tmp_path: Path, name: str) -> None:
    file = str(write_model(name, tmp_path) / "model.safetensors")
    arrays: Any = mx.load(file)
    mx.eval(arrays)
    mx.save_safetensors(file, {key: each.astype(mx.bfloat16) for key, each in arrays.items()})
    logits, _ = Opened.open(tmp_path, cases()[name], "bfloat16").read()
    correlation = np.corrcoef(logits.reshape(-1), reference_logits(name).reshape(-1))
    assert correlation[0, 1] > 0.98


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_has_the_tokens_of_transformers_around_rows(tmp_path: Path, name: str) -> None:
    """Ids of an image stand for its content, those of its rows' ends too, but for the last."""
    engine = open_seeing(write_seeing(name, tmp_path / "model"))
    [params] = engine.prepare(see("What is @?", CAT))
    [span] = params.images
    rows, columns = (each // merge_of(cases()[name].config) for each in span.grid)
    assert span.tokens == rows * (columns + 1)
    *own, last = params.prompt[span.start : span.end]
    assert {each >= FIRST_IMAGE_ID for each in own} == {True}
    assert last == END
    assert params.prompt[span.end] == engine.prepare(see("What is ?"))[0].prompt[span.start]
    features = run(_encoded(engine, params))
    ends = engine._sight._decoder.embed([*[BREAK] * (rows - 1), END])  # type: ignore[union-attr]
    assert mx.array_equal(features[columns :: columns + 1, 0], ends)
    engine.close()


def _encoded(engine: Any, params: Any) -> Any:
    images = engine._sight.begin(params)
    yield from engine._sight.encode([(images, 0)])
    return images.features[params.images[0].start]


@pytest.mark.parametrize("name", [*CASES, "qwen2_5_vl"])
def test_answers_beside_others_are_those_alone(tmp_path: Path, name: str) -> None:
    folder = write_seeing(name, tmp_path / "model")
    jobs = [see("What is @?", CAT), see("Hello"), see("@ or @?", DOG, CAT), see("What is @?", DOG)]
    engine = open_seeing(folder)
    told = [alone(engine, job)[0].ids for job in jobs]
    assert told[0] != told[3]
    assert [each.ids for each in answers(engine, jobs)] == told
    engine.close()
    engine = open_seeing(folder, prefix_cache_bytes=1 << 20)
    for _ in range(2):
        assert [each.ids for each in answers(engine, jobs)] == told
    engine.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"image_token_index": 1 << 30}, "ids"),
    ],
)
def test_settings_that_are_not_supported_leave_a_text_model(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    said = complaint(write_seeing("pixtral", tmp_path / "model", **changes))
    assert "reads no images" in said
    assert reason in said


def test_llava_with_another_tower_is_a_text_model(tmp_path: Path) -> None:
    vision = {**cases()["pixtral"].config["vision_config"], "model_type": "clip_vision_model"}
    folder = write_seeing("pixtral", tmp_path / "model", vision_config=vision)
    assert "clip_vision_model" in complaint(folder)


def test_a_processor_with_other_patches_than_the_tower_leaves_a_text_model(tmp_path: Path) -> None:
    folder = write_seeing("mistral3", tmp_path / "model")
    assert reads_images(folder)
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": 8}), "utf-8")
    assert "patch_size" in complaint(folder)


@pytest.mark.parametrize("name", CASES)
def test_an_image_may_end_a_prompt(tmp_path: Path, name: str) -> None:
    """Its last token is read as text is, at the beginning of decoding."""
    folder = write_seeing(name, tmp_path / "model")
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(bare, "utf-8")
    engine = open_seeing(folder)
    job = see("a@", CAT)
    [told] = alone(engine, job)
    [params] = engine.prepare(job)
    assert params.images[0].end == len(params.prompt)
    sight = sight_of(engine)
    images = sight.begin(params)
    assert images is not None
    for _ in sight.encode([(images, 0)]):
        pass
    context = [*sight.tokens(params.prompt), *told.ids]
    logits = sight._decoder(mx.array([context]), [images.row], [0])[0]
    likeliest: Any = mx.argmax(logits[len(params.prompt) - 1 : -1], axis=-1).tolist()
    assert told.ids == likeliest
    engine.close()


@pytest.mark.parametrize("name", CASES)
def test_a_projector_without_a_tower_is_no_tower(tmp_path: Path, name: str) -> None:
    folder = write_seeing(name, tmp_path / "model")
    assert reads_images(folder)
    rewrite(folder, lambda arrays: {k: v for k, v in arrays.items() if "vision_tower" not in k})
    assert not reads_images(folder)
    assert not tower_tensors(Checkpoint("tiny", folder))


def test_quantization_that_names_an_array_is_refused(tmp_path: Path) -> None:
    stated = {"group_size": 32, "bits": 8, "vision_tower.patch_conv.weight": {"bits": 8}}
    folder = write_model("pixtral", tmp_path, quantization=stated)
    with pytest.raises(ModelLoadFailed, match="the quantization of its tower"):
        read_tower(folder)
