"""Answers that the engine reads only once they are whole: told at their end, off the lane."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from gateway import clock
from gateway.errors import DeadlineExceeded
from tests.fakes import ScriptedChat, generate_job
from tests.serving.generation.harness import asking, batching, deltas, joined
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_all_text_comes_at_the_end_with_the_same_counts() -> None:
    engine = ScriptedChat(reads_whole=lambda text: [text.upper(), "!"])
    async with batching(engine) as batcher:
        told = await deltas(batcher, generate_job("hello", n=2))
        plain = await deltas(batcher, generate_job("bye"))
    for index in range(2):
        mine = [delta for delta in told if delta.index == index]
        assert joined(mine[:-3]) == ""
        assert [delta.text for delta in mine[-3:]] == ["HELLO", "!", ""]
        assert sum(delta.tokens for delta in mine) == len("hello") + 1
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["stop"]
    assert joined(plain) == "BYE!"


class Slow:
    """Reads an answer for as long as it is held."""

    def __init__(self) -> None:
        self.begun, self.held = threading.Event(), threading.Event()

    def __call__(self, text: str) -> Sequence[str]:
        self.thread = threading.current_thread().name
        self.begun.set()
        self.held.wait(30)
        return [text]


async def test_other_answers_go_on_while_one_is_read_and_whoever_leaves_it_may() -> None:
    slow = Slow()
    engine = ScriptedChat(reads_whole=slow)
    async with batching(engine) as batcher:
        leaving = asking(batcher, "slow")
        await until(slow.begun.is_set)
        assert slow.thread.startswith("readings")  # each model has its own
        engine.reads_whole = None
        assert await asking(batcher, "quick") == "quick"
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        slow.held.set()
    assert engine.rows == 0


async def test_an_answer_that_is_read_too_long_ends_at_its_deadline() -> None:
    slow = Slow()
    async with batching(ScriptedChat(reads_whole=slow)) as batcher:
        with pytest.raises(DeadlineExceeded):
            await deltas(batcher, generate_job("late", deadline=clock.now() + 0.2))
        slow.held.set()
