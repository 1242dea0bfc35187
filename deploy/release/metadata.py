"""README and addresses for the package index: hatchling runs this at each build.

A clone reads README.md beside docs/, by relative links. An index shows it alone: there, links and
pictures lead to the repository, at the version's tag. Which repository that is says
MLX_GATEWAY_REPOSITORY or, in its own workflows, GITHUB_REPOSITORY (owner/name); without either
the package names none. A wheel made from an sdist has what that one says.
"""

import os
import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_VARIABLES: Final = ("MLX_GATEWAY_REPOSITORY", "GITHUB_REPOSITORY")
_NAMELESS: Final = "<address of this repository>"  # what README clones
_RELATIVE: Final = r"\((?!https?:|mailto:|#)([^)\s]+)\)"


class Metadata(MetadataHookInterface):
    """Sets `readme`, and `urls` where the repository is known."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add to what pyproject.toml says, or to what an sdist's PKG-INFO does."""
        if "urls" in metadata:
            return
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        name = repository()
        if name:
            metadata["urls"] = urls(name, metadata["version"])
            text = absolute(text, name, metadata["version"])
            text = text.replace(_NAMELESS, f"{metadata['urls']['Homepage']}.git")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def repository() -> str | None:
    """Return owner/name of the public repository, if the environment says it."""
    name = next((os.environ[each] for each in _VARIABLES if os.environ.get(each)), None)
    if name and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"a repository is owner/name, not {name!r}")
    return name


def urls(name: str, version: str) -> dict[str, str]:
    """Return what the index shows beside the package."""
    home = f"https://github.com/{name}"
    return {
        "Homepage": home,
        "Documentation": f"{home}/tree/v{version}/docs",
        "Changelog": f"{home}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def absolute(text: str, name: str, version: str) -> str:
    """Return Markdown whose relative links lead to the repository at the version's tag."""
    pictures = f"https://raw.githubusercontent.com/{name}/v{version}"
    pages = f"https://github.com/{name}/blob/v{version}"
    text = re.sub(rf"(!\[[^]]*\]){_RELATIVE}", rf"\1({pictures}/\2)", text)
    return re.sub(rf"\]{_RELATIVE}", rf"]({pages}/\1)", text)
