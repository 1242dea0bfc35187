"""Models that cannot be fetched: told by name and cause, while the others go on serving."""

import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.engine.hub import Hub
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.fake_hub import FakeHub
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub({"org/far": write_chat(tmp_path / "repo")}).serving() as hub:
        yield hub


@pytest.fixture
async def client(hub: FakeHub, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve a model that is here, one that the hub has, and one that it has not."""
    write_chat(tmp_path / "near")
    sources = {"near": "path:near", "far": "hub:org/far", "nowhere": "hub:org/nowhere"}
    entries = {name: {"kind": "chat", "source": source} for name, source in sources.items()}
    place = Hub(endpoint=hub.url, cache=tmp_path / "cache")
    async with served(catalog(tmp_path, entries), cpu_engines(place)) as client:
        yield client


async def ask(client: httpx2.AsyncClient, model: str) -> tuple[int, str]:
    """Give the status, and the text or the error's message."""
    messages = [{"role": "user", "content": "Hello there!"}]
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 4}
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code == 200:
        return 200, answer.json()["choices"][0]["message"]["content"]
    error = answer.json()["error"]
    assert error["code"] == "model_unavailable"
    assert answer.headers["x-should-retry"] == "false"
    return answer.status_code, error["message"]


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 64 kB: a writer cannot tell that from a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_fails_the_model_that_needs_it(
    client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    with full_disk():
        status, said = await ask(client, "far")
        assert (await ask(client, "near"))[0] == 200
    assert status == 503
    problem = "The model `far` cannot be loaded: org/far could not be stored: File too large. "
    assert said == f"{problem}Make room, or set GATEWAY_HUB_CACHE to a folder on another disk."
    assert not list((tmp_path / "cache").rglob("snapshots/*/*.safetensors"))


@pytest.mark.parametrize(
    ("status", "model", "said"),
    [
        (500, "far", "Server error '500"),
        (401, "far", "HF_TOKEN"),
        (None, "nowhere", "no public repository org/nowhere"),
    ],
)
async def test_a_hub_that_refuses_fails_the_model_that_needs_it(
    client: httpx2.AsyncClient, hub: FakeHub, status: int | None, model: str, said: str
) -> None:
    hub.status = status
    answered, message = await ask(client, model)
    assert answered == 503
    assert said in message
    assert (await ask(client, "near"))[0] == 200
