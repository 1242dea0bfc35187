"""Turns on the lane: how much of a prompt is read in one."""

import time
from dataclasses import dataclass, field

import pytest

from gateway.jobs import Pass, SequenceDelta
from gateway.serving.pace import START_TOKENS
from tests.fakes import ScriptedChat, generate_job
from tests.serving.generation.test_batcher import batching, text

pytestmark = pytest.mark.anyio


@dataclass
class SlowReader(ScriptedChat):
    """Reads a prompt by its budget, half a millisecond a token."""

    max_context: int = 10_000
    budgets: list[int] = field(default_factory=list)
    unread: int = 2000

    def prefill(self, token_budget: int) -> list[SequenceDelta]:
        self.budgets.append(token_budget)
        read = min(self.unread, token_budget)
        time.sleep(0.0005 * read)
        self.unread -= read
        if not self.unread:
            return super().prefill(token_budget)
        self.last_pass = Pass(1, read, read)
        return []


async def test_chunks_of_a_prompt_are_as_long_as_their_time_allows() -> None:
    """By what was measured: on a device where the setting's tokens take longer, they are fewer."""
    engine = SlowReader()
    async with batching(engine, pass_limit_s=0.05) as batcher:
        assert await text(batcher, generate_job("hello", max_tokens=3)) == "hel"
    assert engine.budgets[0] == START_TOKENS
    assert max(engine.budgets[1:]) <= 110, "a hundred tokens take as long as a pass may"
    assert len(engine.budgets) > 10


async def test_chunks_are_never_longer_than_the_setting_says() -> None:
    """However fast the device is."""
    engine = SlowReader()
    async with batching(engine, pass_limit_s=60) as batcher:
        await text(batcher, generate_job("hello", max_tokens=3))
    assert set(engine.budgets) == {512}
