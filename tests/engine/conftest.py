"""Engines of one checkpoint, without kept prefixes and with them, for modules that write one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.engine.generation.engine import GenerationEngine
from tests.engine.generation.test_engine import open_engine
from tests.engine.kv.test_prefix_cache import PLENTY


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[GenerationEngine]:
    """Load a module's checkpoint without a prefix cache."""
    engine = open_engine(folder)
    yield engine
    engine.close()


@pytest.fixture
def warm(folder: Path) -> Iterator[GenerationEngine]:
    """Load it with room for every prompt."""
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    yield engine
    engine.close()
