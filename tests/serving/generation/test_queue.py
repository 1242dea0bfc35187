"""A chat model's queue: a job is refused where it is full, or waits; waiting rows take turns."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway import clock
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs.chat import Sampling
from gateway.jobs.steps import SequenceParams
from gateway.serving.generation.choice import Choice
from gateway.serving.generation.queue import JobQueue, Joins, WaitingQueue
from tests.fakes import caller

pytestmark = pytest.mark.anyio
JOB = [SequenceParams(prompt=[1] * 6, max_tokens=1, sampling=Sampling())]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_job_that_may_wait_has_the_place_of_one_that_leaves_or_a_higher_limit() -> None:
    """It has it at once: no time passes between. A job that may not wait is refused."""
    queue = JobQueue("m", max_tokens=10, max_choices=9)
    refusals: list[str] = []

    async def wait() -> None:
        async with queue.place(caller(), JOB, lambda: refusals.append("full")):
            pass

    async with queue.place(caller(), JOB):
        with pytest.raises(Overloaded, match="6 tokens waiting already"):
            async with queue.place(caller(), JOB):
                pass
        waiting = asyncio.create_task(wait())
        await settle()
        assert refusals == ["full"]
    await settle()
    assert waiting.done()
    async with queue.place(caller(), JOB):
        waiting = asyncio.create_task(wait())
        await settle()
        assert not waiting.done()
        queue.adopt(max_tokens=12, max_choices=9)
        await settle()
        assert waiting.done()
    assert refusals == ["full"] * 2


async def test_a_job_waits_no_longer_than_its_deadline() -> None:
    queue = JobQueue("m", max_tokens=10, max_choices=9)
    async with queue.place(caller(), JOB):
        late = replace(caller(), deadline=clock.now())
        with pytest.raises(DeadlineExceeded):
            async with queue.place(late, JOB, lambda: None):
                pass


def a_choice(request: str, rank: float, index: int = 0) -> Choice:
    row = SequenceParams(prompt=[1], max_tokens=9, sampling=Sampling(), index=index)
    return Choice(row, asyncio.Queue(), rank, request=request)


def filled(**rows: tuple[float, int]) -> WaitingQueue:
    """Return a queue in which each request waits at its rank, with its number of rows."""
    waiting = WaitingQueue()
    for request, (rank, count) in rows.items():
        for index in range(count):
            waiting.add(a_choice(request, rank, index))
    return waiting


class Places:
    """Lets a given number of choices join, and counts the questions."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.calls = 0
        self.joining: list[Choice] = []

    def __call__(self, choice: Choice) -> Joins:
        self.calls += 1
        self._places -= 1
        if self._places < 0:
            return Joins.NONE
        self.joining.append(choice)
        return Joins.NOW


def choose(waiting: WaitingQueue, places: int, running: Mapping[str, int] = {}) -> list[Choice]:
    deciding = Places(places)
    waiting.offer(running, deciding)
    return deciding.joining


def names(choices: list[Choice]) -> str:
    return "".join(choice.request for choice in choices)


async def test_requests_give_one_row_in_turn() -> None:
    waiting = filled(a=(1.0, 9), b=(2.0, 2), c=(3.0, 1))
    assert names(choose(waiting, 7)) == "abcabaa"
    assert len(waiting) == 12, "they were only asked"


async def test_one_with_few_rows_inside_goes_before_one_with_many() -> None:
    """It does so even if it came later: places that become free one by one are shared too."""
    waiting = filled(a=(1.0, 9), b=(2.0, 9))
    assert names(choose(waiting, 5, {"a": 3})) == "bbbab"
    inside = Counter({"a": 8})
    for _ in range(8):
        (one,) = choose(waiting, 1, inside)
        waiting.remove([one])
        inside[one.request] += 1
    assert inside == {"a": 8, "b": 8}


async def test_the_preempted_go_first_by_rank() -> None:
    waiting = filled(a=(1.0, 2))
    for request, rank in (("y", 9.0), ("x", 5.0)):
        late = a_choice(request, rank)
        late.id = int(rank)
        waiting.add_preempted(late)
    joining = choose(waiting, 3)
    assert names(joining) == "xya"
    waiting.remove(joining)
    assert (len(waiting), names(list(waiting))) == (1, "a")


async def test_a_choice_that_is_removed_never_joins() -> None:
    waiting = filled(a=(1.0, 5), b=(2.0, 1))
    gone = [each for each in waiting if each.request == "b" or each.index in (0, 1, 3)]
    waiting.remove(gone)
    assert len(waiting) == 2
    joining = choose(waiting, 9)
    assert [each.index for each in joining] == [2, 4]
    waiting.remove(joining)
    assert len(waiting) == 0
    assert choose(waiting, 9) == []


async def test_nobody_walks_all_that_wait() -> None:
    """Ten thousand rows of a few requests are asked about for two places."""
    waiting = filled(a=(1.0, 5_000), b=(2.0, 5_000))
    places = Places(2)
    waiting.offer({}, places)
    assert names(places.joining) == "ab"
    assert places.calls == 3
