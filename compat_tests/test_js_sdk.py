"""The JavaScript SDK through node, from the version and the lock in compat_tests/js."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "js"
MISSING = [name for name in ("node", "npm") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {' and no '.join(MISSING)} here"),
]


def run(*command: str, **environment: str) -> str:
    """Run to a good end, and give what was printed."""
    done = subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    printed = done.stdout.decode()
    assert done.returncode == 0, printed
    return printed


def test_the_javascript_sdk_passes_unchanged(url: str) -> None:
    """Chat, tools, structured output, embeddings, models, responses and errors."""
    run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    printed = run(
        "node", "--test", "--test-reporter=tap", "sdk.test.mjs", OPENAI_BASE_URL=f"{url}/v1"
    )
    assert "# fail 0" in printed
    assert "# pass 13" in printed
