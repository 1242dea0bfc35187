"""The sources of weights: a folder, an installed package's folder, or the model hub.

A model's files are a folder or one GGUF file; its path says which. Plain blocking functions: run
them on a thread, never on the loop or the lane.

Large files are fetched here rather than by huggingface_hub, which fetches the small ones and links
them all: each try of its (2.4, `_download_to_tmp_and_move`, since its pull request 4228) has a
temporary file of its own, so a killed process's file is never used again, and it checks only sizes.
So a file is put, hash checked, where it looks first. The price is plain HTTP instead of hf-xet's
chunks.
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
    stays_inside,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOVES = 3  # the most moves of a branch while a model is downloaded
SPARE_BYTES = 1 << 24  # bytes for small files, which may change while a model is downloaded


class Damaged(Exception):
    """A file differs from the hub's facts about it."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """The hub's facts about a file."""

    name: str
    size: int  # bytes
    sha256: str | None = None  # set for a large file, which the hub keeps outside of git


def room_needed(files: Iterable[HubFile], blobs: Path) -> int:
    """Count the missing bytes of large files; parts that are on the disk count as there."""
    large = [file for file in files if file.sha256]
    return sum(max(0, file.size - _stored_bytes(file, blobs)) for file in large)


def require_room(needed: int, folder: Path) -> None:
    """Raise OSError (ENOSPC) if the disk cannot take `needed` bytes, before any is written."""
    there, free = _free(folder)
    if needed > free:
        problem = f"{needed:,} bytes are to be fetched, and {there} has room for {free:,}"
        raise OSError(errno.ENOSPC, problem)


def _free(folder: Path) -> tuple[Path, int]:
    """Return the nearest existing folder above or at one, and the bytes that are free in it."""
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    return there, shutil.disk_usage(there).free


class BoundedFile(io.BufferedWriter):
    """A part file, which takes no more bytes than the hub says it has."""

    most: int

    def write(self, data: Buffer) -> int:
        """Raise Damaged for a byte too many."""
        if self.tell() + memoryview(data).nbytes > self.most:
            raise Damaged(f"{Path(str(self.name)).stem} is longer than the hub says.")
        return super().write(data)


def fetch(url: str, file: HubFile, blobs: Path) -> None:
    """Put a large file among the cache's blobs, where huggingface_hub looks first.

    A partly fetched file is completed. No file has the blob's name before its hash is right. If
    another process fetches the same file, this waits for it. Raises Damaged, OSError if it cannot
    be stored, and errors of HTTP.
    """
    assert file.sha256 is not None
    blob, part = blobs / file.sha256, blobs / f"{file.sha256}.part"
    locks = blobs.parents[1] / ".locks" / blobs.parent.name  # huggingface_hub's own folder
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
            raise Damaged(f"{file.name} came with other bytes than the hub's hash says.")
        part.replace(blob)


class Counter(tqdm):
    """Counts the bytes that huggingface_hub fetches, in place of a progress bar."""

    most = 0  # bytes

    def update(self, n: float | None = 1) -> None:
        """Raise Damaged for far more bytes than the hub says there are."""
        self.n += n or 0
        if self.n > self.most:
            raise Damaged("its small files are longer than the hub says.")


def check(folder: Path, files: Iterable[HubFile]) -> None:
    """Compare a model's folder with the hub's facts. Raises Damaged naming the first difference.

    A wrong file is removed, so that the next download fetches it again.
    """
    for file in files:
        path = folder / file.name
        if path.stat().st_size != file.size:
            _remove(path)
            raise Damaged(f"{file.name} has other bytes than the hub's {file.size:,}.")
        if path.suffix == ".safetensors":
            _check_layout(path)


def _check_layout(path: Path) -> None:
    """Read the header, which states each tensor's place and so the file's length."""
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
        if isinstance(error, Damaged) or error.errno in _FULL:  # other files need the disk too
            part.unlink()
        raise


def _stored_bytes(file: HubFile, blobs: Path) -> int:
    """Count the bytes of a large file that are on the disk, whole or partly fetched."""
    paths = (blobs / f"{file.sha256}", blobs / f"{file.sha256}.part")
    return max((path.stat().st_size for path in paths if path.is_file()), default=0)


def _is_whole(path: Path, file: HubFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _remove(path: Path) -> None:
    """Remove a file of the cache, and the blob that it links to."""
    path.resolve().unlink()
    path.unlink(missing_ok=True)


# huggingface_hub would close all threads' client if one cannot connect (2.4, http_backoff).
_http.close_session = lambda: None
# Errors have our own messages, in our own log.
logging.set_verbosity_error()  # type: ignore[no-untyped-call]
# Weights come only as safetensors: a pickle is never even fetched.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
# The same weights a second time, in the form of their makers' own tools: gpt-oss has them in a
# folder, Mistral's models beside the others. An adapter's earlier steps, as mlx-lm's trainer leaves
# them.
COPIES = ["original/*", "consolidated*", "[0-9]*_adapters.safetensors"]
ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


class Unfit(Exception):
    """A repository lacks the files that its source names, or lists impossible files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The hub's address and its cache; None means Hugging Face's own defaults."""

    endpoint: str | None = None
    cache: Path | None = None
    timeout_s: float = 4.0
    may_download: bool = True


def free_bytes(hub: Hub) -> int:
    """Return the free bytes for the hub's cached files."""
    return _free(hub.cache or Path(constants.HF_HUB_CACHE))[1]


def on_disk(spec: ModelSpec, hub: Hub) -> Path | None:
    """Return the model's folder, or its GGUF file, if no download is needed.

    Raises ModelUnavailable for a package that is not installed and ModelLoadFailed for files that
    are not there.
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
    """Return True if a package has the same files, and is installed."""
    return source.package is not None and package_folder(source.package.module) is not None


def has_weights(folder: Path) -> bool:
    """Return True for a file, and for a folder with a configuration and all its weights, a model's
    or an adapter's.
    """
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
    """Count the bytes of a model's files in its folder, or of its one file."""
    if is_gguf(folder.name):
        return folder.stat().st_size
    files = {file for pattern in FILES for file in folder.rglob(pattern)}
    return sum(
        file.stat().st_size
        for file in files
        if file.is_file() and is_wanted(str(file.relative_to(folder)))
    )


def is_wanted(name: str) -> bool:
    """Return True if a model needs this file of its repository."""
    is_copy = any(fnmatch(name, pattern) for pattern in COPIES)
    return not is_copy and any(fnmatch(name, pattern) for pattern in FILES)


def ask_hub(spec: ModelSpec, hub: Hub) -> int:
    """Ask the hub for the model, within `timeout_s`, before a download; return its size in bytes.

    Raises ModelUnavailable naming the model and the cause.
    """
    source = spec.source
    assert isinstance(source, HubSource)
    require_download(source, hub, spec.id)
    try:
        return sum(file.size for file in _listing(source, hub)[1])
    except Exception as error:
        raise unavailable(spec.id, source, cause(source, error)) from error


def require_download(source: HubSource, hub: Hub, model: str) -> None:
    """Raise ModelUnavailable unless models may be downloaded."""
    if not hub.may_download:
        reason = f"{source.repo} is not on this disk, and GATEWAY_AUTO_PULL is off."
        raise unavailable(model, source, reason)


def fetched_bytes(spec: ModelSpec, hub: Hub) -> int:
    """Count the bytes of a model on disk, including partly fetched files."""
    source = spec.source
    assert isinstance(source, HubSource)
    total, blobs = 0, blobs_of(source, hub)
    files = {*blobs.glob("*")}
    if source.file is not None:  # the file shares its repository with others
        links = blobs.parent.glob(f"snapshots/*/{glob.escape(source.file)}")
        files = {*blobs.glob("*.part"), *(link.resolve() for link in links)}
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # the file was completed and renamed meanwhile
            total += file.stat().st_size
    return total


def download(spec: ModelSpec, hub: Hub) -> Path:
    """Fetch the missing files of a model, check all of them, and return their place.

    Raises ModelUnavailable naming the model and the cause; files fetched by then are kept.
    """
    source = spec.source
    assert isinstance(source, HubSource)
    disable_progress_bars()  # progress is shown from fetched_bytes
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
        if folder.name == commit:  # otherwise the branch moved in the meantime
            check(folder, files)
            model = _model_in(folder, source)
            if not has_weights(model):
                raise Unfit(f"{source.repo} lacks config.json, or weights that its index names.")
            return model
    raise Unfit(f"the hub names another commit of {source.repo} each time it is asked.")


def _listing(source: HubSource, hub: Hub) -> tuple[str, list[HubFile]]:
    """Ask the hub for the commit of a revision, and for its facts about the wanted files."""
    commit, every = list_repository(source, hub)
    return commit, wanted_files(source, every)


def list_repository(source: HubSource, hub: Hub) -> tuple[str, list[HubFile]]:
    """Ask the hub for a revision's commit and all its files; raises Unfit for an impossible one."""
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
            raise Unfit(f"the hub lists {file.name!r:.80} of {source.repo}, which is no file.")
    return info.sha or "", files


def wanted_files(source: HubSource, every: Iterable[HubFile]) -> list[HubFile]:
    """Return the files of a repository that a model needs; raises Unfit if there are none."""
    files = [file for file in every if _is_needed(source, file.name)]
    if source.is_gguf:
        if not files:
            raise Unfit(f"{source.repo} has no file {source.file}.")
    elif not any(file.name.endswith(".safetensors") and "/" not in file.name for file in files):
        gguf_names = [file.name for file in every if is_gguf(file.name)]
        if gguf_names:
            problem = "has GGUF files, of which `source:` names one"
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
    """Let huggingface_hub fetch a model's missing files, and link them all in one folder."""
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
    """Find a package's folder without importing it (an import may load all of torch)."""
    root = package_folder(source.module)
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
    """Return the error, which names the package with the same files, if there is one."""
    if source.package:
        reason += f" A package has the same files. Run: {install_command(source.package)}"
    return ModelUnavailable(model, reason)


def cause(source: HubSource, error: Exception) -> str:
    """Return the reason why the hub did not give a repository, in words for the caller."""
    match error:
        case Unfit():
            return str(error)
        case GatedRepoError():
            return f"{source.repo} is gated: accept its terms on the hub and set HF_TOKEN."
        case RepositoryNotFoundError():
            return f"the hub has no public repository {source.repo}; a private one needs HF_TOKEN."
        case RevisionNotFoundError():
            return f"{source.repo} has no revision {source.revision}."
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"the hub lets nobody read {source.repo} without a valid key in HF_TOKEN."
        case OfflineModeIsEnabled():
            return f"{source.repo} is not on this disk, and HF_HUB_OFFLINE forbids fetching it."
        case OSError() if error.errno is not None:
            return f"{source.repo} could not be stored: {error.strerror or error}."
        case _:
            line, *_ = (str(error).strip() or type(error).__name__).splitlines()
            return f"{source.repo} could not be fetched from the hub: {line.rstrip('.')}."
