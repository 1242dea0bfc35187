"""Engines of one checkpoint, without kept prefixes and with them, for modules that write one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.engine.generation.engine import GenerationEngine
from tests.checkpoints import write_chat
from tests.engine.generation.harness import PLENTY, open_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of plain KV; modules of other kinds have a fixture of their own."""
    return write_chat(tmp_path_factory.mktemp("plain"))


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
