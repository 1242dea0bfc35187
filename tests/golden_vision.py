"""The tiny seeing models of tests/golden/vision: files with weights by seed, and transformers'
logits for a prompt with two pictures.

cases.json has the config.json of each case, its prompt and the grids of its pictures, and
logits.npz transformers' answers, with the names and the shapes of the arrays: the numbers
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
IMAGE, VIDEO, START, END = 300, 301, 302, 303
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
    width = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    drawn = np.random.RandomState(rows * 100 + columns).standard_normal((rows * columns, width))
    return drawn.astype(np.float32)


@cache
def cases() -> dict[str, Case]:
    """Return the cases by name."""
    stored = json.loads((FOLDER / "cases.json").read_text("utf-8"))
    return {
        name: Case(**{**case, "grids": [tuple(grid) for grid in case["grids"]]})
        for name, case in stored.items()
    }


def reference_logits(case: str) -> Floats:
    """Return transformers' logits of the prompt, (tokens, vocabulary)."""
    with np.load(FOLDER / "logits.npz") as stored:
        logits: Floats = stored[case]
    return logits


def draw_weight(name: str, shape: tuple[int, ...]) -> Floats:
    """Return an array of the size that its part asks for, the same for the same name."""
    values = draw(name, shape)
    if len(shape) == 5:  # the projection of patches: a convolution of whole patches
        values *= math.sqrt(shape[-1] / math.prod(shape[1:]))
    return values


def write_model(case: str, folder: Path, **changes: Any) -> Path:
    """Write config.json, with some keys changed, and the weights of a case."""
    with np.load(FOLDER / "logits.npz") as stored:
        shapes = json.loads(str(stored[f"{case} shapes"]))
    write_weights(shapes, folder)
    config = {**cases()[case].config, **changes}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def write_weights(shapes: dict[str, list[int]], folder: Path) -> None:
    """Write arrays of some names and shapes."""
    arrays = {name: draw_weight(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
