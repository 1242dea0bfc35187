"""What a release says of itself: CHANGELOG.md's section of its version.

    python -m deploy.release.notes [SECTION]

In a workflow that a tag began, the tag must be that of the version.
"""

import os
import re
import sys
from pathlib import Path
from typing import Final

import gateway
from deploy.release.metadata import absolute, repository

CHANGELOG: Final = Path(__file__).parents[2] / "CHANGELOG.md"


def main(section: str | None = None) -> str:
    """Return the notes; exit where they are not to be had."""
    version = gateway.__version__
    tag = os.environ["GITHUB_REF_NAME"] if os.environ.get("GITHUB_REF_TYPE") == "tag" else None
    if tag not in (None, f"v{version}"):
        sys.exit(f"the tag is {tag}, and gateway/__init__.py has {version}")
    text = notes(CHANGELOG.read_text(encoding="utf-8"), section or version)
    if text is None:
        sys.exit(f"CHANGELOG.md has no section of {section or version}")
    name = repository()
    return absolute(text, name, version) if name else text


def notes(changelog: str, section: str) -> str | None:
    """Return what is below a section's heading, such as `## [0.1.0] - 2026-11-26`."""
    heading = rf"^## \[{re.escape(section)}\].*\n"
    _, *after = re.split(heading, changelog, maxsplit=1, flags=re.MULTILINE)
    if not after:
        return None
    return re.split(r"^## ", after[0], maxsplit=1, flags=re.MULTILINE)[0].strip()


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
