"""A decoder is opened as its config.json means it, whichever version of transformers wrote that."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import open_decoder
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
    if is_nested:  # by kinds of layers
        written_now = {"full_attention": written_now}
    file.write_text(json.dumps({**config, "rope_parameters": written_now}))
    assert mx.array_equal(logits(tmp_path), expected)
