"""The tiny decoders of tests/golden/decoders: files with weights by seed, and transformers' logits.

cases.json has the config.json of each case, and logits.npz transformers' answers to PROMPT, with
the names and the shapes of the arrays: the numbers themselves are drawn by name.
"""

import json
import math
import random
import zlib
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.reference import forms

FOLDER: Final = Path(__file__).parent / "golden" / "decoders"
VOCABULARY: Final = 64
TOKENS: Final = 40
_drawn = random.Random(5)
PROMPT: Final = [_drawn.randrange(3, VOCABULARY) for _ in range(TOKENS)]
_GAIN: Final = 1.6  # a matrix's, so that each layer is heard in the logits


def draw(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return an array of a size that its part in a model asks for, the same for the same name."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    low = name.lower()
    if low.endswith("inv_freq"):
        raise ValueError(f"{name} is computed, not drawn")
    if "a_log" in low or "dt_bias" in low:
        values = 0.3 * values
    elif "correction_bias" in low or "expert_bias" in low:
        values = 0.1 * values
    elif len(shape) < 2 or "norm" in low:
        values = ("bias" not in low) + 0.25 * values
    elif "embed" in low:
        values = 0.7 * values
    elif "conv" in low:
        values = 0.5 * values
    else:
        values = _GAIN * values / math.sqrt(128 if len(shape) == 3 else shape[-1])
    return values.astype(np.float32)


@cache
def cases() -> dict[str, dict[str, Any]]:
    """Return the cases: `config` as the file has it, and the `form` of the files."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text("utf-8"))
    return found


def reference_logits(case: str) -> NDArray[np.float32]:
    """Return transformers' logits of PROMPT, (tokens, vocabulary)."""
    with np.load(FOLDER / "logits.npz") as stored:
        logits: NDArray[np.float32] = stored[case].astype(np.float32)
    return logits


def write_decoder(case: str, folder: Path, **changes: Any) -> Path:
    """Write config.json, with some keys changed, and the weights of a case."""
    found = cases()[case]
    with np.load(FOLDER / "logits.npz") as stored:
        shapes = json.loads(str(stored[f"{case} shapes"]))
    write_weights(shapes, folder)
    if found["form"] == "hub":
        forms.rewrite_weights(found["config"]["model_type"], folder)
    (folder / "config.json").write_text(json.dumps({**found["config"], **changes}), "utf-8")
    return folder


def write_weights(shapes: dict[str, list[int]], folder: Path) -> None:
    """Write arrays of some names and shapes."""
    arrays = {name: draw(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
