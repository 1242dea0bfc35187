# mypy: ignore-errors
# (its libraries are not where types are checked)
"""Make the references of the tests of GGUF files: weights as the package `gguf` unpacks them, and
logits as transformers gives them for the tiny models of tests/gguf_files.py.

This needs packages that the gateway does not: an environment with
    torch==2.13.0 transformers==5.23.0 accelerate gguf==0.19.0
Run, from the project's folder:  python -m tests.golden.make_gguf_numbers [file.gguf]
A file's name makes nothing: transformers' logits for it are written to stdout, as JSON, for the
token ids on stdin.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from transformers import AutoModelForCausalLM

from tests.gguf_files import KINDS, TYPES, blocks, write_model

HERE = Path(__file__).parent / "gguf"
IDS = [1, 40, 80, 120, 262, 7, 99, 200, 3, 3, 150, 261, 2, 60, 30, 11]


def logits(path: Path, ids: list[int]) -> np.ndarray:
    """Return the logits after each token, (tokens, vocabulary)."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].numpy()


def main() -> None:
    """Write everything anew."""
    if sys.argv[1:]:
        found = logits(Path(sys.argv[1]), json.load(sys.stdin))
        json.dump(found.tolist(), sys.stdout)
        return
    HERE.mkdir(exist_ok=True)
    random = np.random.default_rng(7)
    numbers = {}
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                 "IQ4_NL", "IQ4_XS"):  # fmt: skip
        stored = blocks(kind, (2, 512), random)
        raw = np.frombuffer(stored.content, np.uint8).reshape(2, -1)
        numbers[f"{kind}.raw"] = raw
        numbers[kind] = dequantize(raw, GGMLQuantizationType(TYPES[kind][0]))
    np.savez_compressed(HERE / "weights.npz", **numbers)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in KINDS:
            path = write_model(Path(folder, f"{architecture}.gguf"), architecture)
            found[architecture] = logits(path, IDS)
    np.savez_compressed(HERE / "logits.npz", ids=np.array(IDS), **found)


if __name__ == "__main__":
    main()
