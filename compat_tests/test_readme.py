"""The README's examples, pasted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", README, flags=re.M | re.S)
EXAMPLES = [(language, code) for language, code in BLOCKS if "127.0.0.1:8000/v1" in code]


def test_there_are_examples() -> None:
    """One for the SDK, two for curl."""
    assert [language for language, _ in EXAMPLES] == ["python", "sh", "sh"]


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_works_as_pasted(shipped_url: str, language: str, code: str) -> None:
    """But for the port, which is the test's own: a real model answers."""
    code = code.replace("http://127.0.0.1:8000", shipped_url)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    printed = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert "error" not in printed
    assert any(word in printed for word in ("2 vectors of 384", '"embedding"', "[DONE]"))
    assert language == "sh" or "Paris" in printed
