"""Models that cannot be fetched: told by name and cause, while the others go on serving."""

import asyncio
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
    """Give the status, and the text or what is wrong."""
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
    """Let no file grow beyond 64 kB: for a writer that is what a full disk is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_fails_the_model_that_needs_it(
    client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    """And leaves nothing that would be taken for a model."""
    with full_disk():
        status, said = await ask(client, "far")
        assert (await ask(client, "near"))[0] == 200
    assert status == 503
    assert said == "The model `far` cannot be loaded: org/far could not be stored: File too large."
    assert not list((tmp_path / "cache").rglob("snapshots/*/*.safetensors"))


@pytest.mark.parametrize(
    ("status", "said"), [(500, "Server error '500"), (401, "HF_TOKEN"), (403, "HF_TOKEN")]
)
async def test_a_hub_that_refuses_fails_the_model_it_has(
    client: httpx2.AsyncClient, hub: FakeHub, status: int, said: str
) -> None:
    """Its status is in the message, and ours is 503."""
    hub.status = status
    answered, message = await ask(client, "far")
    assert answered == 503
    assert said in message
    assert (await ask(client, "near"))[0] == 200


async def test_what_the_hub_has_not_is_named(client: httpx2.AsyncClient) -> None:
    """So that models.yaml can be mended."""
    status, said = await ask(client, "nowhere")
    assert status == 503
    assert "no public repository org/nowhere" in said
    assert (await ask(client, "far"))[0] == 200


async def test_a_hub_that_is_gone_takes_no_other_model_with_it(tmp_path: Path) -> None:
    """A port where nobody listens is as good as no network."""
    write_chat(tmp_path / "near")
    sources = {"near": "path:near", "far": "hub:org/far"}
    entries = {name: {"kind": "chat", "source": source} for name, source in sources.items()}
    place = Hub(endpoint="http://127.0.0.1:9", cache=tmp_path / "cache")
    async with served(catalog(tmp_path, entries), cpu_engines(place)) as client:
        status, said = await ask(client, "far")
        assert status == 503
        assert "org/far could not be fetched from the hub" in said
        assert (await ask(client, "near"))[0] == 200


async def test_a_broken_connection_does_not_reach_the_client(
    client: httpx2.AsyncClient, hub: FakeHub
) -> None:
    """The download goes on, and the request that waits for it is answered."""
    hub.cuts = [70_000]
    assert (await ask(client, "far"))[0] == 200
    assert len(hub.ranges) == 2


async def test_two_downloads_of_one_model_at_once_both_succeed(
    hub: FakeHub, tmp_path: Path
) -> None:
    """As when a reload changes a model that is being fetched: the second waits for the first."""
    engines = cpu_engines(Hub(endpoint=hub.url, cache=tmp_path / "cache"))
    (spec,) = catalog(tmp_path, {"far": {"kind": "chat", "source": "hub:org/far"}}).specs
    one, other = await asyncio.gather(engines.files(spec), engines.files(spec))
    assert one == other
    assert engines.fetched_percent(spec) is None
