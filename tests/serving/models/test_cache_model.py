"""The model cache under everything that callers and operators do, at random, in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from gateway import clock
from gateway.errors import GatewayError, ModelLoadFailed, Overloaded
from gateway.registry import Catalog, ChatSpec, ModelSpec
from gateway.serving.budget import Budget
from gateway.serving.models.cache import Loaded, ModelCache, Prepared
from gateway.serving.models.entry import MOVES, Entry, State
from gateway.serving.models.served import Served
from tests.fakes import caller
from tests.serving.models.harness import adapter, spec
from tests.virtual_time import VirtualLoop

SIZES = {"a": 30, "b": 40, "c": 50, "d": 90}
ADAPTERS = {"a1": ("a", 3), "a2": ("a", 8), "b1": ("b", 15), "d1": ("d", 9)}  # base and size
LIMIT = 100
WAIT_S = 20.0
LONGEST_S = 90.0  # the longest lease: longer than a newcomer waits


class World:
    """A cache of models that take their time, and those who act on it."""

    def __init__(self, chance: random.Random, adapters: Mapping[str, tuple[str, int]]) -> None:
        self.chance = chance
        self.adapters = adapters
        self.sizes = {**SIZES, **{name: size for name, (_, size) in adapters.items()}}
        self.budget = Budget(LIMIT)
        self.served = Served(self.drawn())
        self.places = chance.choice([1, 2, 3])
        self.kept_waiting: list[str] = []
        self.uses = 0
        self.inside = 0
        self.rows_bytes = 0
        self.held = 0
        self.seen: dict[Entry[str], State] = {}
        self.models: ModelCache[str] = ModelCache(
            self,
            self.served,
            self.budget,
            max_models=self.places,
            load_wait_s=WAIT_S,
            ttl_s=chance.choice([None, 5.0, 60.0]),
            queue_limit=50,
        )

    def drawn(self) -> Catalog:
        """Draw how models are kept, and whether they load otherwise than before."""
        given = [name for name in SIZES if self.chance.random() < 0.95] or ["a"]
        whole = {
            name: spec(
                name,
                pinned=self.chance.random() < 0.08,
                max_context=self.chance.choice([100, 100, 100, 101]),
                queue_limit=self.chance.choice([None, None, 9]),
            )
            for name in given
        }
        adapted = [
            adapter(name, base, self.chance.choice(["x", "x", "x", "y"]))
            for name, (base_name, _) in self.adapters.items()
            if isinstance(base := whole.get(base_name), ChatSpec)
        ]
        return Catalog([*whole.values(), *adapted])

    async def prepare(self, spec: ModelSpec, base: str | None = None) -> Prepared[str]:
        await asyncio.sleep(self.chance.choice([0, 0, 2.0, 30.0]))
        return Prepared(self.sizes[spec.id], lambda: self.opened(spec))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return None

    @asynccontextmanager
    async def opened(self, spec: ModelSpec) -> AsyncIterator[Loaded[str]]:
        await asyncio.sleep(self.chance.uniform(0, 5))
        if self.chance.random() < 0.03:
            raise ModelLoadFailed(spec.id, "bad luck")
        self.held += self.sizes[spec.id]
        assert self.held <= LIMIT
        try:
            yield Loaded(spec.id, self.sizes[spec.id])
        finally:
            await asyncio.sleep(self.chance.choice([0, 0, 0.5]))
            self.held -= self.sizes[spec.id]

    def is_healthy(self, wanted: ModelSpec) -> bool:
        """Tell whether a model is loaded, with its base if it is an adapter, and takes callers."""
        return any(
            entry.spec is wanted
            and entry.state is State.READY
            and (entry.base is None or self.is_healthy(entry.base.spec))
            for entry in self.models.entries
        )

    async def ask(self, wanted: ModelSpec, seconds: float) -> None:
        is_healthy, began = self.is_healthy(wanted), clock.now()
        try:
            async with self.models.lease(wanted, caller()) as model:
                if is_healthy and clock.now() - began > 0.001:
                    self.kept_waiting.append(wanted.id)
                assert model == wanted.id
                self.uses += 1
                self.inside += 1
                try:
                    await asyncio.sleep(seconds)
                finally:
                    self.inside -= 1
        except Overloaded:
            pass
        except GatewayError:
            if is_healthy:
                self.kept_waiting.append(wanted.id)

    async def rows(self) -> None:
        """Hold memory as the rows of a running model may."""
        nbytes = self.chance.randrange(1, 30)
        share = self.budget.share()
        if nbytes <= self.budget.spare_bytes:
            share.resize(nbytes)
            self.rows_bytes += nbytes
            await asyncio.sleep(self.chance.uniform(0, LONGEST_S))
            self.rows_bytes -= nbytes
        elif not self.budget.claimed_bytes:
            self.budget.evict_idle(nbytes, is_pressing=self.chance.random() < 0.3)
        share.release()

    async def act(self) -> None:
        """Do one thing that a client, a batcher or an operator may do."""
        wanted = self.chance.choice(self.served.catalog.specs)
        match self.chance.randrange(40):
            case 0:
                await self.models.unload(wanted)
            case 1:
                self.served.replace(self.drawn())
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

    def check(self) -> None:
        """Assert everything that is true whenever nobody is in the middle of a change."""
        entries = self.models.entries
        for entry, before in self.seen.items():
            after = entry.state if entry in entries else State.GONE
            assert after in _reachable(before), f"{before} → {after}"
            assert entry.state is after
        self.seen = {entry: entry.state for entry in entries}
        assert State.GONE not in self.seen.values()
        assert not [entry for entry in entries if entry.leases and entry.is_leaving]
        assert all(entry.is_loaded for entry in entries if entry.state is State.READY)
        current = [
            each.spec for each in entries if each.is_open and each.spec in self.served.catalog.specs
        ]
        assert len(current) == len({spec.id for spec in current}), "one copy is open"
        holding = [entry for entry in entries if entry.share is not None]
        held = sum(entry.nbytes for entry in holding)
        assert self.held <= held
        assert self.budget.free_bytes == LIMIT - self.rows_bytes - held >= 0
        assert sum(entry.base is None for entry in holding) <= self.places

    async def live(self) -> None:
        """Act for an hour or so; nobody waits for longer than leases last, a few times over."""
        async with self.models:
            async with asyncio.timeout(3 * 3600), asyncio.TaskGroup() as group:
                for _ in range(300):
                    group.create_task(self.act())
                    self.check()
                    await asyncio.sleep(self.chance.expovariate(self.chance.choice([0.05, 1.0, 5])))
            while any(entry.state is State.LOADING for entry in self.models.entries):
                await asyncio.sleep(1)  # an adapter holds its base while it loads
            assert all(entry.leases == 0 for entry in self.models.entries)
            assert self.budget.claimed_bytes == 0
        assert self.models.entries == ()
        assert self.budget.free_bytes == LIMIT
        assert self.held == 0


@pytest.mark.parametrize("adapters", [{}, ADAPTERS], ids=["whole", "adapted"])
@pytest.mark.parametrize("seed", range(10))
def test_nobody_waits_for_a_loaded_model_for_another_s_sake(
    seed: int, adapters: dict[str, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may ask, hang up or be refused. Every waiter ends, and bytes balance to zero."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        monkeypatch.setattr(clock, "now", runner.get_loop().time)
        world = World(random.Random(seed), adapters)
        runner.run(world.live())
    assert world.kept_waiting == []
    assert world.uses > 50


def _reachable(state: State) -> set[State]:
    """Return the states that legal moves lead to, the one itself included."""
    states = {state}
    for after in MOVES[state]:
        states |= _reachable(after)
    return states
