"""Node, and the packages that a folder's package-lock.json locks."""

import shutil
import subprocess
from pathlib import Path

import pytest

MISSING = [name for name in ("node", "npm") if shutil.which(name) is None]
NEEDS_NODE = pytest.mark.skipif(
    bool(MISSING), reason=f"there is no {' and no '.join(MISSING)} here"
)


def install(folder: Path) -> Path:
    """Install a folder's packages, of which no script is run; return where they are."""
    command = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "node_modules"
