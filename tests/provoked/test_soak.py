"""Mixed work at four fifths of what the gateway can do, for ten minutes: nothing grows, nothing is
left, and nobody waits longer at the end than at the beginning.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import httpx2
import numpy as np
import pytest

from gateway.bench.figures import percentile
from tests.processes import DEMO, Served, command, started
from tests.provoked.load import Ask, Clients, mixed
from tests.provoked.readings import Reading, reading, settled

pytestmark = pytest.mark.anyio

AT_ONCE: Final = 16  # clients of whom each asks again at once: more of them get no more done
LOAD: Final = 0.8
MINUTES: Final = 10
EARLY, LATE = slice(2, 4), slice(8, 10)  # of the minutes
READINGS: Final = 30  # of memory, a minute
SERVE: Final = command("serve", "--models", str(DEMO))
SETTINGS: Final = {"GATEWAY_STRUCTURED_ROWS": "8"}  # so that the device is what limits
MOST_GROWTH: Final = 1.03
MOST_DRIFT: Final = 1.5  # of p95, on a machine that others use, too


@dataclass
class Minute:
    """How one went: what the gateway could do at its beginning, requests a second, and what the
    machine could; how long each request took at four fifths of that, seconds from when it was due;
    what memory it had meanwhile.
    """

    capacity: float
    yardstick: float
    seconds: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    @property
    def waits(self) -> list[float]:
        """How many products the machine could have computed while the gateway answered, each time.

        A shared machine may be twice as fast in one minute as in the next; this changes less.
        """
        return [each * self.yardstick for each in self.seconds]


@dataclass(frozen=True)
class Course:
    """How all minutes went."""

    minutes: Sequence[Minute]

    def p95(self, window: slice) -> float:
        """How long most waited, in products that the machine could have computed meanwhile."""
        waits = [wait for minute in self.minutes[window] for wait in minute.waits]
        return percentile(waits, 95)

    def memory(self, window: slice) -> tuple[float, float]:
        """Give the medians of resident bytes, and of those of arrays."""
        readings = [each for minute in self.minutes[window] for each in minute.readings]
        resident = median(each.resident_bytes for each in readings)
        return resident, median(each.active_bytes for each in readings)

    @property
    def drift(self) -> float:
        """How the last p95 compares with the first."""
        return self.p95(LATE) / self.p95(EARLY)

    @property
    def growth(self) -> list[float]:
        """How the last medians of memory compare with the first: resident, arrays."""
        pairs = zip(self.memory(LATE), self.memory(EARLY), strict=True)
        return [late / early for late, early in pairs]

    def told(self) -> Iterator[str]:
        """Say it in lines."""
        for number, minute in enumerate(self.minutes):
            resident, active = self.memory(slice(number, number + 1))
            yield (
                f"  minute {number}: {len(minute.seconds)} requests at {LOAD:.0%} of "
                f"{minute.capacity:.1f}/s (machine: {minute.yardstick:,.0f}), "
                f"p95 {percentile(minute.seconds, 95):.3f} s, "
                f"resident {resident:,.0f}, arrays {active:,.0f} bytes"
            )
        resident, active = self.growth
        yield f"  resident × {resident:.4f}, arrays × {active:.4f}, p95 × {self.drift:.3f}"


def yardstick(seconds: float) -> float:
    """Measure how fast the machine is just now: small products of matrices a second."""
    matrix = np.ones((192, 192), dtype=np.float32)
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        matrix @ matrix
        done += 1
    return done / seconds


@dataclass
class Soak:
    """Asks, and sees that every answer is right."""

    clients: Clients
    client: httpx2.AsyncClient
    choose: random.Random

    async def capacity(self, seconds: float) -> float:
        """Measure how many requests a second are answered while some clients always ask, each time
        for the same.
        """
        asks, now = mixed(random.Random(11)), asyncio.get_running_loop().time
        start, answered = now(), 0

        async def ask() -> None:
            nonlocal answered
            while now() < start + seconds:
                await self._right(next(asks))
                answered += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(ask())
        return answered / (now() - start)

    async def minute(self, measuring_s: float, seconds: float) -> Minute:
        """Measure capacity anew, since a shared machine's drifts; then ask at random moments for
        four fifths of it, whether those before are answered or not.
        """
        machine = await asyncio.to_thread(yardstick, measuring_s / 10)
        minute = Minute(await self.capacity(measuring_s), machine)
        asks, now = mixed(self.choose), asyncio.get_running_loop().time
        start, due = now(), 0.0

        async def ask(due: float) -> None:
            await self._right(next(asks))
            minute.seconds.append(now() - start - due)

        async def read() -> None:
            while now() < start + seconds:
                minute.readings.append(await reading(self.client))
                await asyncio.sleep(seconds / READINGS)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            while (due := due + self.choose.expovariate(LOAD * minute.capacity)) < seconds:
                await asyncio.sleep(start + due - now())
                group.create_task(ask(due))
        return minute

    async def _right(self, ask: Ask) -> None:
        assert (wrong := await self.clients.stay(self.client, ask)) is None, wrong


async def soaked(served: Served, *, measuring_s: float, seconds: float) -> Course:
    """Ask for four fifths of what it can do, minute by minute (of so many seconds, and of so many
    to measure in), and see that nothing is left of it.
    """
    clients = Clients(served.url)
    await clients.learn()
    before = await settled(served.url)
    async with clients.connected() as client:
        soak = Soak(clients, client, random.Random(7))
        course = Course([await soak.minute(measuring_s, seconds) for _ in range(MINUTES)])
    after = await settled(served.url, before.tasks)
    print(*course.told(), *before.told(after), sep="\n")
    assert not any(after.work.values()), after.work
    assert after.tasks <= before.tasks
    assert '"level":"error"' not in served.log.read_text()
    return course


@pytest.mark.slow
async def test_a_short_while_leaves_nothing(tmp_path: Path) -> None:
    """Every answer right; no row, ticket, lease or task left."""
    with started(SERVE, tmp_path, **SETTINGS) as served:
        course = await soaked(served, measuring_s=0.3, seconds=0.9)
    assert sum(len(minute.seconds) for minute in course.minutes) > 50


@pytest.mark.soak
async def test_ten_minutes_leave_nothing_and_nothing_grows(tmp_path: Path) -> None:
    """The last two minutes are as minutes two to four: within 3 % in memory, 1.5 times in p95."""
    with started(SERVE, tmp_path, **SETTINGS) as served:
        course = await soaked(served, measuring_s=10, seconds=50)
    assert max(course.growth) <= MOST_GROWTH, course.growth
    assert course.drift <= MOST_DRIFT
