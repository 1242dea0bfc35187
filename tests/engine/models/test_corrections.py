"""Tiny decoders answer as transformers does, where mlx-lm's classes by themselves do not."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from benchmarks.reference.rows import Gap
from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import open_decoder
from tests.golden_decoders import PROMPT, cases, reference_logits, write_decoder

# How long texts may become, where that is less than the config says.
CONTEXTS = {"phi3 longrope, within": 64}
# Cases in which mlx-lm is right: alone, and beyond the original context.
RIGHT = ("llama dynamic", "phi3 longrope, beyond")
APART = 1e-2  # rms of a difference ÷ standard deviation


def opened(case: str, folder: Path, context: int | None = None) -> Any:
    checkpoint = Checkpoint("mine", folder)
    return open_decoder(checkpoint, device=Device.CPU, dtype=None, context=context)[0]


def logits(model: Any, prompt: list[int], cache: Any = None) -> NDArray[np.float32]:
    found = model(mx.array([prompt]), cache=cache or make_prompt_cache(model))[0]
    return np.array(found.astype(mx.float32))


@pytest.mark.parametrize("case", list(cases()))
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = opened(case, write_decoder(case, tmp_path), CONTEXTS.get(case))
    gap = Gap.between(reference_logits(case), logits(model, PROMPT))
    assert gap.first is None, gap
    cache = make_prompt_cache(model)
    steps = [logits(model, PROMPT[:30], cache)]
    steps += [logits(model, [token], cache) for token in PROMPT[30:]]
    gap = Gap.between(reference_logits(case), np.concatenate(steps))
    assert gap.first is None, gap


@pytest.mark.parametrize("case", [case for case in cases() if case not in RIGHT])
def test_mlx_lm_by_itself_refuses_the_files_or_computes_other_logits(
    case: str, tmp_path: Path
) -> None:
    """A correction goes once this fails: mlx-lm has become right."""
    write_decoder(case, tmp_path)
    try:
        model = load_model(tmp_path)[0]
    except Exception:
        return
    assert Gap.between(reference_logits(case), logits(model, PROMPT)).worst > APART


def test_long_factors_rotate_a_phi_whose_texts_may_be_long(tmp_path: Path) -> None:
    case = "phi3 longrope, beyond"
    short = opened(case, write_decoder(case, tmp_path), context=32)
    assert Gap.between(reference_logits(case), logits(short, PROMPT)).worst > APART


def test_rows_of_a_dynamic_rotation_that_begin_at_different_places_answer_as_alone(
    tmp_path: Path,
) -> None:
    case = "llama dynamic"
    padding = 12
    rows = mx.array([PROMPT, [0] * padding + PROMPT[: len(PROMPT) - padding]])

    def answered(model: Any) -> NDArray[np.float32]:
        cache = [BatchKVCache([0, padding]) for _ in model.layers]
        return np.array(model(rows, cache=cache).astype(mx.float32))

    found = answered(opened(case, write_decoder(case, tmp_path)))
    reference = reference_logits(case)
    assert Gap.between(reference, found[0]).first is None
    assert Gap.between(reference[:-padding], found[1, padding:]).first is None
    with pytest.raises(ValueError, match="scalar"):
        answered(load_model(tmp_path)[0])
