"""One sandbox for a module's pictures. Seeing engines without kept prefixes and with them, of two
models: one keeps states beside KV, and one has DeepStack.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.serving.sandbox import Sandbox
from tests.engine.generation.harness import PLENTY
from tests.engine.vision.harness import open_seeing, write_seeing
from tests.sandboxes import sandbox


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """Give a sandbox with more time than a gateway's: other tests make a processor slow."""
    with sandbox("image", 20) as images:
        yield images


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(request.param, tmp_path_factory.mktemp("seeing") / request.param)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[GenerationEngine]:
    engine = open_seeing(folder)
    yield engine
    engine.close()


@pytest.fixture
def warm(folder: Path) -> Iterator[GenerationEngine]:
    engine = open_seeing(folder, prefix_cache_bytes=PLENTY)
    yield engine
    engine.close()
