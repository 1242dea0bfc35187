"""A model's files: in a folder, in an installed package, or downloaded from the hub.

All functions block: run them on a thread, never on the event loop or the lane. Large files are
downloaded here, because huggingface_hub 2.4 restarts killed downloads and checks only sizes
(`_download_to_tmp_and_move`, pull request 4228).
"""

import contextlib
import errno
import glob
import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    WeakFileLock,
    _http,
    build_hf_headers,
    disable_progress_bars,
    logging,
    tqdm,
)
from safetensors import SafetensorError, safe_open
from typing_extensions import Buffer

from gateway.errors import ModelLoadFailed, ModelUnavailable
from gateway.registry import (
    HubSource,
    ModelSpec,
    PackageSource,
    Source,
    install_command,
    is_gguf,
    package_folder,
    source_id,
    stays_inside,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
LOGIN = "run `hf auth login` or set HF_TOKEN."
NETWORK = "Check the network, HTTPS_PROXY and GATEWAY_HUB_ENDPOINT, then try again."
_MOVES = 3  # tries of a download, since the branch may move
SPARE_BYTES = 1 << 24  # bytes by which small files may grow in the meantime


class Damaged(Exception):
    """A file's size or content differs from the hub's information."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """The hub's information about a file."""

    name: str
    size: int  # bytes
    sha256: str | None = None  # only for large files, which the hub stores outside of git


def room_needed(files: Iterable[HubFile], blobs: Path) -> int:
    """Count the bytes of large files that are not on the disk yet."""
    large = [file for file in files if file.sha256]
    return sum(max(0, file.size - _stored_bytes(file, blobs)) for file in large)


def require_room(needed: int, folder: Path) -> None:
    """Raise OSError (ENOSPC) if the folder's disk has fewer than `needed` free bytes."""
    there, free = _free(folder)
    if needed > free:
        problem = f"{needed:,} bytes are to be fetched, and {there} has room for {free:,}"
        raise OSError(errno.ENOSPC, problem)


def _free(folder: Path) -> tuple[Path, int]:
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    return there, shutil.disk_usage(there).free


class BoundedFile(io.BufferedWriter):
    """A file that raises Damaged instead of growing beyond `most` bytes."""

    most: int

    def write(self, data: Buffer) -> int:
        if self.tell() + memoryview(data).nbytes > self.most:
            raise Damaged(f"{Path(str(self.name)).stem} is longer than the hub says.")
        return super().write(data)


def fetch(url: str, file: HubFile, blobs: Path) -> None:
    """Download a large file to huggingface_hub's cache, completing a partial file.

    Only a file with the right hash gets its final name. Raises Damaged, HTTP errors and OSError.
    """
    assert file.sha256 is not None
    blob, part = blobs / file.sha256, blobs / f"{file.sha256}.part"
    locks = blobs.parents[1] / ".locks" / blobs.parent.name
    for folder in (blobs, locks):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{file.sha256}.lock"):
        if blob.is_file():
            if _is_whole(blob, file):
                return
            blob.unlink()
        _fetch_rest(url, file, part)
        if not _is_whole(part, file):
            part.unlink()
            raise Damaged(f"{file.name} was downloaded, but its hash isn't the hub's.")
        part.replace(blob)


class Counter(tqdm):
    """A silent progress bar that raises Damaged beyond `most` downloaded bytes."""

    most = 0  # bytes

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0
        if self.n > self.most:
            raise Damaged("its small files are longer than the hub says.")


def check(folder: Path, files: Iterable[HubFile]) -> None:
    """Raise Damaged unless a folder's files are as the hub says.

    A file of the wrong size is removed, so that it will be downloaded again.
    """
    for file in files:
        path = folder / file.name
        if path.stat().st_size != file.size:
            _remove(path)
            raise Damaged(f"{file.name} doesn't have the hub's size of {file.size:,} bytes.")
        if path.suffix == ".safetensors":
            _check_layout(path)


def _check_layout(path: Path) -> None:
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise Damaged(f"{path.name} is not a whole safetensors file: {error}") from error


def _fetch_rest(url: str, file: HubFile, part: Path) -> None:
    if part.is_file() and part.stat().st_size > file.size:
        part.unlink()
    try:
        with BoundedFile(io.FileIO(part, "a")) as out:
            out.most = file.size
            http_get(
                url,
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.name,
            )
    except (Damaged, OSError) as error:
        if isinstance(error, Damaged) or error.errno in _FULL:
            part.unlink()
        raise


def _stored_bytes(file: HubFile, blobs: Path) -> int:
    paths = (blobs / f"{file.sha256}", blobs / f"{file.sha256}.part")
    return max((path.stat().st_size for path in paths if path.is_file()), default=0)


def _is_whole(path: Path, file: HubFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _remove(path: Path) -> None:
    """Remove a link in the cache and its blob."""
    path.resolve().unlink()
    path.unlink(missing_ok=True)


# huggingface_hub (2.4, http_backoff) closes all threads' HTTP client when one thread cannot
# connect.
_http.close_session = lambda: None
logging.set_verbosity_error()  # type: ignore[no-untyped-call]
# The files to download, without pickles, which can run code. The gateway's own reader takes
# BGE-M3's two heads, and artifact.metadata is ColBERT's JSON.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
FILES += ["sparse_linear.pt", "colbert_linear.pt", "artifact.metadata"]
# Copies of the weights in makers' formats (gpt-oss, Mistral), and an adapter's weights at earlier
# training steps (mlx-lm).
COPIES = ["original/*", "consolidated*", "[0-9]*_adapters.safetensors"]
ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


class Unfit(Exception):
    """A repository lacks needed files, or lists invalid ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The hub's address and cache folder, None for Hugging Face's defaults."""

    endpoint: str | None = None
    cache: Path | None = None
    timeout_s: float = 4.0
    may_download: bool = True


def free_bytes(hub: Hub) -> int:
    return _free(hub.cache or Path(constants.HF_HUB_CACHE))[1]


def on_disk(spec: ModelSpec, hub: Hub) -> Path | None:
    """Return the path of a model's folder or GGUF file, or None if it must be downloaded.

    Raises ModelUnavailable for a missing package, and ModelLoadFailed for a missing path.
    """
    source = spec.source
    if isinstance(source, HubSource):
        if source.package is not None and is_installed(source):
            return _find_packaged(spec.id, source.package)
        return _find_cached(source, hub)
    if isinstance(source, PackageSource):
        return _find_packaged(spec.id, source)
    if not _is_there(source.path):
        raise ModelLoadFailed(spec.id, f"there is no {_noun(source)} {source.path}")
    return source.path


def is_installed(source: HubSource) -> bool:
    return source.package is not None and package_folder(source.package.module) is not None


def has_weights(folder: Path) -> bool:
    """Return True if the config and all weights of a model or adapter are on the disk."""
    if is_gguf(folder.name):
        return folder.is_file()
    if not (folder / "config.json").is_file():
        return all((folder / name).is_file() for name in ADAPTER_FILES)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def stored_bytes(folder: Path) -> int:
    if is_gguf(folder.name):
        return folder.stat().st_size
    files = {file for pattern in FILES for file in folder.rglob(pattern)}
    return sum(
        file.stat().st_size
        for file in files
        if file.is_file() and is_wanted(str(file.relative_to(folder)))
    )


def is_wanted(name: str) -> bool:
    is_copy = any(fnmatch(name, pattern) for pattern in COPIES)
    return not is_copy and any(fnmatch(name, pattern) for pattern in FILES)


def ask_hub(spec: ModelSpec, hub: Hub) -> int:
    """Ask the hub for a model's size in bytes. Raises ModelUnavailable."""
    source = spec.source
    assert isinstance(source, HubSource)
    require_download(source, hub, spec.id)
    try:
        return sum(file.size for file in _listing(source, hub)[1])
    except Exception as error:
        raise unavailable(spec.id, source, cause(source, error)) from error


def require_download(source: HubSource, hub: Hub, model: str) -> None:
    """Raise ModelUnavailable if downloads are turned off."""
    if not hub.may_download:
        reason = f"{source.repo} is not on this disk, and GATEWAY_AUTO_PULL is off."
        raise unavailable(model, source, f"{reason} Run `mlx-gateway pull {model}`.")


def fetched_bytes(spec: ModelSpec, hub: Hub) -> int:
    """Count a model's bytes on the disk, partial files included."""
    source = spec.source
    assert isinstance(source, HubSource)
    total, blobs = 0, blobs_of(source, hub)
    files = {*blobs.glob("*")}
    if source.file is not None:
        links = blobs.parent.glob(f"snapshots/*/{glob.escape(source.file)}")
        files = {*blobs.glob("*.part"), *(link.resolve() for link in links)}
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
            total += file.stat().st_size
    return total


def download(spec: ModelSpec, hub: Hub) -> Path:
    """Download a model's missing files, check all files, and return the model's path. Raises
    ModelUnavailable.
    """
    source = spec.source
    assert isinstance(source, HubSource)
    disable_progress_bars()
    try:
        return _download_missing(source, hub)
    except Exception as error:
        raise unavailable(spec.id, source, cause(source, error)) from error


def _download_missing(source: HubSource, hub: Hub) -> Path:
    for _ in range(_MOVES):
        commit, files = _listing(source, hub)
        blobs = blobs_of(source, hub)
        require_room(room_needed(files, blobs), blobs)
        for file in files:
            if file.sha256 is not None:
                url = hf_hub_url(source.repo, file.name, revision=commit, endpoint=hub.endpoint)
                fetch(url, file, blobs)
        most = sum(file.size for file in files if file.sha256 is None) + SPARE_BYTES
        folder = _snapshot(source, hub, tqdm_class=type("Counted", (Counter,), {"most": most}))
        if folder.name == commit:  # otherwise the branch has moved
            check(folder, files)
            model = _model_in(folder, source)
            if not has_weights(model):
                raise Unfit(f"{source.repo} lacks config.json, or weights that its index names.")
            return model
    raise Unfit(f"the hub names another commit of {source.repo} each time it is asked.")


def _listing(source: HubSource, hub: Hub) -> tuple[str, list[HubFile]]:
    commit, every = list_repository(source, hub)
    return commit, wanted_files(source, every)


def list_repository(source: HubSource, hub: Hub) -> tuple[str, list[HubFile]]:
    """Ask the hub for a revision's commit and files. Raises Unfit."""
    info = HfApi(endpoint=hub.endpoint).model_info(
        source.repo, revision=source.revision, timeout=hub.timeout_s, files_metadata=True
    )
    files = [
        HubFile(
            file.rfilename,
            -1 if file.size is None else file.size,
            getattr(file.lfs, "sha256", None),
        )
        for file in info.siblings or []
        if file.size is not None or _is_needed(source, file.rfilename)
    ]
    for file in files:
        is_inside = stays_inside(file.name) and "\\" not in file.name
        if not is_inside or not _SHA256.fullmatch(file.sha256 or "0" * 64) or file.size < 0:
            raise Unfit(f"the hub lists {file.name!r:.80} of {source.repo}, which is invalid.")
    return info.sha or "", files


def wanted_files(source: HubSource, every: Iterable[HubFile]) -> list[HubFile]:
    """Return the files that a model needs, or raise Unfit if there are no weights."""
    files = [file for file in every if _is_needed(source, file.name)]
    if source.is_gguf:
        if not files:
            raise Unfit(f"{source.repo} has no file {source.file}.")
    elif not any(file.name.endswith(".safetensors") and "/" not in file.name for file in files):
        gguf_names = [file.name for file in every if is_gguf(file.name)]
        if gguf_names:
            problem = "has GGUF files, one of which `source:` must name"
            raise Unfit(f"{source.repo} {problem}: hub:{source.repo}/{gguf_names[0]}")
        raise Unfit(f"{source.repo} has no weights as safetensors.")
    return files


def blobs_of(source: HubSource, hub: Hub) -> Path:
    cache = hub.cache or Path(constants.HF_HUB_CACHE)
    return cache / repo_folder_name(repo_id=source.repo, repo_type="model") / "blobs"


def _find_cached(source: HubSource, hub: Hub) -> Path | None:
    try:
        folder = _snapshot(source, hub, local_files_only=True)
    except (LocalEntryNotFoundError, FileNotFoundError, HfHubHTTPError, HFValidationError):
        return None
    model = _model_in(folder, source)
    return model if has_weights(model) else None


def _snapshot(source: HubSource, hub: Hub, **options: Any) -> Path:
    """Let huggingface_hub download missing files and link all files in a folder."""
    patterns, copies = FILES, COPIES
    if source.file is not None:
        patterns, copies = [glob.escape(source.file)], []
    folder = snapshot_download(
        source.repo,
        revision=source.revision,
        cache_dir=hub.cache,
        endpoint=hub.endpoint,
        etag_timeout=hub.timeout_s,
        allow_patterns=patterns,
        ignore_patterns=copies,
        **options,
    )
    return Path(folder)


def _is_needed(source: HubSource, name: str) -> bool:
    return is_wanted(name) if source.file is None else name == source.file


def _model_in(folder: Path, source: HubSource) -> Path:
    return folder if source.file is None else folder / source.file


def _find_packaged(model: str, source: PackageSource) -> Path:
    root = package_folder(source.module)  # importing the package might import torch
    if root is None:
        problem = f"its package is not installed. Run: {install_command(source)}"
        raise ModelUnavailable(model, problem)
    path = root / source.inside
    if not _is_there(path):
        problem = f"the package {source.module} has no {_noun(source)} {source.inside}"
        raise ModelLoadFailed(model, problem)
    return path


def _is_there(path: Path) -> bool:
    return path.is_file() if is_gguf(path.name) else path.is_dir()


def _noun(source: Source) -> str:
    return "file" if source.is_gguf else "folder"


def unavailable(model: str, source: HubSource, reason: str) -> ModelUnavailable:
    """Return a ModelUnavailable that also names a package with the same files."""
    if source.package:
        reason += f" A package has the same files. Run: {install_command(source.package)}"
    return ModelUnavailable(model, reason)


def cause(source: HubSource, error: Exception) -> str:
    """Return the reason that a repository was not fetched, and the next step."""
    repo = source.repo
    match error:
        case Unfit():
            return str(error)
        case GatedRepoError():
            return f"{repo} is gated: accept its terms at https://hf.co/{repo}, then {LOGIN}"
        case RepositoryNotFoundError():
            return f"the hub has no public repository {repo}: check its name, or if private {LOGIN}"
        case RevisionNotFoundError():
            return f"{repo} has no revision {source.revision}: leave it out for the newest."
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"nobody may read {repo} without a valid key: check its name, or {LOGIN}"
        case OfflineModeIsEnabled():
            problem = f"{repo} is not on this disk, and HF_HUB_OFFLINE forbids fetching it."
            return f"{problem} Run `HF_HUB_OFFLINE=0 mlx-gateway pull {source_id(source)}`."
        case OSError() if error.errno is not None:
            advice = "Make room, or set GATEWAY_HUB_CACHE to a folder on another disk."
            return f"{repo} could not be stored: {error.strerror or error}. {advice}"
        case _:
            line, *_ = (str(error).strip() or type(error).__name__).splitlines()
            line = re.sub(r"^\[Errno -?\d+\] ", "", line).rstrip(".")
            return f"{repo} could not be fetched from the hub: {line}. {NETWORK}"
