"""What a bug report needs to know of a machine: versions, system, device. No paths, no names."""

import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from gateway import __version__

PACKAGES: Final = (
    *("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "outlines"),
    *("outlines-core", "llguidance", "tokenizers", "transformers", "numpy", "scipy-openblas32"),
)
# An absolute path, to where it ends or words go on; no part of a URL, nor "tokens/s".
_REST: Final = r"""[^\s'"`,;:()<>\[\]]*"""
_ABSOLUTE: Final = rf"(?<![\w.~/…])~?/(?!/){_REST}"


def versions() -> dict[str, str]:
    """Return the versions of the gateway, Python and the packages that compute, if installed."""
    found = {"mlx-gateway": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def system() -> dict[str, str | int]:
    """Return the operating system, the processor's kind, and how many cores there are."""
    is_linux = sys.platform == "linux"
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return {"os": platform.platform(), "machine": platform.machine(), "cores": cores}


def private_folders() -> list[str]:
    """List the folders that an error is likely to name, the longest first."""
    folders = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix)}
    named = {str(each) for folder in folders for each in (folder, folder.resolve())}
    return sorted(named - {"/"}, key=len, reverse=True)


def without_paths(value: Any, folders: Sequence[str]) -> Any:
    """Return what JSON can hold, with the absolute paths in its texts struck out.

    `folders` are known, and may have spaces in their names. Numbers that JSON lacks become text.
    """
    match value:
        case str():
            known = [f"{re.escape(folder)}{_REST}" for folder in folders]
            return re.sub("|".join([*known, _ABSOLUTE]), "/…", value)
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {key: without_paths(each, folders) for key, each in value.items()}
        case list() | tuple():
            return [without_paths(each, folders) for each in value]
        case _:
            return value
