"""What is locked in package-lock.json, installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = [name for name in ("node", "npm") if shutil.which(name) is None]
NEEDS_NODE = pytest.mark.skipif(
    bool(MISSING), reason=f"there is no {' and no '.join(MISSING)} here"
)


@pytest.fixture(scope="session")
def installed() -> Path:
    """Install the packages, of which no script is run, and give their folder."""
    command = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return HERE / "node_modules" / "@anthropic-ai"
