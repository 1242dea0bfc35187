"""Anthropic's SDKs of Python and JavaScript, against demo-chat: whole, streamed, with tools."""

import os
import subprocess
from pathlib import Path

import pytest

from compat_tests.node import NEEDS_NODE, install
from tests.processes import ROOT

HERE = Path(__file__).parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPT = HERE.parent / "clients" / "anthropic_messages.py"

pytestmark = pytest.mark.compat


def run(*command: str, **environment: str) -> str:
    """Run to a good end, and give the output."""
    done = subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-clients` installs it")
def test_the_python_sdk_works_unchanged(url: str) -> None:
    """Every event is of its types; its tool runner goes round."""
    assert run(str(PYTHON), str(SCRIPT), url) == "13 passed\n"


@NEEDS_NODE
def test_the_javascript_sdk_works_unchanged(url: str) -> None:
    install(HERE)
    command = ("node", "--test", "--test-reporter=tap", "sdk.test.mjs")
    printed = run(*command, ANTHROPIC_BASE_URL=url)
    assert "# fail 0" in printed
    assert "# pass 8" in printed
