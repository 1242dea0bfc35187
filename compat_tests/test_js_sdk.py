"""JavaScript clients through node, of the versions locked in compat_tests/js."""

import os
import subprocess
from pathlib import Path

import pytest

from compat_tests.node import NEEDS_NODE, install

HERE = Path(__file__).parent / "js"
pytestmark = [pytest.mark.compat, NEEDS_NODE]


def run(*command: str, **environment: str) -> str:
    """Run to a good end, and give the output."""
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
        pytest.param("anthropic.test.mjs", 22, id="vercel-anthropic"),
        pytest.param("types.test.mjs", 3, id="types"),
    ],
)
def test_javascript_clients_pass_unchanged(url: str, file: str, passing: int) -> None:
    """The OpenAI SDK on every endpoint; Vercel's AI SDK over two turns of the Responses API, and
    by its Anthropic provider; every answer by the types that both vendors' SDKs declare.
    """
    install(HERE)
    printed = run("node", "--test", "--test-reporter=tap", file, OPENAI_BASE_URL=f"{url}/v1")
    assert "# fail 0" in printed
    assert f"# pass {passing}" in printed
