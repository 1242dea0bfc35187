"""The agents that are locked in package-lock.json, installed."""

from pathlib import Path

import pytest

from compat_tests.node import install


@pytest.fixture(scope="session")
def installed() -> Path:
    """Install them, and return the folder of their packages."""
    return install(Path(__file__).parent)
