"""A budget that few rows fit into, over HTTP on real MLX: the others wait, and all are answered."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import mlx.core as mx
import pytest

from gateway.app.engines import MlxEngines
from gateway.engine.sources import Hub
from gateway.serving.generation.memory import rectangle
from tests.checkpoints import write_chat
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
ROWS = 3  # of so many tokens have room at once
TOKENS = 200


@dataclass
class Tight:
    """A gateway with room for ROWS rows beside its two models."""

    client: httpx2.AsyncClient
    kv_token: int

    async def ask(self, text: str, max_tokens: int | None = TOKENS) -> httpx2.Response:
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        return await self.client.post("/v1/chat/completions", json=body)


@pytest.fixture
async def tight(tmp_path: Path) -> AsyncIterator[Tight]:
    """Serve two tiny models of random weights."""
    for seed, name in enumerate(("chat", "other")):
        write_chat(tmp_path / name, seed)
    models = {name: {"kind": "chat", "source": f"path:{name}"} for name in ("chat", "other")}
    engines = MlxEngines("cpu", None, Hub(endpoint="http://127.0.0.1:9"), kv_allowance_tokens=0)
    read = catalog(tmp_path, models)
    size = await engines.size(read.specs[0], tmp_path / "chat")
    budget = 2 * size.weights + rectangle([TOKENS] * ROWS) * size.kv_token
    async with served(read, engines, cache_max_bytes=budget) as client:
        yield Tight(client, size.kv_token)


async def test_rows_that_do_not_fit_wait_and_answer_as_they_would_alone(tight: Tight) -> None:
    """Nine at once where three have room; what is on the device never exceeds what is allowed."""
    texts = [f"tell me about the number {i}" for i in range(9)]
    alone = [(await tight.ask(text)).json()["choices"][0]["message"]["content"] for text in texts]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    answers = await asyncio.gather(*(tight.ask(text) for text in texts))
    assert [answer.status_code for answer in answers] == [200] * 9
    together = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert together == alone
    counted = rectangle([256] * ROWS) * tight.kv_token
    assert mx.get_peak_memory() - before < 2 * counted, "nine rows would take three times as much"


async def test_an_idle_model_gives_way_to_rows(tight: Tight) -> None:
    """It is loaded again when it is asked for."""
    await tight.client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    states = {"chat": "unloaded", "other": "loaded"}
    assert await _states(tight.client) == states
    answer = await tight.ask("Hello", 600)
    assert answer.status_code == 200, answer.text
    assert await _states(tight.client) == {"chat": "loaded", "other": "unloaded"}


async def test_a_row_that_can_never_fit_is_refused_and_says_what_would(tight: Tight) -> None:
    """At once, as a fault of the request; without a bound of its own it is given what there is."""
    refused = await tight.ask("Hello", 3000)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("insufficient_memory", "max_tokens")
    unbounded = await tight.ask("Hello", None)
    assert unbounded.status_code == 200


async def _states(client: httpx2.AsyncClient) -> dict[str, str]:
    listed = (await client.get("/v1/models")).json()["data"]
    return {entry["id"]: entry["state"] for entry in listed}
