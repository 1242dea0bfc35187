"""A model's maximum input length and modalities, read from its files before it is loaded."""

import contextlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from gateway.engine.hub import Hub, on_disk
from gateway.engine.models.context import pair_context, read_context, read_files
from gateway.engine.models.notes import verified_by
from gateway.engine.vision.image_setup import reads_images
from gateway.jobs.steps import Verified
from gateway.registry import ChatSpec, EmbeddingSpec, Inputs, ModelSpec, is_gguf


def read_inputs(spec: ModelSpec, hub: Hub) -> Inputs | None:
    """Return the inputs that a model accepts, or None if its files are not on this disk."""
    if isinstance(spec, ChatSpec):
        spec = spec.base_spec or spec
    try:
        files = on_disk(spec, hub)
    except Exception:
        return None
    if files is None:
        return None
    max_tokens = verified = None
    modalities = spec.input_modalities
    with contextlib.suppress(Exception):  # loading will report the error
        max_tokens = _read(files, condition := _condition(files), *_reader(spec))
        verified = _read_verified(files, condition)
        if isinstance(spec, ChatSpec) and spec.images and not spec.parallel:
            modalities = ("text", "image") if _reads_images(files, condition) else modalities
    return Inputs(max_tokens, modalities, verified)


def _reader(spec: ModelSpec) -> tuple[Callable[..., int | None], *tuple[Hashable, ...]]:
    """Return the function that reads the maximum input length, and its last arguments."""
    if isinstance(spec, ChatSpec):
        return read_context, spec.max_context
    if isinstance(spec, EmbeddingSpec):
        from gateway.engine.embedding.loading import read_embedding_context

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
    """Return a value that changes whenever a model's JSON or GGUF files change."""
    parts = [files]
    if not is_gguf(files.name):  # sentence-transformers' modules are subfolders
        parts = sorted([*files.glob("*.json"), *files.glob("*/*.json")])
    found = [path.stat() for path in parts]
    # Reading a pipe or a device could block forever.
    if not all(S_ISREG(about.st_mode) or S_ISDIR(about.st_mode) for about in found):
        raise OSError(f"{files} holds a pipe or a device")
    return tuple((about.st_ino, about.st_size, about.st_mtime_ns) for about in found)
