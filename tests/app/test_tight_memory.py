"""A budget that few rows fit into, over HTTP on real MLX: the others wait, and all are answered."""

import asyncio
from pathlib import Path

import httpx2
import mlx.core as mx
import pytest

from gateway.jobs.steps import KvCost
from gateway.serving.generation.memory import Layout, RowCosts
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TOKENS = 200


async def ask(client: httpx2.AsyncClient, number: int) -> str:
    messages = [{"role": "user", "content": f"tell me about the number {number}"}]
    body = {"model": "chat", "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


async def test_rows_that_do_not_fit_wait_and_answer_as_they_would_alone(tmp_path: Path) -> None:
    """Nine run at once where three have room; the device's memory never exceeds the allowance."""
    write_chat(tmp_path / "chat")
    models = catalog(tmp_path, {"chat": {"kind": "chat", "source": "path:chat"}})
    engines = cpu_engines(kv_allowance_tokens=0)
    size = await engines.size(models.specs[0], tmp_path / "chat")
    costs = RowCosts(KvCost(size.kv_token), chunk_tokens=512)
    counted = Layout([TOKENS + 50] * 3).nbytes(costs)
    async with served(models, engines, cache_max_bytes=size.weights + counted) as client:
        alone = [await ask(client, number) for number in range(9)]
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        assert await asyncio.gather(*(ask(client, number) for number in range(9))) == alone
        taken = mx.get_peak_memory() - before
    assert taken < 2 * counted, "nine rows would take three times as much"
