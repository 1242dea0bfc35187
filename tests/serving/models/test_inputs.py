"""Looks at models' files: one at a time, and none that began too early counts."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gateway.registry import ChatSpec, Inputs, ModelSpec, PathSource
from gateway.serving.models import inputs
from gateway.serving.models.inputs import KnownInputs
from tests.waiting import until

pytestmark = pytest.mark.anyio
SPEC = ChatSpec(id="m", kind="chat", source=PathSource(Path()))


class Disk:
    """Holds each look until it is let go; says what was there when the look began."""

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
    known = KnownInputs(disk.read)
    early = asyncio.create_task(known.look([SPEC]))
    await until(lambda: disk.looks)
    disk.there = Inputs(7)
    late = asyncio.create_task(known.look([SPEC]))
    disk.looks[0].set()
    await early
    assert known.of(SPEC) is None
    await until(lambda: len(disk.looks) == 2)
    disk.looks[1].set()
    await late
    assert known.of(SPEC) == Inputs(7)


async def test_a_disk_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask, and if their clients leave."""
    monkeypatch.setattr(inputs, "LOOK_S", 0.01)
    disk = Disk()
    known = KnownInputs(disk.read)
    await asyncio.gather(*(known.look([SPEC]) for _ in range(3)))
    left = asyncio.create_task(known.look([SPEC]))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    assert len(disk.looks) == 1
    assert known.of(SPEC) is None
    disk.looks[0].set()
    monkeypatch.setattr(inputs, "LOOK_S", 20)
    disk.there = Inputs(7)
    looking = asyncio.create_task(known.look([SPEC]))
    await until(lambda: len(disk.looks) == 2)
    disk.looks[1].set()
    await looking
    assert known.of(SPEC) == Inputs(7)
