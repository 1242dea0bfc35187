"""Admission: so many requests, so many tokens; who is refused is told when to come back."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway import metrics
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs import Caller
from gateway.serving.admission import Admission, Bounded, retry_after_s, until_deadline


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
    """What waits, over what leaves in a second; within bounds."""
    assert retry_after_s(waiting, finished, seconds) == pytest.approx(told, rel=0.01)


def test_more_than_the_limit_is_refused_until_one_leaves() -> None:
    """With a time to come back at."""
    admission = Admission("m", 2)
    with ExitStack() as places:
        for _ in range(2):
            places.enter_context(admission.admitted())
        with pytest.raises(Overloaded, match="2 requests") as refusal, admission.admitted():
            pass
    assert refusal.value.headers["retry-after"] == "1"
    with admission.admitted():
        pass


def test_tokens_are_bounded_too() -> None:
    """Those of others count; a refused request leaves no trace."""
    admission = Admission("m", 99, max_tokens=100)
    with ExitStack() as places:
        places.enter_context(admission.admitted()).hold(60)
        places.enter_context(admission.admitted()).hold(40)
        with pytest.raises(Overloaded, match="100 tokens"), admission.admitted() as place:
            place.hold(1)
    with admission.admitted() as place:
        place.hold(100)


def test_one_request_larger_than_the_bound_is_admitted_alone() -> None:
    """Else it could never be; beside another it has to wait."""
    admission = Admission("m", 99, max_tokens=100)
    with admission.admitted() as place:
        place.hold(1000)
        with pytest.raises(Overloaded), admission.admitted() as other:
            other.hold(1)
    with admission.admitted() as place:
        place.hold(1)
        with pytest.raises(Overloaded), admission.admitted() as other:
            other.hold(1000)


def test_idle_time_says_nothing_of_the_rate() -> None:
    """A burst after a quiet night is told to come back soon."""
    hours = iter([0, 0, 1, 1])
    bounded = Bounded(10, clock=lambda: next(hours) * 3600)
    bounded.hold(1)
    bounded.let_go(1)
    bounded.hold(10)
    assert bounded.retry_after_s() == 1


def test_what_went_long_ago_is_forgotten_by_halves() -> None:
    """The rate is of late: a minute after work has slowed down, so has what is told."""
    seconds = 0.0
    bounded = Bounded(100, clock=lambda: seconds)
    bounded.hold(100)
    for finished in [10] * 600:
        seconds += 1
        bounded.let_go(finished)
        bounded.hold(finished)
    assert bounded.retry_after_s() == pytest.approx(10, rel=0.1)
    for finished in [4] * 120:
        seconds += 1
        bounded.let_go(finished)
        bounded.hold(finished)
    assert bounded.retry_after_s() == pytest.approx(25, rel=0.1)


@pytest.mark.anyio
async def test_a_caller_who_leaves_gives_its_place_back() -> None:
    """And the tokens that were counted."""
    admission = Admission("admission-test", 1, 10)
    depths = [
        metrics.of(series, "admission-test")._value
        for series in (metrics.QUEUE_DEPTH, metrics.QUEUE_TOKENS)
    ]

    async def wait() -> None:
        with admission.admitted() as place:
            place.hold(10)
            await asyncio.sleep(60)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert [each.get() for each in depths] == [1, 10]
    waiting.cancel()
    await asyncio.wait([waiting])
    assert [each.get() for each in depths] == [0, 0]
    with admission.admitted() as place:
        place.hold(10)


@pytest.mark.anyio
async def test_only_the_deadline_is_told_as_one() -> None:
    """What times out inside, a disk say, is an error like any other."""
    caller = Caller(request_id="r", deadline=metrics.now() + 60, allowed_s=60)
    with pytest.raises(TimeoutError, match="a disk"):
        async with until_deadline(caller):
            raise TimeoutError("a disk")
    hurried = Caller(request_id="r", deadline=metrics.now() + 0.01, allowed_s=0.01)
    with pytest.raises(DeadlineExceeded):
        async with until_deadline(hurried):
            await asyncio.sleep(60)
