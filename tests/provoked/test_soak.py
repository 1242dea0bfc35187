"""Mixed work at four fifths of what the gateway can do, for ten minutes: nothing grows, nothing is
left, and nobody waits longer at the end than at the beginning.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import httpx2
import pytest

from gateway.bench.figures import percentile
from tests.processes import Served, command, started
from tests.provoked.load import Ask, Clients, mixed
from tests.provoked.readings import Reading, reading, settled

pytestmark = pytest.mark.anyio

AT_ONCE: Final = 16  # clients of whom each asks again at once: more of them get no more done
LOAD: Final = 0.8
EARLY, LATE = (0.2, 0.4), (0.8, 1.0)  # of ten minutes: two to four, and the last two
SAMPLES: Final = 300
SETTINGS: Final = {"GATEWAY_STRUCTURED_ROWS": "8"}  # so that the device is what limits
MOST_GROWTH: Final = 1.03
MOST_DRIFT: Final = 1.5  # of p95; on a machine that others use, too


@dataclass(frozen=True)
class Sample:
    """A number of some moment, which is a share of the whole time."""

    moment: float
    value: float


def inside(samples: Sequence[Sample], window: tuple[float, float]) -> list[float]:
    """Give the numbers of a stretch of time."""
    return [each.value for each in samples if window[0] <= each.moment < window[1]]


@dataclass(frozen=True)
class Course:
    """How it went: seconds of each request by when it was due, and memory by when it was read."""

    latencies: Sequence[Sample]
    resident: Sequence[Sample]
    active: Sequence[Sample]

    @property
    def drift(self) -> float:
        """How the last p95 compares with the first."""
        return _p95(inside(self.latencies, LATE)) / _p95(inside(self.latencies, EARLY))

    @property
    def growth(self) -> dict[str, float]:
        """How the last median of memory compares with the first."""
        return {
            name: median(inside(samples, LATE)) / median(inside(samples, EARLY))
            for name, samples in (("resident", self.resident), ("active", self.active))
        }

    def told(self) -> list[str]:
        """Say it in lines."""
        lines = [f"  {len(self.latencies)} requests, p95 drift {self.drift:.3f}"]
        for window in (EARLY, LATE):
            seconds = inside(self.latencies, window)
            at = f"  {window[0]:.0%}–{window[1]:.0%}:"
            lines.append(f"{at} p50 {median(seconds):.3f} s, p95 {_p95(seconds):.3f} s")
            lines.append(f"{at} resident {median(inside(self.resident, window)):,.0f} bytes")
            lines.append(f"{at} active {median(inside(self.active, window)):,.0f} bytes")
        return [*lines, *(f"  {name} × {by:.4f}" for name, by in self.growth.items())]


def _p95(seconds: Sequence[float]) -> float:
    return percentile(seconds, 95)


@dataclass
class Soak:
    """Asks, and sees that every answer is right."""

    clients: Clients
    choose: random.Random

    async def capacity(self, seconds: float) -> float:
        """Measure how many requests a second are answered while some clients always ask."""
        asks, now = mixed(self.choose), asyncio.get_running_loop().time
        end, answered = now() + seconds, 0

        async def ask() -> None:
            nonlocal answered
            while now() < end:
                await self._right(client, next(asks))
                answered += now() < end

        async with self.clients.connected() as client, asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(ask())
        return answered / seconds

    async def course(self, per_second: float, seconds: float) -> Course:
        """Ask at random moments, so many a second, whether those before are answered or not."""
        asks, now = mixed(self.choose), asyncio.get_running_loop().time
        start, due, latencies = now(), 0.0, list[Sample]()

        async def ask(due: float) -> None:
            await self._right(client, next(asks))
            latencies.append(Sample(due / seconds, now() - start - due))

        async with self.clients.connected() as client, asyncio.TaskGroup() as group:
            watching = group.create_task(
                self._watched(lambda: (now() - start) / seconds, seconds / SAMPLES)
            )
            while (due := due + self.choose.expovariate(per_second)) < seconds:
                await asyncio.sleep(start + due - now())
                group.create_task(ask(due))
        readings = watching.result()
        return Course(
            latencies,
            [Sample(moment, each.resident_bytes) for moment, each in readings],
            [Sample(moment, each.active_bytes) for moment, each in readings],
        )

    async def _right(self, client: httpx2.AsyncClient, ask: Ask) -> None:
        assert (wrong := await self.clients.stay(client, ask)) is None, wrong

    async def _watched(
        self, moment: Callable[[], float], between_s: float
    ) -> list[tuple[float, Reading]]:
        readings = []
        async with self.clients.connected() as client:
            while (at := moment()) < 1:
                readings.append((at, await reading(client)))
                await asyncio.sleep(between_s)
        return readings


async def soaked(served: Served, *, measuring_s: float, seconds: float) -> Course:
    """Measure what it can do, ask for four fifths of it, and see that nothing is left of it."""
    clients = Clients(served.url)
    await clients.learn()
    soak = Soak(clients, random.Random(7))
    before = await settled(served.url)
    capacity = await soak.capacity(measuring_s)
    course = await soak.course(LOAD * capacity, seconds)
    after = await settled(served.url, before.tasks)
    told = [*course.told(), *before.told(after)]
    print(f"{LOAD:.0%} of {capacity:.1f} requests/s for {seconds} s:", *told, sep="\n")
    assert not any(after.work.values()), after.work
    assert after.tasks <= before.tasks
    assert '"level":"error"' not in served.log.read_text()
    return course


async def test_a_short_while_leaves_nothing(tmp_path: Path) -> None:
    """Every answer right; no row, ticket, lease or task left."""
    with started(command("serve"), tmp_path, **SETTINGS) as served:
        course = await soaked(served, measuring_s=3, seconds=14)
    assert len(course.latencies) > 50


@pytest.mark.soak
async def test_ten_minutes_leave_nothing_and_nothing_grows(tmp_path: Path) -> None:
    """The last two minutes are as minutes two to four: within 3 % in memory, 1.5 times in p95."""
    with started(command("serve"), tmp_path, **SETTINGS) as served:
        course = await soaked(served, measuring_s=30, seconds=600)
    assert max(course.growth.values()) <= MOST_GROWTH, course.growth
    assert course.drift <= MOST_DRIFT
