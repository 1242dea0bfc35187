"""Health, while the device is busy for long: the loop answers, whatever the lane does."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from gateway.engine import device
from gateway.jobs import TokenIds, Vectors
from tests.fakes import ScriptedEmbedder, ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

LONG_S = 2.0


@dataclass
class SlowEmbedder(ScriptedEmbedder):
    """Multiplies matrices for two seconds or more, in one call of MLX."""

    call_s: float = 0.0

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        some = 16
        took = _multiplied(some)
        while self.call_s < LONG_S:
            some = round(some * 1.3 * LONG_S / took)
            self.call_s = took = _multiplied(some)
        return super().embed(rows)


def _multiplied(times: int) -> float:
    """Give the seconds for this number of products, evaluated at once."""
    matrix = mx.zeros((512, 512))
    for _ in range(times):
        matrix = matrix @ matrix
    started = time.perf_counter()
    mx.eval(matrix)
    return time.perf_counter() - started


@dataclass
class SlowEngines(ScriptedEngines):
    embedder: SlowEmbedder = field(default_factory=SlowEmbedder)

    def end(self) -> None:
        device.leave()


async def test_health_answers_within_a_tenth_of_a_long_native_call(tmp_path: Path) -> None:
    """Two seconds in MLX, and nobody who asks after us waits for them."""
    engines = SlowEngines()
    models = catalog(tmp_path, {"slow": {"kind": "embedding", "source": "path:."}})
    async with served(models, engines) as client:
        body = {"model": "slow", "input": "a"}
        asked = asyncio.create_task(client.post("/v1/embeddings", json=body))
        waits = []
        while not asked.done():
            started = time.perf_counter()
            answer = await client.get("/health")
            waits.append(time.perf_counter() - started)
            assert answer.json() == {"status": "ok"}
            await asyncio.sleep(0.05)
        assert (await asked).status_code == 200
    assert engines.embedder.call_s >= LONG_S
    assert max(waits) < engines.embedder.call_s / 10
