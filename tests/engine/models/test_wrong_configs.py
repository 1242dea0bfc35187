"""A config.json with any values ends in ModelLoadFailed or in a model, and soon."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.device import Device
from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import open_decoder
from gateway.errors import ModelLoadFailed
from tests.checkpoints import DEMO, write_chat
from tests.golden_decoders import cases, write_decoder

SECONDS = 10  # processor time
ORIGINAL = {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, **ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    **ORIGINAL,
}


def open_or_refuse(folder: Path) -> ModelLoadFailed | None:
    """Read and open a chat model's folder; return the error that refuses it."""
    started = time.process_time()
    try:
        setup = read_chat_setup(folder, name="mine", max_context=None)
        open_decoder(
            Checkpoint("mine", folder),
            device=Device.CPU,
            dtype=None,
            context=setup.max_context,
            note=lambda _: None,
        )
    except ModelLoadFailed as error:
        return error
    finally:
        assert time.process_time() - started < SECONDS
    return None


def change(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), "utf-8")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 10**9},  # transformers makes a dictionary of them
        {"text_config": [1]},
        {"text_config": {"model_type": 7}},
        {"rope_scaling": "yarn"},
        {"rope_scaling": [1]},
        {"rope_scaling": {**YARN, "factor": "x"}},
        {"rope_scaling": {**YARN, "factor": None}},
        {"rope_scaling": {**YARN, "attention_factor": [1]}},
        {"rope_scaling": {**YARN, "truncate": False, "beta_fast": "x"}},
        {"rope_scaling": {**YARN, "type": "linear", "rope_type": "linear", "factor": 0}},
        {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 3}},
        {"rope_scaling": {**LONGROPE, "long_factor": "x"}},
        {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": "x"}},
        {"rope_parameters": {"full_attention": 5, "sliding_attention": 6}, "rope_scaling": None},
        {"rope_parameters": [1]},
        {"layer_types": [1, 2]},
        {"layer_types": 5},
        {"hidden_act": [1]},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "x"},
        {"model_type": [1]},
        {"max_position_embeddings": [5]},
        {"quantization": [1]},
    ],
)
def test_a_wrong_value_is_refused_as_the_models(changes: dict[str, Any], tmp_path: Path) -> None:
    write_chat(tmp_path)
    change(tmp_path, **changes)
    assert open_or_refuse(tmp_path) is not None


def folder_of(case: str, place: Path) -> Path:
    """Return a folder with the files of a case, and demo-chat's tokenizer; made once."""
    folder = place / case
    if not folder.exists():
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO / file, folder)
        write_decoder(case, folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


NUMBERS = st.sampled_from([0, -1, 1, 3, 2.5, 1e30, -1e-30, 10**9, 10**30, float("inf")])
WORDS = st.sampled_from(["", "x", "yarn", "longrope", "full_attention", "sliding_attention"])
PLAIN = st.none() | st.booleans() | NUMBERS | st.just(float("nan")) | WORDS
KEYS = ["factor", "rope_type", "type", "rope_theta", "full_attention", "sliding_attention"]
KEYS += ["long_factor", "short_factor", "truncate", "attention_factor", "mscale", "model_type"]
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS + sorted(ORIGINAL)), inner, max_size=5)
    ),
    max_leaves=8,
)
# Sizes that no config of the cases has, and keys that only other families read.
OTHERS = ["num_labels", "text_config", "rope_scaling", "rope_parameters", "use_sliding_window"]
OTHERS += [
    "max_window_layers",
    "per_layer_config",
    "attn_config",
    "mlp_layer_types",
    "quantization",
]


@pytest.mark.generator(weight=2)
@settings(deadline=None)
@given(data=st.data())
def test_any_value_of_any_key_ends_in_a_refusal_or_a_model(
    place: Path, data: st.DataObject
) -> None:
    case = data.draw(st.sampled_from(sorted(cases())))
    config = cases()[case]["config"]
    keys = st.sampled_from([*OTHERS, *sorted(config)])
    changes = data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))
    folder = folder_of(case, place)
    try:
        change(folder, **changes)
        open_or_refuse(folder)
    finally:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
