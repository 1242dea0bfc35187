"""Turns on the lane: how much of a prompt is read in one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gateway import clock
from gateway.jobs.chat import Delta
from gateway.jobs.steps import Pass
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.lane import START_TOKENS, Lane
from tests.fakes import ScriptedChat, generate_job
from tests.serving.generation.harness import asking, batching, reached, text
from tests.waiting import until

pytestmark = pytest.mark.anyio


@dataclass
class SlowReader(ScriptedChat):
    """Reads a prompt by its budget, half a millisecond a token, by a clock that it moves alone."""

    max_context: int = 10_000
    budgets: list[int] = field(default_factory=list)
    unread: int = 2000
    now_s: float = 0.0

    def prefill(self, token_budget: int) -> list[Delta]:
        self.budgets.append(token_budget)
        read = min(self.unread, token_budget)
        self.now_s += 0.0005 * read
        self.unread -= read
        if not self.unread:
            return super().prefill(token_budget)
        self.last_pass = Pass(1, read, read)
        return []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SlowReader:
    engine = SlowReader()
    monkeypatch.setattr(clock, "now", lambda: engine.now_s)
    return engine


@asynccontextmanager
async def batching_after(kind: str, engine: ScriptedChat) -> AsyncIterator[GenerationBatcher]:
    """Run a batcher on a lane that has just had a turn of this kind."""
    async with Lane() as lane:
        async with lane.turn(kind):
            pass
        async with batching(engine, pass_limit_s=0.05, lane=lane) as batcher:
            yield batcher


async def test_chunks_of_a_prompt_are_as_long_as_their_time_allows(engine: SlowReader) -> None:
    async with batching_after("embedding", engine) as batcher:
        assert await text(batcher, generate_job("hello", max_tokens=3)) == "hel"
    assert engine.budgets[0] == START_TOKENS
    assert max(engine.budgets[1:]) <= 110, "a hundred tokens take as long as a pass may"
    assert len(engine.budgets) > 10


async def test_prompts_that_have_the_device_to_themselves_are_read_in_longer_passes(
    engine: SlowReader,
) -> None:
    """Loads and housekeeping are nobody's request."""
    async with batching_after("load", engine) as batcher:
        await text(batcher, generate_job("hello", max_tokens=3))
    assert max(engine.budgets[1:]) <= 440
    assert len(engine.budgets) < 10


async def test_short_prompts_share_a_longer_pass_beside_an_answer(engine: SlowReader) -> None:
    """One by one they would keep it waiting for longer, and each other too."""
    engine.unread = 0
    async with batching(engine, pass_limit_s=0.05) as batcher:
        async with batcher.generate(generate_job("x" * 9000)) as writing:
            await anext(writing.deltas)
            engine.gate.close()
            await reached(engine)
            engine.budgets, engine.unread = [], 2000
            asked = [asking(batcher, "hello", max_tokens=3) for _ in range(3)]
            await until(lambda: batcher.tickets == 3)  # one that came first would be read alone
            engine.gate.open()
            await asyncio.gather(*asked)
    assert all(110 < budget <= 440 for budget in engine.budgets[2:])
    assert len(engine.budgets) < 10
