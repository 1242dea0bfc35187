"""A gateway with scripted engines, behind a real socket."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from httpx2 import AsyncClient

from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served


@pytest.fixture
def engines() -> ScriptedEngines:
    """Give the engines behind `client`, to hold, fail and watch."""
    return ScriptedEngines()


@pytest.fixture
def models(tmp_path: Path) -> Catalog:
    return some_models(tmp_path)


def some_models(folder: Path) -> Catalog:
    """Write a catalog with a few models of each kind."""
    common = {"source": "path:.", "preload": False}
    return catalog(
        folder,
        {
            "org/embed": {
                "kind": "embedding",
                "aliases": ["embed", {"name": "embed-query", "prompt_name": "query"}],
                **common,
            },
            "shortenable": {
                "kind": "embedding",
                "matryoshka": [2, 3],
                "token_ids": "accept",
                "overflow": "truncate",
                **common,
            },
            "any-size": {"kind": "embedding", "matryoshka": True, **common},
            "writer": {"kind": "chat", "aliases": ["gpt"], **common},
            "org/judge": {"kind": "rerank", "aliases": ["judge"], **common},
            "short-judge": {"kind": "rerank", "max_tokens_per_doc": 2, **common},
        },
    )


@pytest.fixture
async def own_client(models: Catalog, engines: ScriptedEngines) -> AsyncIterator[AsyncClient]:
    async with served(models, engines) as client:
        yield client


@pytest.fixture(scope="module")
async def shared_client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    async with served(some_models(tmp_path_factory.mktemp("models")), ScriptedEngines()) as client:
        yield client


@pytest.fixture
def client(request: pytest.FixtureRequest) -> AsyncClient:
    """Give a client of a gateway without keys: the module's, unless the test has to do with the
    engines too.
    """
    is_shared = "engines" not in request.fixturenames
    found: AsyncClient = request.getfixturevalue("shared_client" if is_shared else "own_client")
    return found
