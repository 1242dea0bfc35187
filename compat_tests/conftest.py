"""The gateway as a user starts it: a process of its own, on a free port."""

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all that it imports
ROOT = Path(__file__).parents[1]
SHIPPED, DEMO = ROOT / "models.yaml", ROOT / "demo" / "models.yaml"


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve demo-chat, which answers within milliseconds, and MiniLM; give the address."""
    with started(tmp_path_factory.mktemp("gateway")) as address:
        yield address


@pytest.fixture(scope="session")
def shipped_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve what ships, SmolLM2 and MiniLM, and give the address."""
    with started(tmp_path_factory.mktemp("shipped"), SHIPPED) as address:
        yield address


@contextmanager
def started(folder: Path, models: Path = DEMO, **settings: str) -> Iterator[str]:
    """Run `mlx-gateway serve` and give its address; stop it by its own process id."""
    process, address = start(folder, models, **settings)
    try:
        yield address
    finally:
        process.terminate()
        status = process.wait(30)
    assert status == 0, (folder / "log").read_text()


def start(
    folder: Path, models: Path = DEMO, port: str = "0", **settings: str
) -> tuple["subprocess.Popen[bytes]", str]:
    """Start `mlx-gateway serve`, wait until it is ready, and return its process and address."""
    log = folder / "log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GATEWAY_")}
    environment |= {
        "GATEWAY_LOG_FORMAT": "json",
        # A hub that is not there, and a cache that is empty: no test may depend on either.
        "GATEWAY_HUB_ENDPOINT": "http://127.0.0.1:9",
        "GATEWAY_HUB_CACHE": str(folder / "hub"),
        **settings,
    }
    command = [sys.executable, "-m", "gateway", "serve", "--port", port]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--models", str(models)], cwd=ROOT, env=environment, stderr=output
        )
    try:
        address = _address(process, log)
        _wait_ready(process, address, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process, address


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    for _ in range(1200):
        if found := re.search(r'"url":"([^"]+)"', log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    for _ in range(1200):
        try:
            with urllib.request.urlopen(f"{url}/ready"):
                return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
    raise AssertionError(log.read_text())
