"""Clients who leave at any moment, among others who stay: nothing is left of the ones, and nothing
is changed for the others.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tests.processes import DEMO, command, started
from tests.provoked.harness import unread
from tests.provoked.load import Clients, mixed
from tests.provoked.readings import Reading, reading, settled

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

AT_ONCE = 24
LEAVING = 0.3
MOST_GROWTH = 1.05
SERVE = command("serve", "--models", str(DEMO))


async def stormed(clients: Clients, requests: int, choose: random.Random) -> None:
    """Make this number of requests, some clients at once.

    Those who stay get the answers they get alone.
    """
    asks = mixed(choose)
    left = requests
    wrong: list[str] = []

    async def ask() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            if choose.random() < LEAVING:
                await clients.leave(next(asks), choose)
            elif said := await clients.stay(client, next(asks)):
                wrong.append(said)

    async with clients.connected() as client:
        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    assert not wrong, wrong


async def provoked(folder: Path, *, first: int = 0, then: int) -> tuple[Reading, Reading]:
    """Give the gateway's readings after `first` requests, and after `then` more."""
    choose = random.Random(then)
    with started(SERVE, folder) as served:
        clients = Clients(served.url)
        await clients.learn()
        await stormed(clients, first, choose)
        before = await settled(served.url)
        await stormed(clients, then, choose)
        after = await settled(served.url, before.tasks)
        assert '"level":"error"' not in served.log.read_text()
    print(f"{then} requests:", "\n".join(before.told(after)), sep="\n")
    assert not any(after.work.values()), after.work
    assert after.tasks <= before.tasks
    assert after.cancelled > before.cancelled
    return before, after


async def test_of_sixty_requests_nothing_is_left(tmp_path: Path) -> None:
    """No row, ticket, lease, place in a queue or task, though three in ten clients left."""
    await provoked(tmp_path, then=60)


@pytest.mark.soak
async def test_of_two_thousand_requests_nothing_is_left(tmp_path: Path) -> None:
    """Memory is within 5 % of its size once all kinds had been asked for."""
    before, after = await provoked(tmp_path, first=400, then=2000)
    for name in ("resident_bytes", "active_bytes", "held_bytes"):
        assert getattr(after, name) <= MOST_GROWTH * getattr(before, name), name


async def test_a_connection_that_its_client_has_closed_is_gone(tmp_path: Path) -> None:
    """Its tasks and its descriptor go long before the keep-alive time is over.

    A connection that its client no longer reads goes as well, though the client keeps its end open.
    """
    body = {"model": "all-minilm-l6-v2", "input": ["x"] * 1500}
    with started(SERVE, tmp_path, GATEWAY_SEND_TIMEOUT_S="0.3") as served:
        clients = Clients(served.url)
        before = await settled(served.url)
        for _ in range(40):
            async with clients.connected() as client:
                await reading(client)
        closed = await settled(served.url, before.tasks)
        with unread(served.url, body):
            async with asyncio.timeout(60):
                while '"status":499' not in served.log.read_text():
                    await asyncio.sleep(0.1)
            stalled = await settled(served.url, before.tasks)
    for after in (closed, stalled):
        assert after.tasks <= before.tasks
        assert after.descriptors <= before.descriptors
