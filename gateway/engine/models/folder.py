"""A model's folder: its JSON files and the headers of its safetensors. Without mlx.

Pickled weights are never opened, because unpickling runs the code in them.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.engine.models.counts import check_counts
from gateway.errors import ModelLoadFailed
from gateway.panics import as_exception
from gateway.registry import is_gguf

_INDEX = "model.safetensors.index.json"
_FAULTS: Final = (OSError, ValueError, LookupError, TypeError, AttributeError)
# The longest header that the format allows.
HEADER_BYTES: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array in a safetensors file."""

    dtype: str  # as the file names it, such as `BF16`
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's folder, and the name that callers know the model by.

    Its methods raise ModelLoadFailed for faulty files.
    """

    name: str
    folder: Path

    def failed(self, reason: str) -> ModelLoadFailed:
        return ModelLoadFailed(self.name, reason)

    @contextlib.contextmanager
    def blame(self, about: str = "") -> Iterator[None]:
        """Turn any exception raised inside into ModelLoadFailed."""
        try:
            yield
        except BaseException as error:
            reason = as_exception(error)
            raise self.failed(f"{about}{type(reason).__name__}: {reason}") from error

    def read_json(self, file: str) -> Any:
        """Return the content of a JSON file, or None if there is no file."""
        path = self.folder / file
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise self.failed(f"{file} is not valid JSON: {error}") from error

    def read_object(self, file: str) -> dict[str, Any]:
        content = self.read_json(file)
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise self.failed(f"{file} holds no JSON object")
        if file == "config.json":
            try:
                check_counts(content)
            except (ValueError, RecursionError) as error:
                raise self.failed(f"{file}: {error}") from error
        return content

    def config(self) -> dict[str, Any]:
        config = self.read_object("config.json")
        if not isinstance(config.get("text_config") or {}, dict):
            raise self.failed("config.json: text_config is no object")
        return config

    @contextlib.contextmanager
    def reading_config(self) -> Iterator[None]:
        """Turn errors from reading config.json's keys into ModelLoadFailed."""
        try:
            yield
        except KeyError as error:
            raise self.failed(f"config.json has no {error.args[0]}") from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.failed(f"config.json has an invalid value: {error}") from error

    def read_modules(self) -> list[tuple[str, str]] | None:
        """Return each module's class name and path in sentence-transformers' modules.json."""
        listing = self.read_json("modules.json")
        if listing is None:
            return None
        try:
            return [(str(part["type"]).rpartition(".")[2], str(part["path"])) for part in listing]
        except (TypeError, KeyError) as error:
            raise self.failed("modules.json is no list of modules with type and path") from error

    def all_tensors(self) -> dict[str, Tensor]:
        files = self._weight_files()
        return {name: tensor for file in files for name, tensor in self.header(file).items()}

    def header(self, file: str) -> dict[str, Tensor]:
        """Read one file's header: https://huggingface.co/docs/safetensors/index#format."""
        path = self.folder / file
        try:
            with path.open("rb") as content:
                length = int.from_bytes(content.read(8), "little")
                there = path.stat().st_size
                if length > min(there, HEADER_BYTES):
                    raise ValueError("its header is cut off or missing")
                arrays = json.loads(content.read(length))
            arrays.pop("__metadata__", None)
            tensors = {name: _tensor(array) for name, array in arrays.items()}
            expected_size = 8 + length + max(array["data_offsets"][1] for array in arrays.values())
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise self.failed(f"{file} is not a whole safetensors file: {error}") from error
        if there < expected_size:
            size = f"it has {there:,} of {expected_size:,} bytes"
            raise self.failed(f"{file} is not a whole safetensors file: {size}")
        return tensors

    def _weight_files(self) -> list[str]:
        """List the files of the model, and those beside them of its MTP head."""
        beside = sorted(path.name for path in self.folder.glob("mtp*.safetensors"))
        return sorted({*self._model_files(), *beside})

    def _model_files(self) -> list[str]:
        if (self.folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        index = self.read_object(_INDEX)
        if index:
            try:
                shards = sorted({*index["weight_map"].values()})
                absent = [shard for shard in shards if not (self.folder / shard).is_file()]
            except _FAULTS as error:
                raise self.failed(f"{_INDEX} has no weight_map of files: {error}") from error
            if absent or not shards:
                raise self.failed(f"{_INDEX} names missing shards: {join_names(absent)}")
            return shards
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt") for p in self.folder.glob(pattern))
        if pickled:
            raise self.failed(
                f"only safetensors weights are loaded, and the folder has {join_names(pickled)}: "
                "convert it to model.safetensors"
            )
        files = sorted(p.name for p in self.folder.glob("*") if is_gguf(p.name))
        if files:
            raise self.failed(f"its folder has {files[0]}: `source:` must name the file itself")
        raise self.failed(f"no model.safetensors in {self.folder}")


def _tensor(array: Mapping[str, Any]) -> Tensor:
    shape, (start, end) = array["shape"], array["data_offsets"]
    numbers = [*shape, start, end - start]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(
            f"it places an array of shape {shape!r:.60} at bytes {start!r:.20} to {end!r:.20}"
        )
    return Tensor(array["dtype"], tuple(shape), end - start)


def join_names(names: Iterable[str], limit: int = 5) -> str:
    names = sorted(names)
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text
