"""JavaScript clients through node, of the versions locked in compat_tests/js."""

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


@pytest.mark.parametrize(
    ("file", "passing"),
    [
        pytest.param("sdk.test.mjs", 13, id="openai"),
        pytest.param("ai.test.mjs", 5, id="vercel-ai"),
    ],
)
def test_javascript_clients_pass_unchanged(url: str, file: str, passing: int) -> None:
    """The OpenAI SDK on every endpoint; Vercel's AI SDK over two turns of the Responses API."""
    run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    printed = run("node", "--test", "--test-reporter=tap", file, OPENAI_BASE_URL=f"{url}/v1")
    assert "# fail 0" in printed
    assert f"# pass {passing}" in printed
