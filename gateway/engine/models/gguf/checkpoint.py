"""A GGUF file as the engine sees any model's files: a config, and arrays by mlx-lm's names.

It is listed as `mlx_lm.convert` would have written it. Types whose groups are MLX's own stay
quantised, with the file's numbers; the others become floating. On a CPU all do.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.engine.models.checkpoint import Checkpoint, Tensor
from gateway.engine.models.gguf.architectures import TensorPlace, places, read_config
from gateway.engine.models.gguf.header import GgufError, Header, read_header
from gateway.engine.models.gguf.quants import FLOATS, GROUP, PACKED_BITS, READ
from gateway.errors import ModelLoadFailed
from gateway.registry import is_gguf

_ITEMSIZE: Final = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Widened:
    """What it costs that weights become floating: their types, and bytes before and after."""

    types: tuple[str, ...]
    stored_bytes: int
    bytes: int


class GgufCheckpoint:
    """A chat model in one file, under the name callers know it by; its header is read."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        with self.blame():
            self.header: Header = read_header(path)
            config = read_config(self.header)
            self.places: Mapping[str, TensorPlace] = places(config, self.header)
            self._check_types()
        self._config = {**config, **self._quantization()}
        self.dtype = self._floating()

    def failed(self, reason: str) -> ModelLoadFailed:
        """Return the error that says why this model cannot be loaded."""
        return ModelLoadFailed(self.name, f"{self.path.name}: {reason}")

    @contextlib.contextmanager
    def blame(self) -> Iterator[None]:
        """Turn any exception raised inside into the reason why this model cannot be loaded."""
        try:
            yield
        except ValueError as error:  # GgufError, and what the tokenizer says
            raise self.failed(str(error)) from error
        except Exception as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error

    def config(self) -> dict[str, Any]:
        """Return the model's config, with the modules that can stay quantised and their bits."""
        return self._config

    def kind(self, name: str) -> str:
        """Name the type that the file has a weight in."""
        return self.header.tensors[self.places[name].tensor].type.name

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a weight that MLX can hold quantised; None for the others."""
        if len(self.places[name].shape) != 2:
            return None
        return PACKED_BITS.get(self.kind(name))

    def tensors(self) -> dict[str, Tensor]:
        """List the arrays of the model, each by its name there."""
        listed: dict[str, Tensor] = {}
        for name, place in self.places.items():
            bits = self.packed_bits(name)
            if bits is None:
                listed[name] = self._floats(place.shape)
                continue
            rows, columns = place.shape
            module = name.removesuffix(".weight")
            listed[name] = Tensor("U32", (rows, columns * bits // 32), rows * columns * bits // 8)
            for part in ("scales", "biases"):
                listed[f"{module}.{part}"] = self._floats((rows, columns // GROUP))
        return listed

    def widen_types(self) -> Widened | None:
        """Return the cost of types that no device can hold quantised; None if there are none."""
        grown = [
            name
            for name in self.places
            if self.packed_bits(name) is None and self.kind(name) not in FLOATS
        ]
        if not grown:
            return None
        stored = [self.header.tensors[self.places[name].tensor].nbytes for name in grown]
        floats = [self._floats(self.places[name].shape).nbytes for name in grown]
        types = sorted({self.kind(name) for name in grown})
        return Widened(tuple(types), sum(stored), sum(floats))

    def _quantization(self) -> dict[str, Any]:
        bits = {name: self.packed_bits(name) for name in self.places}
        modules = {
            name.removesuffix(".weight"): {"group_size": GROUP, "bits": count}
            for name, count in bits.items()
            if count is not None
        }
        if not modules:
            return {}
        return {"quantization": {"group_size": GROUP, "bits": 4, **modules}}

    def _floats(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self.dtype, shape, math.prod(shape) * _ITEMSIZE[self.dtype])

    def _floating(self) -> str:
        """Choose what floating weights are read as: one type, that no mixture slows down.

        Norms are float32 in every file. bfloat16 has a range that float16 lacks, so it is kept
        wherever there is any.
        """
        kinds = {self.kind(name) for name, place in self.places.items() if len(place.shape) > 1}
        if "BF16" in kinds:
            return "BF16"
        if kinds == {"F32"}:
            return "F32"
        return "F16"

    def _check_types(self) -> None:
        unread = sorted({self.kind(name) for name in self.places} - READ)
        if unread:
            raise GgufError(
                f"it has weights of {', '.join(unread)}, which are not read here; "
                f"those of {', '.join(sorted(READ))} are"
            )


def open_checkpoint(name: str, path: Path) -> Checkpoint | GgufCheckpoint:
    """Return a model's files: a folder's, or a GGUF file whose header is read and checked.

    Raises ModelLoadFailed.
    """
    if is_gguf(path.name):
        return GgufCheckpoint(name, path)
    return Checkpoint(name, path)
