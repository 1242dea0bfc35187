"""The size and kind of a model on the hub, before its weights are downloaded.

All functions block: run them on a thread, never on the event loop or the lane.
"""

import io
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    disable_progress_bars,
)

from gateway.engine.discovery import MOST_BYTES, TELLING, Kind, read_kind, read_object
from gateway.engine.hub import (
    BoundedFile,
    Hub,
    HubFile,
    Unfit,
    blobs_of,
    cause,
    list_repository,
    require_download,
    room_needed,
    wanted_files,
)
from gateway.errors import ModelNotFound, ModelRefused, ModelUnavailable
from gateway.registry import HubSource

# Keys of config.json that let transformers or mlx-lm run a repository's Python code.
_CODE_KEYS = frozenset({"auto_map", "model_file"})


@dataclass(frozen=True, slots=True)
class Offer:
    """A model on the hub."""

    commit: str
    size: int  # bytes
    missing: int  # bytes not on the disk yet
    kind: Kind
    has_code: bool  # the repository has Python code, which is never run


def require_public(source: HubSource, hub: Hub, model: str) -> None:
    """Raise ModelRefused unless a repository is public and has exactly this name."""
    require_download(source, hub, model)
    try:
        info = HfApi(endpoint=hub.endpoint).model_info(source.repo, timeout=hub.timeout_s)
    except Exception as error:
        raise _missing(source, model, error) from error
    if info.private or info.gated:
        raise ModelRefused(model, f"{source.repo} is not public, but gated or private.")
    # The hub accepts old names and any case, but each spelling would be downloaded as another
    # model.
    if info.id != source.repo:
        raise ModelRefused(model, f"its name on the hub is {info.id}.")


def look(source: HubSource, hub: Hub, model: str) -> Offer:
    """Ask the hub for a model's size and kind.

    Raises ModelNotFound, ModelRefused and ModelUnavailable.
    """
    try:
        require_download(source, hub, model)
        return _look(source, hub, model)
    except (ModelRefused, ModelUnavailable):
        raise
    except Exception as error:
        raise _missing(source, model, error) from error


def _missing(source: HubSource, model: str, error: Exception) -> ModelNotFound | ModelUnavailable:
    why = cause(source, error)
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        return ModelNotFound(model, why=f"{why[0].upper()}{why[1:]}")
    return ModelUnavailable(model, why)


def _look(source: HubSource, hub: Hub, model: str) -> Offer:
    commit, every = list_repository(source, hub)
    files, blobs = wanted_files(source, every), blobs_of(source, hub)
    small = sum(file.size for file in files if file.sha256 is None)
    missing = room_needed(files, blobs) + small
    with tempfile.TemporaryDirectory(prefix="mlx-gateway-") as name:
        folder = None
        if not source.is_gguf:
            folder = Path(name)
            _fetch_small(source, hub, commit, every, folder)
        kind = read_kind(folder, model, str(source))
        keys = read_object(folder, "config.json").keys() if folder else ()
    has_code = any(file.name.endswith(".py") for file in every) or not _CODE_KEYS.isdisjoint(keys)
    return Offer(commit, sum(file.size for file in files), missing, kind, has_code)


def _fetch_small(
    source: HubSource, hub: Hub, commit: str, files: Iterable[HubFile], folder: Path
) -> None:
    disable_progress_bars()
    for file in files:
        if file.name not in TELLING:
            continue
        if file.size > MOST_BYTES:
            raise Unfit(f"{file.name} of {source.repo} has {file.size:,} bytes.")
        url = hf_hub_url(source.repo, file.name, revision=commit, endpoint=hub.endpoint)
        (folder / file.name).parent.mkdir(exist_ok=True)
        with BoundedFile(io.FileIO(folder / file.name, "w")) as out:
            out.most = file.size
            http_get(url, out, headers=build_hf_headers(), displayed_filename=file.name)
