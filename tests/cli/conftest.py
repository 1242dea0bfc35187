"""What tests of commands may ask for."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Give a folder for unix sockets, whose paths are of 103 bytes at most on macOS: its temporary
    folders have more.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder).resolve()
