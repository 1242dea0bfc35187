"""The tiny seeing models of Gemma's families: files with weights by seed, and transformers' logits.

golden/vision/gemma.json has the config.json of each case, its prompt and its grids, and digests of
the pixels of transformers' processors; gemma.npz has logits, and the names and shapes of arrays.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.golden_vision import FOLDER, Case, draw_weight

FILE: Final = FOLDER / "gemma.json"
LOGITS: Final = FOLDER / "gemma.npz"
IMAGE, START, END = 300, 302, 303
PICTURES: Final = ("odd.png", "even.png", "tiny.png", "wide.png", "tall.png", "gray.png")
HALVES: Final = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# As the files of google/gemma-3-4b-it and Gemma 4 have them.
GEMMA3_PROCESSOR: Final = {"size": {"height": 896, "width": 896}, "resample": 2, **HALVES}
GEMMA4_PROCESSOR: Final = {
    "patch_size": 16,
    "max_soft_tokens": 280,
    "pooling_kernel_size": 3,
    "resample": 3,
    "do_normalize": False,
}


def paint_grid(rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Return the pixels of a picture with this many patches of 4 × 4 pixels."""
    drawn = np.random.RandomState(seed).randint(0, 256, (4 * rows, 4 * columns, 3))
    return drawn.astype(np.uint8)


@cache
def stored() -> Any:
    return json.loads(FILE.read_text("utf-8"))


@cache
def cases() -> dict[str, Case]:
    """Return the cases by name."""
    return {
        name: Case(**{**case, "grids": [tuple(grid) for grid in case["grids"]]})
        for name, case in stored()["cases"].items()
    }


def reference_logits(case: str) -> NDArray[np.float32]:
    """Return transformers' logits of the prompt, (tokens, vocabulary)."""
    with np.load(LOGITS) as arrays:
        logits: NDArray[np.float32] = arrays[case]
    return logits


def draw_array(name: str, shape: list[int]) -> NDArray[np.float32]:
    """Return an array of the size that its part asks for, the same for the same name."""
    if not shape:  # a bound of clipped inputs or outputs
        return np.array(-1.5 if name.endswith("min") else 1.5, np.float32)
    drawn = draw_weight(name, tuple(shape))
    # As large as others, tied embeddings would make a model repeat its last token.
    return drawn * np.float32(0.2) if name.endswith("embed_tokens.weight") else drawn


def write_arrays(shapes: dict[str, list[int]], folder: Path) -> None:
    """Write arrays of some names and shapes."""
    arrays = {name: draw_array(name, shape) for name, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})


def write_model(case: str, folder: Path, **changes: Any) -> Path:
    """Write config.json, with some keys changed, and the weights of a case."""
    with np.load(LOGITS) as arrays:
        shapes = json.loads(str(arrays[f"{case} shapes"]))
    write_arrays(shapes, folder)
    config = {**cases()[case].config, **changes}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
