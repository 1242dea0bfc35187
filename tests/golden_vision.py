"""The tiny seeing models of tests/golden/vision: files with weights by seed, and transformers'
logits for a prompt with two pictures.

cases*.json have the config.json of each case, its prompt and the grids of its pictures, and
logits*.npz transformers' answers, with the names and the shapes of the arrays: the numbers
themselves are drawn by name.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.golden_decoders import draw

FOLDER: Final = Path(__file__).parent / "golden" / "vision"
IMAGE, VIDEO, START, END, BREAK = 300, 301, 302, 303, 304
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny model's config, a prompt with pictures, and transformers' answer to it."""

    config: dict[str, Any]
    prompt: list[int]
    grids: list[tuple[int, int]]  # rows and columns of patches
    greedy: list[int]  # the tokens that follow

    @property
    def patches(self) -> list[Floats]:
        """Return the patches of each picture, (patches, width)."""
        return [draw_patches(self.config["vision_config"], *grid) for grid in self.grids]


def draw_patches(vision: dict[str, Any], rows: int, columns: int) -> Floats:
    """Return the patches of a picture that is drawn by its size."""
    width = 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    drawn = np.random.RandomState(rows * 100 + columns).standard_normal((rows * columns, width))
    return drawn.astype(np.float32)


@cache
def cases() -> dict[str, Case]:
    """Return the cases by name."""
    return {
        name: Case(**{**case, "grids": [tuple(grid) for grid in case["grids"]]})
        for file in sorted(FOLDER.glob("cases*.json"))
        for name, case in json.loads(file.read_text("utf-8")).items()
    }


def merge_of(config: dict[str, Any]) -> int:
    """Return the patches per side of a token."""
    vision: dict[str, Any] = config["vision_config"]
    return int(vision.get("spatial_merge_size") or config.get("spatial_merge_size", 1))


@cache
def _stored() -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for file in sorted(FOLDER.glob("logits*.npz")):
        with np.load(file) as stored:
            arrays |= stored
    return arrays


def reference_logits(case: str) -> Floats:
    """Return transformers' logits of the prompt, (tokens, vocabulary)."""
    logits: Floats = _stored()[case]
    return logits


def draw_weight(name: str, shape: tuple[int, ...]) -> Floats:
    """Return an array of the size that its part asks for, the same for the same name."""
    values = draw(name, shape)
    if (
        len(shape) == 5 or "patch_conv" in name
    ):  # the projection of patches: a convolution of whole patches
        values *= math.sqrt(shape[-1] / math.prod(shape[1:]))
    return values


def write_model(case: str, folder: Path, **changes: Any) -> Path:
    """Write config.json, with some keys changed, and the weights of a case."""
    write_weights(json.loads(str(_stored()[f"{case} shapes"])), folder)
    config = {**cases()[case].config, **changes}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def write_weights(shapes: dict[str, list[int]], folder: Path) -> None:
    """Write arrays of some names and shapes."""
    arrays = {name: draw_weight(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
