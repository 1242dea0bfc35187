"""Three models on a budget for two, asked for in turn and all at once: no wrong answer, no leak."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
NAMES = ("one", "two", "three")
AT_ONCE = 6


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve three tiny models of random weights where two have room."""
    models = {name: {"kind": "chat", "source": f"path:{name}"} for name in NAMES}
    for seed, name in enumerate(NAMES):
        write_chat(tmp_path / name, seed)
    engines = cpu_engines()
    read = catalog(tmp_path, models)
    size = await engines.size(read.specs[0], tmp_path / NAMES[0])
    budget = int(2.5 * (size.weights + size.kv))
    given: dict[str, Any] = {"cache_max_bytes": budget, "cache_max_models": 3, "load_wait_s": 120}
    async with served(read, engines, **given) as client:
        yield client


async def ask(client: httpx2.AsyncClient, model: str) -> str:
    messages = [{"role": "user", "content": "Hello there!"}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def loaded(client: httpx2.AsyncClient) -> int:
    listed = (await client.get("/v1/models")).json()["data"]
    return sum(entry["state"] == "loaded" for entry in listed)


def held() -> int:
    gc.collect()
    return mx.get_active_memory()


@pytest.mark.parametrize("rounds", [12, pytest.param(300, marks=pytest.mark.soak)])
async def test_models_that_take_turns_answer_as_themselves_and_leave_nothing(
    client: httpx2.AsyncClient, rounds: int
) -> None:
    """They alternate, alone and all at once; at the end memory holds two models and no more."""
    await ask(client, NAMES[0])
    one = held()
    alone = {name: await ask(client, name) for name in NAMES}
    assert len(set(alone.values())) == len(NAMES)

    for start in range(0, rounds, AT_ONCE):
        names = [NAMES[i % len(NAMES)] for i in range(start, start + AT_ONCE)]
        answers = await asyncio.gather(*(ask(client, name) for name in names))
        assert answers == [alone[name] for name in names]
        assert await loaded(client) <= 2
        name = NAMES[start // AT_ONCE % len(NAMES)]
        assert await ask(client, name) == alone[name]
    assert held() <= 2.1 * one
