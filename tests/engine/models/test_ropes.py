"""Rotations that no golden has."""

from typing import Any

import pytest

from benchmarks.tiny_models import tiny_config
from gateway.engine.models.configs import classes_of
from gateway.engine.models.corrections import correct

LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


def built(kind: str, context: int | None = None, **changes: Any) -> Any:
    """Return the first layer's rotation."""
    config = {**tiny_config(kind), **changes}
    config.pop("rope_parameters", None)
    model_class, arguments = classes_of(config)
    model = model_class(arguments.from_dict(config))
    correct(model, config, {}, context)
    return model.layers[0].self_attn.rope


@pytest.mark.parametrize(("share", "dims"), [(None, 8), (0.25, 4)])
def test_glm_turns_the_share_of_a_head_that_its_config_states(
    share: float | None, dims: int
) -> None:
    assert built("glm", head_dim=16, partial_rotary_factor=share).dims == dims


@pytest.mark.parametrize(("kind", "pairs"), [("cohere", 8), ("ernie4_5", 8), ("deepseek_v3", 4)])
def test_a_longrope_that_would_turn_halves_for_neighbours_is_refused(kind: str, pairs: int) -> None:
    factors = {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
    with pytest.raises(ValueError, match="longrope is not supported"):
        built(kind, rope_scaling={**LONGROPE, **factors})


def test_a_longropes_attention_factor_is_the_configs() -> None:
    stated = built("llama", 64, rope_scaling={**LONGROPE, "attention_factor": 1.5})
    assert stated._scale == 1.5
    assert built("llama", 64, rope_scaling=LONGROPE)._scale != 1.5


def test_an_odd_number_of_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="odd number"):
        built("glm", head_dim=16, partial_rotary_factor=0.32)
