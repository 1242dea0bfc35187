"""The model cache under everything that callers and operators do, at random, in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway import clock
from gateway.errors import GatewayError, ModelLoadFailed, Overloaded
from gateway.registry import Catalog, ChatSpec, ModelSpec
from gateway.serving.budget import Budget, Share
from gateway.serving.models.cache import Loaded, ModelCache, Prepared
from gateway.serving.models.entry import MOVES, Entry, State
from tests.fakes import caller
from tests.serving.models.harness import adapter, spec
from tests.virtual_time import VirtualLoop

SIZES = {"a": 30, "b": 40, "c": 50, "d": 90}
ADAPTERS = {"a1": ("a", 3), "a2": ("a", 8), "b1": ("b", 15), "d1": ("d", 9)}  # base and size
LIMIT = 100
WAIT_S = 20.0
LONGEST_S = 90.0  # of a lease: longer than a newcomer waits


class World:
    """A cache of models that take their time, and those who act on it."""

    def __init__(self, chance: random.Random, adapters: Mapping[str, tuple[str, int]]) -> None:
        self.chance = chance
        self.adapters = adapters
        self.sizes = {**SIZES, **{name: size for name, (_, size) in adapters.items()}}
        self.budget = Budget(LIMIT)
        self.catalog = self.drawn()
        self.places = chance.choice([1, 2, 3])
        self.kept_waiting: list[str] = []
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
                self.served += 1
                await asyncio.sleep(seconds)
        except Overloaded:
            pass
        except GatewayError:
            if is_healthy:
                self.kept_waiting.append(wanted.id)

    async def rows(self) -> None:
        """Hold what rows of a running model may."""
        nbytes = self.chance.randrange(1, 30)
        share = self.budget.share()
        if nbytes <= self.budget.spare_bytes:
            share.resize(nbytes)
            await asyncio.sleep(self.chance.uniform(0, LONGEST_S))
        elif not self.budget.claimed_bytes:
            self.budget.evict_idle(nbytes, is_pressing=self.chance.random() < 0.3)
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
    """Whoever else asks, hangs up or is refused. Every waiter ends, and bytes balance to zero."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        monkeypatch.setattr(clock, "now", runner.get_loop().time)
        world = World(random.Random(seed), adapters)
        runner.run(world.live())
    assert world.kept_waiting == []
    assert world.served > 50


NAMES = st.sampled_from(sorted(SIZES))


class StateMachine(RuleBasedStateMachine):
    """A cache whose callers, operators, loads and rows act in any order, a step at a time.

    Beside it stands what must be true: who is inside, and which state each entry was in last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(clock, "now", self.runner.get_loop().time)
        self.budget = Budget(LIMIT)
        self.catalog = Catalog(spec(name) for name in SIZES)
        self.failing: set[str] = set()
        self.asking: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []
        self.operators: list[asyncio.Task[None]] = []
        self.rows: list[Share] = []
        self.inside = 0
        self.held = 0
        self.loading = asyncio.Event()
        self.seen: dict[Entry[str], State] = {}
        self.models: ModelCache[str] = ModelCache(
            self, lambda: self.catalog, self.budget, max_models=2, load_wait_s=WAIT_S, ttl_s=60.0
        )

    async def prepare(self, spec: ModelSpec, base: str | None = None) -> Prepared[str]:
        await asyncio.sleep(1)
        return Prepared(SIZES[spec.id], lambda: self.opened(spec))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return None

    @asynccontextmanager
    async def opened(self, spec: ModelSpec) -> AsyncIterator[Loaded[str]]:
        await asyncio.sleep(2)
        if spec.id in self.failing:
            raise ModelLoadFailed(spec.id, "bad luck")
        self.held += SIZES[spec.id]
        try:
            yield Loaded(spec.id, SIZES[spec.id])
        finally:
            await asyncio.sleep(1)
            self.held -= SIZES[spec.id]

    def settle(self, act: Callable[[], object] = lambda: None) -> None:
        """Act, and run everything that waits for nothing but its turn on the loop."""

        async def rounds() -> None:
            act()
            for _ in range(20):
                await asyncio.sleep(0)

        self.runner.run(rounds())

    async def use(self, name: str, release: asyncio.Event) -> None:
        with contextlib.suppress(GatewayError):
            async with self.models.lease(spec(name), caller()) as model:
                assert model == name
                self.inside += 1
                try:
                    await release.wait()
                finally:
                    self.inside -= 1

    def operate(self, action: Any) -> None:
        async def run() -> None:
            with contextlib.suppress(GatewayError):
                await action

        self.operators.append(self.runner.get_loop().create_task(run()))
        self.settle()

    @rule(name=NAMES, seconds=st.sampled_from([0.0, 4.0, 90.0]))
    def lease(self, name: str, seconds: float) -> None:
        """Ask for a model, and often wait until it is served, or longer than it may idle. One that
        is loaded has its callers at once.
        """
        is_ready = self.models.states().get(name) == "loaded" and any(
            entry.spec.id == name and entry.state is State.READY for entry in self.models.entries
        )
        inside = self.inside
        release = asyncio.Event()
        task = self.runner.get_loop().create_task(self.use(name, release))
        self.asking.append((name, task, release))
        if is_ready and self.catalog.by_id(name) == spec(name):
            self.settle()
            assert self.inside == inside + 1
        self.runner.run(asyncio.sleep(seconds))
        self.settle()

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), hangs_up=st.booleans())
    def end_a_lease(self, data: st.DataObject, hangs_up: bool) -> None:
        """The caller is done, if it is inside; or it hangs up, wherever it is."""
        at = data.draw(st.integers(0, len(self.asking) - 1))
        _, task, release = self.asking.pop(at)
        release.set()
        if hangs_up:
            task.cancel()
        self.settle()

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        self.operate(self.models.load(spec(name)))

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        self.operate(self.models.unload(spec(name)))

    @rule(names=st.sets(NAMES, min_size=1), pinned=st.sets(NAMES, max_size=1))
    def reload(self, names: set[str], pinned: set[str]) -> None:
        self.catalog = Catalog(spec(name, pinned=name in pinned) for name in sorted(names))
        self.settle(self.models.reconsider)

    @rule(names=st.sets(NAMES, max_size=2))
    def fail(self, names: set[str]) -> None:
        """From now on the loads of these models fail."""
        self.failing = names

    @rule(nbytes=st.integers(1, 60), is_pressing=st.booleans())
    def take_memory(self, nbytes: int, is_pressing: bool) -> None:
        """Rows want bytes: idle models may have to leave."""
        if nbytes > self.budget.spare_bytes:
            self.settle(lambda: self.budget.evict_idle(nbytes, is_pressing=is_pressing))
        else:
            self.rows.append(share := self.budget.share())
            self.settle(lambda: share.resize(nbytes))

    @precondition(lambda self: self.rows)
    @rule()
    def give_memory_back(self) -> None:
        self.settle(self.rows.pop().release)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 30.0, 120.0]))
    def wait(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))
        self.settle()

    @invariant()
    def every_change_of_state_is_legal(self) -> None:
        entries = self.models.entries
        for entry, before in self.seen.items():
            after = entry.state if entry in entries else State.GONE
            assert after in _reachable(before), f"{before} → {after}"
            assert entry.state is after
        self.seen = {entry: entry.state for entry in entries}
        assert State.GONE not in self.seen.values()

    @invariant()
    def each_lease_is_counted_and_keeps_its_model(self) -> None:
        loaded = [entry for entry in self.models.entries if entry.is_loaded]
        assert sum(entry.leases for entry in loaded) == self.inside
        for entry in self.models.entries:
            if entry.leases:
                assert not entry.is_leaving
            if entry.state is State.READY:
                assert entry.is_loaded

    @invariant()
    def no_more_is_held_than_there_is(self) -> None:
        holding = [entry for entry in self.models.entries if entry.share is not None]
        rows = sum(share.nbytes for share in self.rows)
        assert self.budget.free_bytes == LIMIT - rows - sum(entry.nbytes for entry in holding)
        assert self.budget.free_bytes >= 0
        assert len(holding) <= 2
        assert self.held <= sum(entry.nbytes for entry in holding)

    @invariant()
    def one_copy_of_a_model_is_open(self) -> None:
        names = [entry.spec.id for entry in self.models.entries if entry.is_open]
        assert len(names) == len(set(names))

    def teardown(self) -> None:
        """Shutdown ends every caller and frees every byte."""

        async def close() -> None:
            async with self.models:
                pass
            for _, _, release in self.asking:
                release.set()
            everyone = [*self.operators, *(task for _, task, _ in self.asking)]
            await asyncio.gather(*everyone, return_exceptions=True)

        try:
            self.runner.run(close())
            while self.rows:
                self.give_memory_back()
            assert self.models.entries == ()
            assert (self.inside, self.held, self.budget.free_bytes) == (0, 0, LIMIT)
        finally:
            self.runner.close()
            self.patch.undo()


def _reachable(state: State) -> set[State]:
    """Return the states that legal moves lead to, the one itself included."""
    states = {state}
    for after in MOVES[state]:
        states |= _reachable(after)
    return states


TestStates = StateMachine.TestCase
TestStates.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
