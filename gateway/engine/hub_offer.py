"""The size and kind of a model on the hub, found out before any weights are downloaded.

Only small files are downloaded, to a folder that is deleted afterwards. The hub's responses are not
trusted: file sizes are limited, and file names may not lead out of the folder.

The functions block: run them on a thread, never on the event loop or the lane.
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

# Keys of config.json with which transformers or mlx-lm would run Python code of the repository.
_CODE_KEYS = frozenset({"auto_map", "model_file"})


@dataclass(frozen=True, slots=True)
class Offer:
    """A model on the hub."""

    commit: str
    size: int  # bytes of all files that a download needs
    missing: int  # bytes of these files that are not on the disk yet
    kind: Kind
    has_code: bool  # its repository has Python code, which we never download or run


def require_public(source: HubSource, hub: Hub, model: str) -> None:
    """Raise ModelRefused if a repository is private or gated, or if its name on the hub is spelled
    differently. Raises ModelNotFound and ModelUnavailable as `look` does.
    """
    require_download(source, hub, model)
    try:
        info = HfApi(endpoint=hub.endpoint).model_info(source.repo, timeout=hub.timeout_s)
    except Exception as error:
        raise _missing(source, model, error) from error
    if info.private or info.gated:
        raise ModelRefused(model, f"{source.repo} is not public, but gated or private.")
    # The hub also accepts a repository's old names, and names in any case. Each spelling would be
    # downloaded as another model.
    if info.id != source.repo:
        raise ModelRefused(model, f"its name on the hub is {info.id}.")


def look(source: HubSource, hub: Hub, model: str) -> Offer:
    """Ask the hub for a model's size and kind; `model` is the model's id for error messages.

    Raises ModelNotFound if the hub has no such repository, ModelUnavailable if it cannot be read,
    and ModelRefused if the model's kind is unclear.
    """
    try:
        require_download(source, hub, model)
        return _look(source, hub, model)
    except (ModelRefused, ModelUnavailable):
        raise
    except Exception as error:
        raise _missing(source, model, error) from error


def _missing(source: HubSource, model: str, error: Exception) -> ModelNotFound | ModelUnavailable:
    """Return the error for a repository that could not be read from the hub."""
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
    """Download the files that `read_kind` needs to a folder."""
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
