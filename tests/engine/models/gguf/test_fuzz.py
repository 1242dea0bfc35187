"""Damaged GGUF files: each is an error of ours, and none ends the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def fuzz(folder: Path, seed: int, headers: int, loads: int) -> dict[str, int]:
    """Count how damaged files ended; a signal, or any other error, fails the test."""
    counts = map(str, (seed, headers, loads))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.models.gguf.fuzzing", str(folder), *counts],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-3000:])
    ends: dict[str, int] = json.loads(ran.stdout)
    return ends


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    """Flipped bits, extreme numbers, cuts and insertions: some of each are harmless."""
    ends = fuzz(tmp_path, 0, 500, 33)
    assert ends["read"] > 16
    assert ends["refused"] > 100
    assert ends["loaded"] > 3
    assert ends["failed"] > 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_more_damaged_files_are(tmp_path: Path, seed: int) -> None:
    ends = fuzz(tmp_path, seed, 20_000, 2000)
    assert sum(ends.values()) == 22_000
