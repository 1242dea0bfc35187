"""A decoder is opened as its config.json means it, whichever version of transformers wrote that."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.configs import write_for_mlx_lm
from gateway.engine.models.decoders import open_decoder
from gateway.errors import ModelLoadFailed
from tests.checkpoints import write_chat

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def logits(folder: Path) -> mx.array:
    model: Any = open_decoder(Checkpoint("mine", folder), device=Device.CPU, dtype=None)[0]
    tokens = mx.arange(3, 43)[None]
    logits: mx.array = model(tokens)
    return logits


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("former", "written_now"),
    [
        ({"rope_theta": 70.0}, {"rope_type": "default", "rope_theta": 70.0}),
        (
            {"rope_theta": 70.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
            {"rope_type": "yarn", "rope_theta": 70.0, **YARN},
        ),
    ],
)
def test_positions_are_those_of_transformers_5(
    tmp_path: Path, former: dict[str, Any], written_now: dict[str, Any], is_nested: bool
) -> None:
    """It writes `rope_parameters`, which most of mlx-lm's classes do not read."""
    expected = logits(write_chat(tmp_path, **former))
    file = tmp_path / "config.json"
    config = {
        key: value for key, value in json.loads(file.read_text()).items() if key not in former
    }
    file.write_text(json.dumps(config))
    assert mx.abs(logits(tmp_path) - expected).max() > 0.1  # what a class does by itself
    if is_nested:  # keyed by kinds of layers
        written_now = {"full_attention": written_now}
    file.write_text(json.dumps({**config, "rope_parameters": written_now}))
    assert mx.array_equal(logits(tmp_path), expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers"),
    ],
)
def test_what_a_class_would_not_read_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    write_chat(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelLoadFailed, match=named):
        logits(tmp_path)


def test_keys_are_those_that_mlx_lms_classes_insist_on() -> None:
    """Phi-3 reads `type` as transformers 4 wrote it, GLM's wants a `rope_scaling` of None."""
    longrope = {"rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}
    config: dict[str, Any] = {"rope_parameters": longrope}
    write_for_mlx_lm(config)
    assert config["rope_scaling"] == {**longrope, "type": "longrope"}
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0}}
    write_for_mlx_lm(config)
    assert config["rope_scaling"] is None


def test_gemmas_windows_are_those_of_its_layer_types() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    config: dict[str, Any] = {"model_type": "gemma3_text", "layer_types": types * 2}
    write_for_mlx_lm(config)
    assert config["sliding_window_pattern"] == 3


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_is_tied_where_the_files_have_none_and_the_config_says_nothing(
    tmp_path: Path, is_tied: bool
) -> None:
    write_chat(tmp_path, tie_word_embeddings=is_tied)
    expected = logits(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["tie_word_embeddings"]
    file.write_text(json.dumps(config))
    assert mx.array_equal(logits(tmp_path), expected)
