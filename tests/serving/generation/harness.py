"""A batcher of a scripted engine, and those who ask it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from gateway.jobs.chat import Delta, GenerateJob, Grammar
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.memory import RowMemory
from gateway.serving.generation.policy import GenerationLimits
from gateway.serving.lane import Lane
from gateway.serving.tokenize import ThreadPools
from tests.fakes import ScriptedChat, generate_job
from tests.waiting import until


@asynccontextmanager
async def batching(
    engine: ScriptedChat, memory: RowMemory | None = None, *, lane: Lane | None = None, **given: Any
) -> AsyncIterator[GenerationBatcher]:
    limits = GenerationLimits(**{"max_batch_size": 32, "prefill_chunk_tokens": 512, **given})
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(Lane()) if lane is None else lane
        pool = stack.enter_context(ThreadPools())
        grammars = GrammarCache("m", engine.compile, pool.run)
        batcher = GenerationBatcher("m", engine, own, pool, limits, grammars, memory)
        async with batcher.running():
            yield batcher


async def deltas(batcher: GenerationBatcher, job: GenerateJob) -> list[Delta]:
    async with batcher.generate(job) as generation:
        return [delta async for delta in generation.deltas]


def joined(told: list[Delta]) -> str:
    return "".join(delta.text for delta in told)


async def text(batcher: GenerationBatcher, job: GenerateJob) -> str:
    return joined(await deltas(batcher, job))


def asking(batcher: GenerationBatcher, words: str, **given: Any) -> "asyncio.Task[str]":
    return asyncio.create_task(text(batcher, generate_job(words, **given)))


def asking_bound(batcher: GenerationBatcher, words: str) -> "asyncio.Task[str]":
    """Ask for an answer that is held to a grammar."""
    job = replace(generate_job(words), grammar=Grammar("json_schema", "{}"))
    return asyncio.create_task(text(batcher, job))


async def asking_together(
    batcher: GenerationBatcher, jobs: Iterable[GenerateJob]
) -> "list[asyncio.Task[list[Delta]]]":
    """Ask for answers in this order; their rows join in one turn, however late a thread is that
    reads a prompt.
    """
    asked: list[asyncio.Task[list[Delta]]] = []
    async with batcher._lane.turn("test"):
        for job in jobs:
            asked.append(asyncio.create_task(deltas(batcher, job)))
            await until(lambda: batcher.tickets == len(asked))
    return asked


async def reached(engine: ScriptedChat) -> None:
    """Wait until a step is held at the engine's gate."""
    await asyncio.to_thread(engine.gate.reached.wait, 60)
