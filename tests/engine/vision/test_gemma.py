"""Gemma's seeing models give transformers' logits: whole, in chunks that cut no image that its
tokens see as a whole, and beside other rows.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from numpy.typing import NDArray

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import Numbers, read_decoder
from gateway.engine.vision.gemma_patches import GemmaPatches
from gateway.engine.vision.kinds import kind_of
from gateway.engine.vision.reading import Row, SeeingDecoder
from gateway.serving.generation.memory import MASK_BYTES
from tests.engine.vision.golden import read_tower, run, starts, whole
from tests.golden_gemma import cases, paint_grid, reference_logits, write_model
from tests.golden_vision import Case

NAMES = ["gemma3", "gemma4", "gemma4_vision"]
WHOLE = 1000


def patches_of(name: str) -> GemmaPatches:
    half, unit = (0.5, 0.5, 0.5), (1.0, 1.0, 1.0)
    zero = (0.0, 0.0, 0.0)
    if name == "gemma3":
        return GemmaPatches(4, 2, 1, half, half, 1 / 255, "bilinear", 32, 16)
    return GemmaPatches(4, 2, 1, zero, unit, 1 / 255, "bicubic", None, 280)


class Opened:
    """A model whose prompt is read in chunks."""

    def __init__(
        self, name: str, folder: Path, *, shift: int = 0, dtype: str | None = None
    ) -> None:
        self.case: Case = cases()[name]
        checkpoint = Checkpoint("tiny", write_model(name, folder))
        tower = read_tower(folder, dtype)
        features = []
        for number, grid in enumerate(self.case.grids):
            pixels = patches_of(name).to_patches(paint_grid(*grid, number + shift))
            features.append(whole(tower.encode(mx.array(pixels), grid)))
        numbers = Numbers(dtype=dtype)
        self.model: Any = run(read_decoder(checkpoint, device=Device.CPU, numbers=numbers))
        config = checkpoint.config()
        self.decoder: SeeingDecoder = kind_of(config).decoder(self.model, dict(config))
        self.row = Row(None, list(zip(starts(self.case), features, strict=True)))

    def read(self, chunk: int = WHOLE) -> NDArray[Any]:
        cache, prompt = make_prompt_cache(self.model), self.case.prompt
        wholes = [(at, at + len(each)) for at, each in self.row.images]
        parts, at = [], 0
        while at < len(prompt):
            end = at + chunk
            for start, stop in wholes if self.decoder.keeps_whole else ():
                if start < end < stop:
                    end = start if start > at else stop
            tokens = mx.array([prompt[at:end]])
            parts.append(self.decoder(tokens, [self.row], [at], cache=cache)[0])
            at = end
        return np.array(mx.concatenate(parts).astype(mx.float32))


@pytest.mark.parametrize("chunk", [WHOLE, 3, 5, 7])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, chunk: int) -> None:
    expected = reference_logits(name)
    logits = Opened(name, tmp_path).read(chunk)
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", NAMES)
def test_another_image_changes_the_logits(tmp_path: Path, name: str) -> None:
    logits = Opened(name, tmp_path, shift=5).read()
    assert np.abs(logits - reference_logits(name))[-1].max() > 1


@pytest.mark.parametrize("name", ["gemma3", "gemma4_vision"])
def test_a_mask_that_an_image_opens_takes_no_more_bytes_than_are_counted(
    tmp_path: Path, name: str
) -> None:
    """Gemma 3 opens all layers, Gemma 4 those with windows."""
    opened, width, known = Opened(name, tmp_path), 64, 4032
    text = opened.case.config["text_config"]
    windowed = name != "gemma3"
    assert opened.decoder.window == (text["sliding_window"] if windowed else None)
    cache = make_prompt_cache(opened.model)
    (layer, *_) = (each for each in cache if isinstance(each, RotatingKVCache) is windowed)
    layer.offset = known
    parts = [[(slice(8, 40), opened.row.images[0][1])]]
    with opened.decoder.seeing([opened.row], parts, [known], width, cache):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        window = opened.decoder.window
        mask = layer.make_mask(width, return_array=True, window_size=window)
        mx.eval(mask)
        after = mx.get_peak_memory()
    keys = known + width if window is None else window + width
    assert width * mask.shape[-1] <= after - before
    assert after - before <= MASK_BYTES * width * (keys + width) + 2**16
    assert mask[0, 0, 8, -width + 39].item()
    assert not mask[0, 0, 7, -width + 39].item()
