"""Looks at models' files: one at a time, and none that began too early counts."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gateway.registry import Catalog, ChatSpec, Inputs, ModelSpec, PathSource
from gateway.serving.models import served
from gateway.serving.models.served import KnownInputs, Served
from tests.waiting import until

pytestmark = pytest.mark.anyio
SPEC = ChatSpec(id="m", kind="chat", source=PathSource(Path()))
SERVED = Served(Catalog([SPEC]))


@pytest.mark.parametrize("name", ["org/one", "hub:org/one"])
def test_a_name_of_models_yaml_wins_over_what_callers_named(name: str) -> None:
    own, again, other = (
        ChatSpec(id=each, kind="chat", source=PathSource(Path())) for each in (name, "org/one", "x")
    )
    served = Served(Catalog([own]))
    served.named = {each.id: each for each in (again, other)}
    served.publish()
    assert served.catalog.specs == (own, other)


class Disk:
    """Holds each look until it is let go; reports the files as they were when the look began."""

    def __init__(self) -> None:
        self.there: Inputs | None = None
        self.looks: list[asyncio.Event] = []

    async def read(self, specs: Sequence[ModelSpec]) -> Mapping[str, Inputs | None]:
        found = {spec.id: self.there for spec in specs}
        self.looks.append(asyncio.Event())
        await self.looks[-1].wait()
        return found


async def test_a_look_that_began_before_files_came_is_not_what_a_later_asker_gets() -> None:
    disk = Disk()
    known = KnownInputs(SERVED, disk.read)
    early = asyncio.create_task(known.look())
    await until(lambda: disk.looks)
    disk.there = Inputs(7)
    late = asyncio.create_task(known.look())
    disk.looks[0].set()
    await early
    assert known.of(SPEC) is None
    await until(lambda: len(disk.looks) == 2)
    disk.looks[1].set()
    await late
    assert known.of(SPEC) == Inputs(7)


async def test_a_disk_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask, and if their clients leave."""
    monkeypatch.setattr(served, "LOOK_S", 0.01)
    disk = Disk()
    known = KnownInputs(SERVED, disk.read)
    await asyncio.gather(*(known.look() for _ in range(3)))
    left = asyncio.create_task(known.look())
    for _ in range(5):  # it waits for the look by then
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    assert len(disk.looks) == 1
    assert known.of(SPEC) is None
    disk.looks[0].set()
    await until(lambda: len(disk.looks) == 2)  # one look for all who came meanwhile
    disk.looks[1].set()
    monkeypatch.setattr(served, "LOOK_S", 20)
    disk.there = Inputs(7)
    looking = asyncio.create_task(known.look())
    await until(lambda: len(disk.looks) == 3)
    disk.looks[2].set()
    await looking
    assert known.of(SPEC) == Inputs(7)


async def test_a_look_that_takes_too_long_counts_once_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "LOOK_S", 0.01)
    disk = Disk()
    disk.there = Inputs(7)
    known = KnownInputs(SERVED, disk.read)
    await known.look()
    assert known.of(SPEC) is None
    disk.looks[0].set()
    await until(lambda: known.of(SPEC) == Inputs(7))


async def test_all_who_ask_during_a_look_share_the_next_one() -> None:
    disk = Disk()
    known = KnownInputs(SERVED, disk.read)
    first = asyncio.create_task(known.look())
    await until(lambda: disk.looks)
    disk.there = Inputs(7)
    waiting = [asyncio.create_task(known.look()) for _ in range(9)]
    await asyncio.sleep(0)
    disk.looks[0].set()
    await until(lambda: len(disk.looks) == 2)
    disk.looks[1].set()
    await asyncio.gather(first, *waiting)
    assert len(disk.looks) == 2
    assert known.of(SPEC) == Inputs(7)
