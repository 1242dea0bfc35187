"""The golden cases' models opened without an engine, and the logits that they give."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import Numbers, read_decoder
from gateway.engine.vision.kinds import Tower, kind_of
from gateway.engine.vision.layout import Layout, lay_out
from gateway.engine.vision.parts import Work
from gateway.engine.vision.reading import QwenDecoder, Row, SeeingDecoder
from gateway.engine.vision.towers import open_tower
from tests.golden_vision import BREAK, END, IMAGE, Case, cases, merge_of, reference_logits

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]
WHOLE = 1000  # tokens, more than any prompt here has
CLOSE = 1e-4  # in standard deviations of the logits: 2e-4 at a spread of 2


def run(steps: Generator[None, None, T]) -> T:
    """Return the result of a generator that is run to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def read_tower(folder: Path, dtype: str | None = None, *, is_packed: bool = False) -> Any:
    checkpoint = Checkpoint("tiny", folder)
    return run(open_tower(checkpoint, device=Device.CPU, dtype=dtype, is_packed=is_packed))


def reference(opened: "Opened") -> Any:
    """Return transformers' logits of an opened case."""
    [name] = [name for name, case in cases().items() if case is opened.case]
    return reference_logits(name)


def apart(logits: Any, right: Any) -> float:
    """Return the largest difference, in standard deviations of the right logits."""
    right = np.array(right)
    return float(np.abs(np.array(logits) - right).max() / right.std())


def encode(tower: Tower, case: Case) -> list[mx.array]:
    """Return the features of a case's images."""
    images = zip(case.patches, case.grids, strict=True)
    return [whole(tower.encode(mx.array(each), grid)) for each, grid in images]


def whole(work: Work) -> mx.array:
    """Do all of a tower's work."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            features: mx.array = end.value
            return features


def starts(case: Case) -> list[int]:
    """Return the places of the first tokens of a case's images."""
    prompt = case.prompt
    inside = (IMAGE, BREAK)
    return [i for i, x in enumerate(prompt) if x == IMAGE and prompt[i - 1] not in inside]


def layout(case: Case) -> Layout:
    merge = merge_of(case.config)
    grids = [(rows // merge, columns // merge) for rows, columns in case.grids]
    return lay_out(len(case.prompt), zip(starts(case), grids, strict=True))


@dataclass
class Opened:
    """A model whose prompt is read in chunks, and continued greedily."""

    case: Case
    model: Any
    decoder: SeeingDecoder
    row: Row

    @classmethod
    def open(cls, folder: Path, case: Case, dtype: str | None = None) -> "Opened":
        checkpoint, numbers = Checkpoint("tiny", folder), Numbers(dtype=dtype)
        features = encode(read_tower(folder, dtype), case)
        model = run(read_decoder(checkpoint, device=Device.CPU, numbers=numbers))
        decoder = kind_of(case.config).decoder(model, checkpoint.config())
        laid = layout(case) if isinstance(decoder, QwenDecoder) else None
        if BREAK in case.prompt:  # each row of an image ends with a token
            rows = [rows // merge_of(case.config) for rows, _ in case.grids]
            pairs = zip(features, rows, strict=True)
            features = [decoder.end_rows(*pair, BREAK, END) for pair in pairs]
        row = Row(laid, list(zip(starts(case), features, strict=True)))
        return cls(case, model, decoder, row)

    def read(self, chunk: int = WHOLE, row: Row | None = None) -> tuple[NDArray[Any], list[int]]:
        """Return the prompt's logits, and the tokens that follow it."""
        row, cache, prompt = row or self.row, make_prompt_cache(self.model), self.case.prompt
        parts = [
            self.decoder(mx.array([prompt[at : at + chunk]]), [row], [at], cache=cache)[0]
            for at in range(0, len(prompt), chunk)
        ]
        logits = np.array(mx.concatenate(parts).astype(mx.float32))
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < len(self.case.greedy):
            at = len(prompt) + len(tokens) - 1
            last = self.decoder(mx.array([tokens[-1:]]), [row], [at], cache=cache)[0, -1]
            tokens.append(int(np.array(last.astype(mx.float32)).argmax()))
        return logits, tokens


def rewrite(folder: Path, change: Callable[[Arrays], Arrays]) -> None:
    """Write a folder's arrays anew."""
    file = folder / "model.safetensors"
    changed = change(load_file(file))
    save_file({name: each.copy() for name, each in changed.items()}, file, {"format": "pt"})
