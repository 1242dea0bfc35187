"""A gateway whose engines can be held and broken, behind a real socket."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from gateway.registry import Catalog
from tests.provoked.engines import HeldEngines
from tests.serving_app import catalog, served


@pytest.fixture
def engines() -> Iterator[HeldEngines]:
    """Give the engines behind `client`; whatever still holds them is opened at the end."""
    engines = HeldEngines()
    yield engines
    engines.open()


@pytest.fixture
def models(tmp_path: Path) -> Catalog:
    """Give a model of each kind."""
    kinds = {"writer": "chat", "embedder": "embedding"}
    return catalog(tmp_path, {name: {"kind": kinds[name], "source": "path:."} for name in kinds})


@pytest.fixture
async def client(models: Catalog, engines: HeldEngines) -> AsyncIterator[httpx2.AsyncClient]:
    """Give a client of a gateway that answers one chat at a time."""
    async with served(
        models, engines, generation_max_batch_size=1, load_wait_s=10, exit_on_stall=False
    ) as client:
        yield client
        engines.open()
