"""A text longer than a pass may be, with a real model: it gives the device back between layers."""

import asyncio
from collections.abc import Generator, Sequence

import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.jobs.embed import TextOutputs
from gateway.serving.embedding.batcher import EmbeddingBatcher, TextRow
from gateway.serving.embedding.policy import EmbeddingLimits
from gateway.serving.lane import LEAST_TOKENS, Lane
from gateway.serving.tokenize import ThreadPools
from tests.engine.embedding.harness import GOLDEN
from tests.fakes import embed_job

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", ["bert", "qwen3"])
async def test_a_long_text_gives_the_lane_back_and_has_the_vector_of_one_pass(name: str) -> None:
    limits = EmbeddingLimits(
        max_batch_size=8, max_batch_tokens=999, batch_window_s=0, pass_limit_s=1e-12
    )
    text = "A dog barks. " * 200

    def load() -> EmbeddingEngine:
        return load_embedding(GOLDEN / name, name="tiny", device=Device.CPU)

    turns = 0

    async def decode(lane: Lane) -> None:
        nonlocal turns
        while True:
            async with lane.turn("decode"):
                turns += 1
            await asyncio.sleep(0)

    seen: list[int] = []  # turns of others before each step

    def in_steps(rows: Sequence[TextRow]) -> Generator[list[TextOutputs] | None]:
        for result in engine.in_steps([row.ids for row in rows], rows[0].outputs):
            seen.append(turns)
            yield result

    with ThreadPools() as pool:
        async with Lane() as lane:
            async with lane.turn("load") as turn:
                engine = await turn(load)
            batcher = EmbeddingBatcher("tiny", engine, lane, pool, limits)
            batcher._in_steps = in_steps
            async with batcher.running():
                beside = asyncio.create_task(decode(lane))
                embedded = await batcher.embed(embed_job(text, truncate=True))
                beside.cancel()
                await asyncio.wait([beside])
            async with lane.turn("embedding") as turn:
                row = engine.truncate(engine.encode([text])[0])
                whole = await turn(engine.embed, [row])
                await turn(engine.close)
    assert len(row) > LEAST_TOKENS
    assert len(set(seen)) > 2, "another had the lane between layers"
    assert np.array_equal(embedded.vectors, whole)
