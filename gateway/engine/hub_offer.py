"""The hub's model under a name: its bytes and its kind, before any weights are fetched.

Only small files are fetched, into a folder that is deleted afterwards. The hub's answers are not
trusted: lengths are bounded, and names stay inside the folder.

Plain blocking functions: run them on a thread, never on the loop or the lane.
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

# The keys of config.json by which Python of the repository would be run: transformers' and
# mlx-lm's.
_CODE_KEYS = frozenset({"auto_map", "model_file"})


@dataclass(frozen=True, slots=True)
class Offer:
    """A model on the hub."""

    commit: str
    size: int  # bytes of all files that a download fetches
    missing: int  # bytes of these that are not on the disk
    kind: Kind
    has_code: bool  # code is never fetched and never run


def require_public(source: HubSource, hub: Hub, model: str) -> None:
    """Raise ModelRefused for a repository that is not for everybody, or has another name;
    ModelNotFound and ModelUnavailable as `look` does.
    """
    require_download(source, hub, model)
    try:
        info = HfApi(endpoint=hub.endpoint).model_info(source.repo, timeout=hub.timeout_s)
    except Exception as error:
        raise _missing(source, model, error) from error
    if info.private or info.gated:
        raise ModelRefused(model, f"{source.repo} is not public, but gated or private.")
    if info.id != source.repo:  # any case and old names work too: each would be fetched
        raise ModelRefused(model, f"its name on the hub is {info.id}.")


def look(source: HubSource, hub: Hub, model: str) -> Offer:
    """Ask the hub for a model's size and kind; `model` is its name here.

    Raises ModelNotFound if it has no such repository, ModelUnavailable if it gives nothing, and
    ModelRefused if its kind is not known.
    """
    try:
        require_download(source, hub, model)
        return _look(source, hub, model)
    except (ModelRefused, ModelUnavailable):
        raise
    except Exception as error:
        raise _missing(source, model, error) from error


def _missing(source: HubSource, model: str, error: Exception) -> ModelNotFound | ModelUnavailable:
    """Return the error for a repository that the hub did not give."""
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
    """Fetch the files that tell a model's kind into a folder."""
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
