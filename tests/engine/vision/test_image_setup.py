"""Before a model is loaded, its files tell whether it reads images; loaded, it does the same."""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.models.folder import Folder
from gateway.engine.vision.families import FAMILIES
from gateway.engine.vision.image_setup import Marks, read_image_setup, reads_images
from gateway.engine.vision.tower_numbers import read_numbers
from gateway.errors import ContextLengthExceeded, ModelLoadFailed
from tests import golden_gemma, golden_vision
from tests.engine.vision.golden import encode, read_tower
from tests.engine.vision.harness import CAT, alone, complaint, paint, see, write_gemma, write_seeing

CASES: Final = (
    "gemma3",
    "gemma4",
    "gemma4_vision",
    "mistral3",
    "pixtral",
    "qwen3_vl",
    "qwen2_5_vl",
)
ABSENT: Final = object()
NO_THETAS: Final = (0, -1, float("inf"), float("nan"), False, "x", 10**400)


def write(case: str, folder: Path) -> Path:
    return write_gemma(case, folder) if case.startswith("gemma") else write_seeing(case, folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    return {case: write(case, folder / case) for case in CASES}


def change(source: Path, folder: Path, file: str, *place: str, value: Any) -> Path:
    """Link a model's files, with another value, or none, at a place of a JSON file."""
    folder.mkdir()
    for each in source.iterdir():
        (folder / each.name).hardlink_to(each)
    content = json.loads((source / file).read_text("utf-8"))
    part = content
    for key in place[:-1]:
        part = part[key]
    if value is ABSENT:
        part.pop(place[-1], None)
    else:
        part[place[-1]] = value
    (folder / file).unlink()
    (folder / file).write_text(json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("case", "place", "value"),
    [
        ("gemma3", ("preprocessor_config.json", "do_pan_and_scan"), True),
        ("gemma4", ("preprocessor_config.json", "max_soft_tokens"), 256),
        ("gemma4", ("preprocessor_config.json", "max_soft_tokens"), [280]),
        ("pixtral", ("preprocessor_config.json", "size"), {"height": 64, "width": 64}),
        ("pixtral", ("config.json", "projector_hidden_act"), "relu"),
        ("gemma3", ("config.json", "boi_token_index"), ABSENT),
        ("gemma3", ("config.json", "image_token_index"), None),
        ("gemma3", ("config.json", "vision_config", "hidden_act"), "gelu"),
        ("gemma3", ("config.json", "vision_config", "image_size"), ABSENT),
        ("gemma3", ("config.json", "vision_config", "image_size"), 36),
        ("gemma3", ("config.json", "vision_config", "model_type"), "clip_vision_model"),
        ("gemma3", ("config.json", "mm_tokens_per_image"), 1 << 20),
        ("gemma4", ("config.json", "vision_config", "head_dim"), ABSENT),
        ("gemma4", ("config.json", "vision_config", "hidden_activation"), "silu"),
        ("gemma4", ("config.json", "vision_config", "model_type"), "siglip_vision_model"),
        ("gemma4", ("config.json", "vision_config", "position_embedding_size"), 8),
        *(
            (case, ("config.json", "vision_config", "rope_parameters"), {"rope_theta": value})
            for case in ("gemma4", "pixtral", "qwen2_5_vl")
            for value in NO_THETAS
        ),
        *((case, ("config.json", "vision_config"), None) for case in CASES),
    ],
)
def test_a_model_whose_images_are_not_supported_is_one_of_text_and_names_the_key(
    written: dict[str, Path], tmp_path: Path, case: str, place: tuple[str, ...], value: Any
) -> None:
    folder = change(written[case], tmp_path / "model", *place, value=value)
    said = complaint(folder)
    assert "It reads no images" in said
    assert place[-1] in said or "rope_theta" in said


@pytest.mark.parametrize("case", CASES)
def test_files_as_they_are_say_that_a_model_sees(written: dict[str, Path], case: str) -> None:
    assert reads_images(written[case])


@pytest.mark.parametrize(
    ("kind", "said", "left_out"),
    [
        (
            "qwen2_5_vl",
            {"hidden_size": 1280},
            {
                "depth": 32,
                "intermediate_size": 3420,
                "num_heads": 16,
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "in_channels": 3,
            },
        ),
        (
            "qwen3_vl",
            {},
            {
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_heads": 16,
                "patch_size": 16,
                "num_position_embeddings": 2304,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "deepstack_visual_indexes": [8, 16, 24],
            },
        ),
    ],
)
def test_what_transformers_leaves_out_of_a_config_it_saves_has_its_default(
    kind: str, said: dict[str, Any], left_out: dict[str, Any]
) -> None:
    text = {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    whole, short = (
        {"model_type": kind, "text_config": text, "vision_config": vision}
        for vision in ({**said, **left_out}, said)
    )
    family = FAMILIES[kind]
    assert read_numbers(short, family) == read_numbers(whole, family)


@pytest.mark.parametrize("case", ["gemma3", "mistral3", "pixtral"])
def test_an_images_token_has_two_names(written: dict[str, Path], tmp_path: Path, case: str) -> None:
    """transformers reads both."""
    config = json.loads((written[case] / "config.json").read_text("utf-8"))
    place = "config.json", "image_token_index"
    folder = change(written[case], tmp_path / "one", *place, value=ABSENT)
    assert not reads_images(folder)
    place = "config.json", "image_token_id"
    folder = change(folder, tmp_path / "other", *place, value=config["image_token_index"])
    assert read_image_setup(Folder("tiny", folder)) == read_image_setup(
        Folder("tiny", written[case])
    )


@pytest.mark.parametrize(
    ("case", "marks"),
    [
        ("gemma3", Marks(262144, (255999,), (256000,), "\n\n", "\n\n")),
        ("gemma4", Marks(258880, (255999,), (258882,))),
    ],
)
def test_ids_that_gemmas_files_lack_are_those_of_transformers(
    written: dict[str, Path], tmp_path: Path, case: str, marks: Marks
) -> None:
    config = json.loads((written[case] / "config.json").read_text("utf-8"))
    config = {key: each for key, each in config.items() if key not in FAMILIES[case].ids}
    place = "config.json", "text_config"
    text = {**config["text_config"], "vocab_size": 262208}
    folder = change(written[case], tmp_path / "model", *place, value=text)
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text}), "utf-8")
    assert read_image_setup(Folder("tiny", folder)).marks == marks


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl"])
def test_a_towers_base_of_angles_is_read(
    written: dict[str, Path], tmp_path: Path, case: str
) -> None:
    place = "config.json", "vision_config", "rope_parameters"
    found = []
    for theta in (10000.0, 100.0):
        rope = {"rope_type": "axial", "rope_theta": theta}
        folder = change(written[case], tmp_path / str(theta), *place, value=rope)
        found.append(encode(read_tower(folder), golden_vision.cases()[case])[0])
    [usual, *_] = encode(read_tower(written[case]), golden_vision.cases()[case])
    assert mx.abs(found[0] - usual).max() < 1e-4
    assert mx.abs(found[1] - usual).max() > 0.01


NUMBERS: Final = st.one_of(
    st.integers(-1, 9),
    st.sampled_from([16, 32, 64, 280, 1 << 14, 1 << 31, 10**400, 1.0, 0.5, 1e-30, 1e300]),
    st.floats(),
)
VALUES: Final = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=3), st.lists(NUMBERS, max_size=3),
    st.dictionaries(st.sampled_from(["height", "width", "rope_theta", "a"]), NUMBERS, max_size=2),
)  # fmt: skip
TOP: Final = (
    *("vision_config", "mm_tokens_per_image", "spatial_merge_size", "projector_hidden_act"),
    *("vision_feature_layer", "vision_feature_select_strategy", "multimodal_projector_bias"),
    *(key for family in FAMILIES.values() for key in family.ids),
)
PARTS: Final = ("weights are", "weights have", "its image processor", "its tokenizer")
MORE: Final = ("rope_parameters", "rope_theta", "hidden_act", "num_key_value_heads", "model_type")
SETTINGS: Final = (
    *("size", "rescale_factor", "image_mean", "image_std", "resample", "do_resize", "patch_size"),
    *("do_rescale", "do_normalize", "do_pan_and_scan", "min_pixels", "max_pixels", "merge_size"),
    *("temporal_patch_size", "max_soft_tokens", "pooling_kernel_size", "image_processor"),
)


def config_of(case: str) -> dict[str, Any]:
    goldens = golden_gemma if case.startswith("gemma") else golden_vision
    config: dict[str, Any] = goldens.cases()[case].config
    return config


@st.composite
def places(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    case = draw(st.sampled_from(CASES))
    vision = st.sampled_from([*config_of(case)["vision_config"], *MORE])
    place = st.one_of(
        st.tuples(st.just("config.json"), st.just("vision_config"), vision),
        st.tuples(st.just("config.json"), st.sampled_from(TOP)),
        st.tuples(st.just("preprocessor_config.json"), st.sampled_from(SETTINGS)),
    )
    return case, draw(place)


@pytest.mark.generator(weight=2)
@given(places(), st.one_of(st.just(ABSENT), VALUES))
def test_files_with_any_value_make_a_model_that_sees_or_reads_text_or_is_refused_by_name(
    written: dict[str, Path], where: tuple[str, tuple[str, ...]], value: Any
) -> None:
    """Before a model is loaded, its files say the same of images as the loaded model."""
    case, place = where
    with TemporaryDirectory() as name:
        folder = change(written[case], Path(name) / "model", *place, value=value)
        said: list[str] = []
        try:
            engine = load_generation(folder, name="tiny", device=Device.CPU, image_sandbox=paint)
        except ModelLoadFailed as error:
            said.append(str(error))
        else:
            assert reads_images(folder) == (engine.facts.images is not None)
            if engine.facts.images is None:
                said += engine.facts.notes
            else:
                with suppress(ContextLengthExceeded):  # the files may ask for many tokens
                    assert alone(engine, see("What is @?", CAT, max_tokens=2))
            engine.close()
    keys = {*TOP, *MORE, *SETTINGS, *config_of(case)["vision_config"]}
    for reason in said:  # it names a key of the files, an array, or a file
        assert any(key in reason for key in (*keys, *PARTS)), reason
