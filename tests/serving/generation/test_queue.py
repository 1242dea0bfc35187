"""A chat model's queue: a job is refused where it is full, or waits for the next place."""

import asyncio
from dataclasses import replace

import pytest

from gateway import clock
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs import Sampling, SequenceParams
from gateway.serving.generation.policy import GenerationLimits
from gateway.serving.generation.queue import JobQueue
from tests.fakes import caller

pytestmark = pytest.mark.anyio
LIMITS = GenerationLimits(max_batch_size=1, prefill_chunk_tokens=9, queue_max_tokens=10)
JOB = [SequenceParams(prompt=[1] * 6, max_tokens=1, sampling=Sampling())]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_job_that_may_wait_has_the_place_of_one_that_leaves_at_once() -> None:
    """No time passes between the two."""
    queue = JobQueue("m", LIMITS)
    refusals: list[str] = []

    async def wait() -> None:
        async with queue.place(caller(), JOB, lambda: refusals.append("full")):
            pass

    async with queue.place(caller(), JOB):
        waiting = asyncio.create_task(wait())
        await settle()
        assert refusals == ["full"]
    await settle()
    assert waiting.done()
    assert refusals == ["full"]


async def test_a_job_that_waits_is_admitted_by_a_higher_limit() -> None:
    """Of a catalog that is read again meanwhile."""
    queue = JobQueue("m", LIMITS)

    async def wait() -> None:
        async with queue.place(caller(), JOB, lambda: None):
            pass

    async with queue.place(caller(), JOB):
        waiting = asyncio.create_task(wait())
        await settle()
        assert not waiting.done()
        queue.adopt(replace(LIMITS, queue_max_tokens=12))
        await settle()
        assert waiting.done()


async def test_a_job_that_may_not_wait_is_refused() -> None:
    """And holds nothing."""
    queue = JobQueue("m", LIMITS)
    async with queue.place(caller(), JOB):
        with pytest.raises(Overloaded, match="6 tokens waiting already"):
            async with queue.place(caller(), JOB):
                pass
    async with queue.place(caller(), JOB):
        pass


async def test_a_job_waits_no_longer_than_its_deadline() -> None:
    """Then it is an error of its own."""
    queue = JobQueue("m", LIMITS)
    async with queue.place(caller(), JOB):
        late = replace(caller(), deadline=clock.now())
        with pytest.raises(DeadlineExceeded):
            async with queue.place(late, JOB, lambda: None):
                pass
