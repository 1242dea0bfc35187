"""Admission: limits of requests and of tokens; a refusal says when to come back."""

import asyncio
from contextlib import ExitStack

import pytest
from prometheus_client import Gauge

from gateway import clock, metrics
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs import Caller
from gateway.serving.admission import Admission, Noun, retry_after_s, until_deadline


@pytest.mark.parametrize(
    ("waiting", "finished", "seconds", "told"),
    [
        (100, 199, 10, 5),  # twenty a second
        (100, 0, 0.001, 1),  # nothing is known yet
        (100, 0, 0.3, 30),  # nothing has left
        (100, 0, 20, 60),  # nor for long
        (3, 99, 10, 1),  # never less than a second
    ],
)
def test_the_drain_rate_says_when_to_come_back(
    waiting: float, finished: float, seconds: float, told: float
) -> None:
    assert retry_after_s(waiting, finished, seconds) == pytest.approx(told, rel=0.01)


@pytest.mark.parametrize("noun", list(Noun))
def test_more_than_the_limit_is_refused_until_one_leaves(noun: Noun) -> None:
    admission = Admission("m", noun, 100)
    with ExitStack() as places:
        for amount in (60, 40):
            places.enter_context(admission.admit(amount))
        with pytest.raises(Overloaded, match=f"100 {noun}") as refusal, admission.admit():
            pass
        with pytest.raises(Overloaded) as told, admission.admit(retry_after_s=7):
            pass
    assert refusal.value.headers["retry-after"] == "1"
    assert told.value.headers["retry-after"] == "7"
    with admission.admit(100):
        pass


def test_one_request_larger_than_the_bound_is_admitted_alone() -> None:
    """Otherwise it could never be; beside another it has to wait."""
    admission = Admission("m", Noun.TOKENS, 100)
    for first, second in ((1000, 1), (1, 1000)):
        with admission.admit(first), pytest.raises(Overloaded), admission.admit(second):
            pass


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(limit: int) -> tuple[Admission, Seconds]:
    seconds = Seconds()
    return Admission("m", Noun.REQUESTS, limit, seconds), seconds


def test_time_in_which_nothing_could_leave_says_nothing_of_the_rate() -> None:
    queue, seconds = admission(100)
    with queue.admit(50):
        with queue.admit(50):
            seconds.now = 50.0
            assert queue.retry_after_s() == 60
            queue.begin()
            seconds.now = 51.0
        assert queue.retry_after_s() == 1


def test_idle_time_says_nothing_of_the_rate() -> None:
    queue, seconds = admission(10)
    with queue.admit(1):
        pass
    seconds.now = 3600
    with queue.admit(10):
        assert queue.retry_after_s() == 1


def test_older_measurements_fade_by_halves() -> None:
    """The rate is a recent one: a minute after work has slowed down, the hint has too."""
    queue, seconds = admission(200)
    with queue.admit(100):
        for finished, times, told in ((10, 600, 10), (4, 120, 25)):
            for _ in range(times):
                with queue.admit(finished):
                    seconds.now += 1
            assert queue.retry_after_s() == pytest.approx(told, rel=0.1)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("noun", "gauge"), [(Noun.REQUESTS, metrics.QUEUE_DEPTH), (Noun.TOKENS, metrics.QUEUE_TOKENS)]
)
async def test_a_caller_who_leaves_gives_its_place_back(noun: Noun, gauge: Gauge) -> None:
    """Two admissions of one name add up: one is on its way out, the other was just loaded."""
    held = metrics.of(gauge, "admission-test")._value
    admissions = [Admission("admission-test", noun, 10) for _ in range(2)]

    async def wait(admission: Admission) -> None:
        with admission.admit(10):
            await asyncio.sleep(60)

    waiting = [asyncio.create_task(wait(each)) for each in admissions]
    await asyncio.sleep(0)
    for left in (10, 0):
        assert held.get() == left + 10
        gone = waiting.pop()
        gone.cancel()
        await asyncio.wait([gone])
    assert held.get() == 0
    with admissions[0].admit(10):
        pass


@pytest.mark.anyio
async def test_only_the_deadline_is_told_as_one() -> None:
    """A timeout of something inside, such as a disk, is an error like any other."""
    caller = Caller(request_id="r", deadline=clock.now() + 60, allowed_s=60)
    with pytest.raises(TimeoutError, match="a disk"):
        async with until_deadline(caller):
            raise TimeoutError("a disk")
    hurried = Caller(request_id="r", deadline=clock.now() + 0.01, allowed_s=0.01)
    with pytest.raises(DeadlineExceeded):
        async with until_deadline(hurried):
            await asyncio.sleep(60)
