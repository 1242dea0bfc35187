"""The model cache under everything that callers and operators do, at random, in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway import metrics
from gateway.errors import (
    GatewayError,
    InsufficientMemory,
    ModelLoadFailed,
    Overloaded,
)
from gateway.registry import Catalog, ModelSpec
from gateway.serving.budget import Budget
from gateway.serving.models.cache import Loaded, ModelCache, Prepared
from gateway.serving.models.entry import State
from tests.fakes import caller
from tests.serving.models.test_cache import spec

SIZES = {"a": 30, "b": 40, "c": 50, "d": 90}
LIMIT = 100
WAIT_S = 20.0
LONGEST_S = 90.0  # of a lease: longer than a newcomer waits
FAIR = (InsufficientMemory, ModelLoadFailed, Overloaded)  # whatever others ask for


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nobody waits for a timer: when all wait, it is later."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready: Any = self.__dict__["_ready"]
        scheduled: Any = self.__dict__["_scheduled"]
        coming = [each.when() for each in scheduled if not each.cancelled()]
        assert ready or coming, "everything waits, and nothing will happen"
        if not ready:
            self._now = max(self._now, min(coming))
        super()._run_once()  # type: ignore[misc]


class World:
    """A cache of models that take their time, and those who act on it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.budget = Budget(LIMIT)
        self.catalog = self.drawn()
        self.places = chance.choice([1, 2, 3])
        self.refused_healthy: list[GatewayError] = []
        self.served = 0
        self.held = 0
        self.models: ModelCache[str] = ModelCache(
            self,
            lambda: self.catalog,
            self.budget,
            max_models=self.places,
            load_wait_s=WAIT_S,
            ttl_s=chance.choice([None, 5.0, 60.0]),
            queue_limit=50,
        )

    def drawn(self) -> Catalog:
        """Draw how models are kept, and whether they load otherwise than before."""
        given = [name for name in SIZES if self.chance.random() < 0.95] or ["a"]
        return Catalog(
            spec(
                name,
                pinned=self.chance.random() < 0.08,
                max_context=self.chance.choice([100, 100, 100, 101]),
                queue_limit=self.chance.choice([None, None, 9]),
            )
            for name in given
        )

    async def prepared(self, spec: ModelSpec) -> Prepared[str]:
        await asyncio.sleep(self.chance.choice([0, 0, 2.0]))
        return Prepared(SIZES[spec.id], lambda: self.opened(spec))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return None

    @asynccontextmanager
    async def opened(self, spec: ModelSpec) -> AsyncIterator[Loaded[str]]:
        await asyncio.sleep(self.chance.uniform(0, 5))
        if self.chance.random() < 0.03:
            raise ModelLoadFailed(spec.id, "bad luck")
        self.held += SIZES[spec.id]
        assert self.held <= LIMIT
        try:
            yield Loaded(spec.id, SIZES[spec.id])
        finally:
            await asyncio.sleep(self.chance.choice([0, 0, 0.5]))
            self.held -= SIZES[spec.id]

    def is_healthy(self, wanted: ModelSpec) -> bool:
        """Tell whether a model is loaded, and takes callers."""
        return any(
            entry.spec is wanted and entry.state in (State.READY, State.YIELDING)
            for entry in self.models.entries
        )

    async def ask(self, wanted: ModelSpec, seconds: float) -> None:
        is_healthy = self.is_healthy(wanted)
        try:
            async with self.models.lease(wanted, caller()) as model:
                assert model == wanted.id
                self.served += 1
                await asyncio.sleep(seconds)
        except FAIR:
            pass
        except GatewayError as error:
            if is_healthy:
                self.refused_healthy.append(error)

    async def rows(self) -> None:
        """Hold what rows of a running model may."""
        nbytes = self.chance.randrange(1, 30)
        share = self.budget.share()
        if nbytes <= self.budget.spare_bytes:
            share.state(nbytes)
            await asyncio.sleep(self.chance.uniform(0, LONGEST_S))
        elif not self.budget.claimed_bytes:
            self.models.room.clear(nbytes, self.chance.random() < 0.3)
        share.release()

    async def act(self) -> None:
        """Do one thing that a client, a batcher or an operator may do."""
        wanted = self.chance.choice(self.catalog.specs)
        match self.chance.randrange(40):
            case 0:
                await self.models.unload(wanted)
            case 1:
                self.catalog = self.drawn()
                self.models.reconsider()
            case 2:
                with contextlib.suppress(GatewayError):
                    await self.models.load(wanted)
            case 3 | 4 | 5:
                await self.rows()
            case _:
                longest = self.chance.choice([0.1, 3.0, 3.0, LONGEST_S])
                asking = asyncio.create_task(self.ask(wanted, self.chance.uniform(0, longest)))
                if self.chance.random() < 0.3:
                    await asyncio.sleep(self.chance.choice([0, 0, 0.1, 5.0, 30.0]))
                    asking.cancel()
                await asyncio.wait([asking])
                if not asking.cancelled():
                    asking.result()

    async def live(self) -> None:
        """Act for an hour or so; nobody waits for longer than leases last, a few times over."""
        async with self.models:
            async with asyncio.timeout(3 * 3600), asyncio.TaskGroup() as group:
                for _ in range(300):
                    group.create_task(self.act())
                    await asyncio.sleep(self.chance.expovariate(self.chance.choice([0.05, 1.0, 5])))
            assert all(entry.leases == entry.asked == 0 for entry in self.models.entries)
            assert self.budget.claimed_bytes == 0
        assert self.models.entries == ()
        assert self.budget.free_bytes == LIMIT
        assert self.held == 0


@pytest.mark.parametrize("seed", range(40))
def test_nobody_is_refused_a_loaded_model_for_another_s_sake(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else asks, hangs up or is refused; every waiter ends, and bytes balance to zero."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        monkeypatch.setattr(metrics, "now", runner.get_loop().time)
        world = World(random.Random(seed))
        runner.run(world.live())
    assert world.refused_healthy == []
    assert world.served > 50
