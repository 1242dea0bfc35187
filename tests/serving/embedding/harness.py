"""Batchers of scripted encoders, and those who ask them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from gateway.jobs.embed import Embedded
from gateway.serving.admission import Arrivals
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.embedding.policy import EmbeddingLimits
from gateway.serving.embedding.reranker import RerankBatcher
from gateway.serving.lane import Lane
from gateway.serving.ports import EmbeddingEngine
from gateway.serving.tokenize import ThreadPools
from tests.fakes import ScriptedEmbedder, ScriptedReranker, embed_job

LIMITS = EmbeddingLimits(max_batch_size=32, max_batch_tokens=1000, batch_window_s=0.05)


@asynccontextmanager
async def batching(
    engine: EmbeddingEngine,
    arrivals: Arrivals | None = None,
    lane: Lane | None = None,
    **limits: Any,
) -> AsyncIterator[EmbeddingBatcher]:
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(Lane()) if lane is None else lane
        pool, given = stack.enter_context(ThreadPools()), replace(LIMITS, **limits)
        batcher = EmbeddingBatcher("m", engine, own, pool, given, arrivals or Arrivals())
        async with batcher.running():
            yield batcher


@asynccontextmanager
async def reranking(engine: ScriptedReranker, **limits: Any) -> AsyncIterator[RerankBatcher]:
    with ThreadPools() as pool:
        async with Lane() as lane:
            batcher = RerankBatcher("m", engine, lane, pool, replace(LIMITS, **limits))
            async with batcher.running():
                yield batcher


Asked = asyncio.Task[Embedded]


def asking(batcher: EmbeddingBatcher, *texts: str, **given: Any) -> "Asked":
    return asyncio.create_task(batcher.embed(embed_job(*texts, **given)))


async def held(batcher: EmbeddingBatcher, engine: ScriptedEmbedder, *texts: str) -> "Asked":
    """Ask, and wait until the pass is held at the engine's gate."""
    engine.gate.close()
    asked = asking(batcher, *texts)
    await asyncio.to_thread(engine.gate.reached.wait, 60)
    return asked
