"""Mixed work at four fifths of the gateway's capacity, for ten minutes.

Nothing grows, nothing is left, and nobody waits longer at the end than at the beginning.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import httpx2
import numpy as np
import pytest

from gateway.bench.figures import percentile
from tests.processes import DEMO, command, started
from tests.provoked.load import Ask, Clients, mixed
from tests.provoked.readings import Reading, reading, settled

pytestmark = pytest.mark.anyio

AT_ONCE: Final = 16  # clients of whom each asks again at once: more of them get no more done
LOAD: Final = 0.8
MINUTES: Final = 10
MEASURING_S, ASKING_S = 10, 50  # seconds of each in a minute
EARLY, LATE = slice(2, 4), slice(8, 10)  # the minutes compared
READINGS: Final = 30  # readings of memory in each minute
SERVE: Final = command("serve", "--models", str(DEMO))
SETTINGS: Final = {"GATEWAY_STRUCTURED_ROWS": "8"}  # the device is then the limit
MOST_GROWTH: Final = 1.03
MOST_DRIFT: Final = 1.5  # drift of p95, on a machine that others use too


@dataclass
class Minute:
    """One minute of the run.

    `capacity` is the gateway's at the minute's beginning, in requests a second, and `yardstick` the
    machine's. `seconds` has each request's time from when it was due, at four fifths of that
    capacity; `readings` has the memory meanwhile.
    """

    capacity: float
    yardstick: float
    seconds: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    @property
    def waits(self) -> list[float]:
        """The time of each answer, in products that the machine could have computed meanwhile.

        A shared machine may be twice as fast in one minute as in the next; this changes less.
        """
        return [each * self.yardstick for each in self.seconds]


def p95(minutes: Sequence[Minute]) -> float:
    return percentile([wait for minute in minutes for wait in minute.waits], 95)


def memory(minutes: Sequence[Minute], name: str) -> float:
    return float(median(getattr(each, name) for minute in minutes for each in minute.readings))


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


@pytest.mark.soak
async def test_ten_minutes_leave_nothing_and_nothing_grows(tmp_path: Path) -> None:
    """The last two minutes are as minutes two to four: within 3 % in memory, 1.5 times in p95."""
    with started(SERVE, tmp_path, **SETTINGS) as served:
        clients = Clients(served.url)
        await clients.learn()
        before = await settled(served.url)
        async with clients.connected() as client:
            soak = Soak(clients, client, random.Random(7))
            minutes = [await soak.minute(MEASURING_S, ASKING_S) for _ in range(MINUTES)]
        after = await settled(served.url, before.tasks)
        assert '"level":"error"' not in served.log.read_text()
    late, early = minutes[LATE], minutes[EARLY]
    names = ("resident_bytes", "active_bytes")
    growth = {name: memory(late, name) / memory(early, name) for name in names}
    drift = p95(late) / p95(early)
    rates = [f"{minute.capacity:.1f}/s, {len(minute.seconds)} asked" for minute in minutes]
    print(*rates, growth, drift, *before.told(after), sep="\n")
    assert not any(after.work.values()), after.work
    assert after.tasks <= before.tasks
    assert max(growth.values()) <= MOST_GROWTH, growth
    assert drift <= MOST_DRIFT
