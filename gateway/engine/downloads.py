"""Large files of the hub: fetched on from where an earlier try stopped, checked before they count.

huggingface_hub fetches the small ones and links them all. It drops the half of a file that an
ended process leaves, and checks sizes alone; so what it would fetch is put where it looks first.
Blocking functions, for a thread of their own.
"""

import errno
import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Damaged(Exception):
    """A file that is not what the hub said it is."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """What the hub says of a file: bytes, and the hash of those that git does not keep itself."""

    name: str
    size: int
    sha256: str | None = None


def room_needed(files: Iterable[HubFile], blobs: Path) -> int:
    """Count the bytes still to be fetched of the large files, halves taken off."""
    large = [file for file in files if file.sha256]
    return sum(max(0, file.size - _fetched(file, blobs)) for file in large)


def require_room(needed: int, folder: Path) -> None:
    """Raise OSError (ENOSPC) when a disk cannot take so many bytes, before one is written."""
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        said = f"{needed:,} bytes are to be fetched, and {there} has room for {free:,}"
        raise OSError(errno.ENOSPC, said)


def fetch(url: str, file: HubFile, blobs: Path) -> None:
    """Have a large file among the cache's blobs, whole: found there, finished or fetched.

    Nothing bears the blob's name before its hash is right. Another process that fetches the same
    file is waited for. Raises Damaged, OSError where it cannot be stored, and what HTTP raises.
    """
    assert file.sha256 is not None
    blob, part = blobs / file.sha256, blobs / f"{file.sha256}.part"
    locks = blobs.parents[1] / ".locks" / blobs.parent.name  # huggingface_hub's own
    for each in (blobs, locks):
        each.mkdir(parents=True, exist_ok=True)
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


def check(folder: Path, files: Iterable[HubFile]) -> None:
    """Compare a model's folder with what the hub says; raises Damaged naming the first difference.

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
    """Read the header, which says where each tensor lies and so how long the file is."""
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise Damaged(f"{path.name} is not a whole safetensors file: {error}") from error


def _fetch_rest(url: str, file: HubFile, part: Path) -> None:
    if part.is_file() and part.stat().st_size > file.size:
        part.unlink()
    try:
        with part.open("ab") as out:
            http_get(
                url,
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.name,
            )
    except OSError as error:
        if error.errno in _FULL:
            part.unlink()  # others need the disk too
        raise


def _fetched(file: HubFile, blobs: Path) -> int:
    names = (file.sha256 or "", f"{file.sha256}.part")
    return max(
        (path.stat().st_size for name in names if (path := blobs / name).is_file()), default=0
    )


def _is_whole(path: Path, file: HubFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _remove(path: Path) -> None:
    """Remove a file of the cache, and the blob that it links to."""
    path.resolve().unlink()
    path.unlink(missing_ok=True)
