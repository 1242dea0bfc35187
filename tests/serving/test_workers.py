"""Workers that must not end."""

import asyncio

import pytest

from gateway.serving.workers import run_forever

pytestmark = pytest.mark.anyio


async def test_work_that_fails_is_told_and_begun_again() -> None:
    """Each time, until it is cancelled."""
    begun, told = 0, []
    is_well = asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun <= 2:
            raise ValueError(begun)
        is_well.set()
        await asyncio.Event().wait()

    worker = asyncio.create_task(run_forever("mine", work, lambda error: told.append(str(error))))
    await asyncio.wait_for(is_well.wait(), 5)
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert told == ["1", "2"]
    assert begun == 3
