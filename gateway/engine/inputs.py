"""A model's maximum input length and modalities, and whether its architecture is verified. All is
read from the model's files, without weights, before the model is loaded.

The embedding modules need mlx, so they are imported only for embedding and rerank models.
"""

import contextlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from gateway.engine.hub import Hub, on_disk
from gateway.engine.models.context import pair_context, read_context, read_files
from gateway.engine.models.notes import verified_by
from gateway.engine.vision.families import reads_images
from gateway.jobs.steps import Verified
from gateway.registry import ChatSpec, EmbeddingSpec, Inputs, ModelSpec, is_gguf


def read_inputs(spec: ModelSpec, hub: Hub) -> Inputs | None:
    """Return the inputs that a model accepts; None if its files are not on this disk. For an
    adapter, return the inputs of its base.

    The call blocks on files, but files that haven't changed are not read again.
    """
    if isinstance(spec, ChatSpec):
        spec = spec.base_spec or spec
    try:
        files = on_disk(spec, hub)
    except Exception:  # no such folder or package, or a broken cache
        return None
    if files is None:
        return None
    max_tokens = verified = None
    modalities = spec.input_modalities
    with contextlib.suppress(Exception):  # loading the model will report the error
        max_tokens = _read(files, condition := _condition(files), *_reader(spec))
        verified = _read_verified(files, condition)
        if isinstance(spec, ChatSpec) and spec.images and not spec.parallel:
            modalities = ("text", "image") if _reads_images(files, condition) else modalities
    return Inputs(max_tokens, modalities, verified)


def _reader(spec: ModelSpec) -> tuple[Callable[..., int | None], *tuple[Hashable, ...]]:
    """Return the function that reads a model's maximum input length from its files, and the
    arguments to call it with after the files: settings of models.yaml, mostly.
    """
    if isinstance(spec, ChatSpec):
        return read_context, spec.max_context
    if isinstance(spec, EmbeddingSpec):
        from gateway.engine.embedding.engine import read_embedding_context

        return read_embedding_context, spec.max_context, spec.pooling, spec.normalize
    if spec.scoring == "labels":
        return read_context, spec.max_context, pair_context
    from gateway.engine.embedding.cross_encoder import read_cross_context

    return read_cross_context, spec.max_context


@lru_cache(maxsize=1024)
def _read(files: Path, _: Hashable, read: Callable[..., int | None], *keys: Hashable) -> int | None:
    return read(files, *keys)


@lru_cache(maxsize=1024)
def _read_verified(files: Path, _: Hashable) -> Verified:
    return verified_by(read_files(files))


@lru_cache(maxsize=1024)
def _reads_images(files: Path, _: Hashable) -> bool:
    return not is_gguf(files.name) and reads_images(files)


def _condition(files: Path) -> Hashable:
    """Return a value that changes whenever a model's JSON files, or its GGUF file, change. Raises
    OSError if one of them is a pipe or a device, since reading it could block forever.
    """
    parts = [files]
    if not is_gguf(files.name):  # sentence-transformers' modules have folders with JSON files
        parts = sorted([*files.glob("*.json"), *files.glob("*/*.json")])
    found = [path.stat() for path in parts]
    if not all(S_ISREG(about.st_mode) or S_ISDIR(about.st_mode) for about in found):
        raise OSError(f"{files} holds a pipe or a device")
    return tuple((about.st_ino, about.st_size, about.st_mtime_ns) for about in found)
