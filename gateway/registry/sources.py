"""Where a model's files come from, as models.yaml says it: hub, folder or installed package.

Syntax and looking for folders only; nothing is downloaded, and no package is imported.
"""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gateway.registry.names import did_you_mean, nearest


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the model hub, at a revision where one is pinned."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hub:{self.repo}@{self.revision}" if self.revision else f"hub:{self.repo}"


@dataclass(frozen=True, slots=True)
class PathSource:
    """A folder on this machine."""

    path: Path

    def __str__(self) -> str:
        return f"path:{self.path}"


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A folder inside an installed Python package, which is never imported for it."""

    module: str
    folder: str

    def __str__(self) -> str:
        return f"package:{self.module}/{self.folder}" if self.folder else f"package:{self.module}"


Source = HubSource | PathSource | PackageSource

_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.][\w./-]*))?")
_PACKAGE = re.compile(r"(?P<module>[A-Za-z_]\w*)(?:/(?P<folder>[^/\\]+(?:/[^/\\]+)*))?")
_SCHEMES = ("hub", "path", "package")
SOURCE_PATTERN = "^(hub|path|package):.+"


def parse_source(text: str, folder: Path) -> Source:
    """Read a source as models.yaml writes it; `path:` is relative to `folder`."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in _SCHEMES:
        meant = nearest(scheme, _SCHEMES) if colon else None
        hint = did_you_mean(f"{meant}:{rest}" if meant else None)
        raise ValueError(
            f"{text!r} is no source: write hub:org/name[@revision], path:folder "
            f"or package:module/folder{hint}"
        )
    if scheme == "path":
        if not rest:
            raise ValueError("path: names no folder")
        return PathSource((folder / os.path.expanduser(rest)).resolve())
    if scheme == "hub":
        if not (match := _HUB.fullmatch(rest)):
            raise ValueError(f"{text!r} should read hub:org/name or hub:org/name@revision")
        return HubSource(match["repo"], match["revision"])
    match = _PACKAGE.fullmatch(rest)
    inside = (match["folder"] or "") if match else ""
    if not match or ".." in inside.split("/"):
        raise ValueError(f"{text!r} should read package:module/folder, without dots")
    return PackageSource(match["module"], inside)


def package_folder(module: str) -> Path | None:
    """Find an installed package's folder without running any of its code."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module that runs without a spec, __main__ for one
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
