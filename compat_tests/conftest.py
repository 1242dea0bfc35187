"""The gateway as a user starts it: a process of its own, on a free port."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from tests import processes
from tests.processes import DEMO, ROOT, Served

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all that it imports
SHIPPED = ROOT / "models.yaml"


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve demo-chat, which answers within milliseconds, and MiniLM; give the address."""
    with started(tmp_path_factory.mktemp("gateway")) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    """Point the OpenAI SDK at the gateway and change nothing else."""
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def shipped_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the shipped models, SmolLM2 and MiniLM, and give the address."""
    # `make doctor` runs its self-test, which takes longer than all that is asked here.
    tested = {"GATEWAY_SELF_TEST": "false"}
    with started(tmp_path_factory.mktemp("shipped"), SHIPPED, **tested) as address:
        yield address


@contextmanager
def started(folder: Path, models: Path = DEMO, **settings: str) -> Iterator[str]:
    """Run `mlx-gateway serve` and give its address; it is told to stop, and does."""
    with serving(folder, models, **settings) as served:
        yield served.url
        served.process.terminate()
        assert served.process.wait(30) == 0, served.log.read_text()


def serving(folder: Path, models: Path, **settings: str) -> AbstractContextManager[Served]:
    """Run `mlx-gateway serve`, with a hub that is not there and a cache that is empty: no test may
    depend on either.
    """
    given = {"GATEWAY_HUB_ENDPOINT": "http://127.0.0.1:9", "GATEWAY_HUB_CACHE": str(folder / "hub")}
    command = processes.command("serve", "--models", str(models))
    return processes.started(command, folder, **{**given, **settings})
