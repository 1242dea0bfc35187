"""A busy model and a newcomer that has no room beside it: whose callers wait, and for how long."""

import asyncio

import pytest

from gateway.errors import NoRoom, Overloaded, Unavailable
from gateway.registry import Catalog
from gateway.serving.budget import Budget
from gateway.serving.models.cache import ModelCache
from gateway.serving.models.entry import MOVES, State
from tests.fakes import caller
from tests.serving.models.test_cache import Shelf, cache, spec

pytestmark = pytest.mark.anyio


class Users:
    """Callers of one model, each for as long as the test says."""

    def __init__(self, models: ModelCache[str], name: str) -> None:
        self._models = models
        self._name = name
        self._enough = asyncio.Event()
        self.inside = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self) -> asyncio.Task[None]:
        """Ask once more."""
        self.tasks.append(asyncio.create_task(self._use()))
        await asyncio.sleep(0.01)
        return self.tasks[-1]

    def go(self) -> None:
        """Have those inside leave; those who come later stay until the next time."""
        self._enough.set()
        self._enough = asyncio.Event()

    async def _use(self) -> None:
        async with self._models.lease(spec(self._name), caller()) as model:
            assert model == self._name
            self.inside += 1
            try:
                await self._enough.wait()
            finally:
                self.inside -= 1


def state(models: ModelCache[str], name: str) -> State:
    [entry] = [entry for entry in models.entries if entry.spec.id == name]
    return entry.state


async def test_callers_of_a_yielding_model_wait_and_no_second_copy_is_begun() -> None:
    """The newcomer is served when the leases before it have ended, and they after it."""
    shelf = Shelf()
    async with cache(shelf, max_models=1) as models, asyncio.timeout(10):
        busy, other = Users(models, "a"), Users(models, "b")
        await busy.come()
        newcomer = await other.come()
        late = await busy.come()
        assert (state(models, "a"), busy.inside, shelf.loads) == (State.YIELDING, 1, ["a"])
        busy.go()
        while not other.inside:
            await asyncio.sleep(0.001)
        assert (busy.inside, shelf.loads) == (0, ["a", "b"])
        other.go()
        await newcomer
        while not busy.inside:
            await asyncio.sleep(0.001)
        busy.go()
        await late
    assert shelf.loads == ["a", "b", "a"]


async def test_when_the_asker_hangs_up_the_busy_models_callers_are_let_in() -> None:
    """At once: nobody waits for its room any more."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=60) as models, asyncio.timeout(10):
        busy, other = Users(models, "a"), Users(models, "b")
        await busy.come()
        newcomer = await other.come()
        await busy.come()
        assert busy.inside == 1
        newcomer.cancel()
        while busy.inside < 2:
            await asyncio.sleep(0.001)
        assert state(models, "a") is State.READY
        await busy.come()
        assert busy.inside == 3
        busy.go()
        await asyncio.gather(*busy.tasks)
        assert shelf.loads[0] == "a"


async def test_no_caller_of_a_busy_model_is_refused_for_a_newcomer_s_sake() -> None:
    """The newcomer is, whose leases outlast its patience; after that they are left in peace."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=1) as models, asyncio.timeout(10):
        busy, other = Users(models, "a"), Users(models, "b")
        await busy.come()
        newcomer = await other.come()
        late = [await busy.come() for _ in range(5)]
        assert busy.inside == 1
        with pytest.raises(NoRoom):
            await newcomer
        await asyncio.sleep(0.01)
        assert busy.inside == 6
        again = await other.come()
        late.append(await busy.come())
        assert (busy.inside, state(models, "a")) == (7, State.READY), "left in peace for a while"
        with pytest.raises(NoRoom):
            await again
        busy.go()
        await asyncio.gather(*late)
    assert shelf.loads == ["a"]


async def test_one_that_is_refused_again_and_again_has_its_turn_in_the_end() -> None:
    """Though the leases before it last ten times as long as it waits at first."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=0.05) as models, asyncio.timeout(20):
        stop = asyncio.Event()

        async def keep_busy(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            while not stop.is_set():
                async with models.lease(spec("a"), caller()):
                    await asyncio.sleep(0.5)

        busy = [asyncio.create_task(keep_busy(0.1 * n)) for n in range(5)]
        await asyncio.sleep(0.3)
        refused = 0
        while "b" not in shelf.loads:
            try:
                async with models.lease(spec("b"), caller()):
                    pass
            except NoRoom:
                refused += 1
        stop.set()
        await asyncio.gather(*busy)
    assert refused >= 1


async def test_callers_who_were_made_to_wait_wait_for_the_newcomer_however_long_it_takes() -> None:
    """A 503 would be for another's sake: they wait as long as they would for an answer."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=0.4) as models, asyncio.timeout(10):
        busy, other = Users(models, "a"), Users(models, "b")
        await busy.come()
        newcomer = await other.come()
        late = await busy.come()
        busy.go()
        await asyncio.sleep(1)
        assert (other.inside, late.done()) == (1, False)
        other.go()
        await newcomer
        while not busy.inside:
            await asyncio.sleep(0.001)
        busy.go()
        await late


async def test_where_callers_who_wait_leave_their_model_is_not_waited_for() -> None:
    """The copy that they asked for gives its place in the line back."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=0.3) as models, asyncio.timeout(10):
        busy, other = Users(models, "a"), Users(models, "b")
        await busy.come()
        await other.come()
        late = await busy.come()
        busy.go()
        while not other.inside:
            await asyncio.sleep(0.001)
        late.cancel()
        while [entry.spec.id for entry in models.entries] != ["b"]:
            await asyncio.sleep(0.001)
        await other.come()
        assert other.inside == 2
        other.go()


async def test_two_idle_models_that_together_are_too_small_stay() -> None:
    """The third needs more than they have: the rest is in use for longer than it waits."""
    shelf = Shelf()
    shelf.sizes = {"a": 10, "b": 10, "c": 50, "d": 60}
    async with cache(shelf, max_models=9, max_bytes=75, load_wait_s=0.1) as models:
        holding = Users(models, "c")
        await holding.come()
        for name in "ab":
            async with models.lease(spec(name)):
                pass
        with pytest.raises(NoRoom):
            async with models.lease(spec("d")):
                pass
        assert shelf.open == ["c", "a", "b"]
        holding.go()
    assert shelf.loads == ["c", "a", "b"]


async def test_a_model_that_waits_for_bytes_has_those_that_rows_give_back() -> None:
    """New rows leave them alone; the model whose rows they are keeps its callers."""
    shelf = Shelf()
    budget = Budget(100)
    shelf.sizes = {"a": 40, "b": 30}
    async with ModelCache(
        shelf, lambda: shelf.catalog, budget, max_models=2, load_wait_s=5
    ) as models:
        busy = Users(models, "a")
        await busy.come()
        rows = budget.share()
        rows.resize(50)
        newcomer = await Users(models, "b").come()
        assert (budget.free_bytes, budget.spare_bytes) == (10, -20)
        await busy.come()
        assert (busy.inside, state(models, "a")) == (2, State.READY)
        rows.resize(20)
        await asyncio.sleep(0.01)
        assert (sorted(shelf.open), budget.claimed_bytes) == (["a", "b"], 0)
        rows.release()
        newcomer.cancel()
        busy.go()


async def test_rows_are_held_back_for_no_longer_than_a_model_waits() -> None:
    """Then they have peace: one stray request after another must not keep them out."""
    shelf = Shelf()
    budget = Budget(100)
    shelf.sizes = {"a": 40, "b": 30}
    async with ModelCache(
        shelf, lambda: shelf.catalog, budget, max_models=2, load_wait_s=0.1
    ) as models:
        busy, other = Users(models, "a"), Users(models, "b")
        await busy.come()
        rows = budget.share()
        rows.resize(50)
        newcomer = await other.come()
        assert budget.claimed_bytes == 30
        with pytest.raises(NoRoom):
            await newcomer
        assert budget.claimed_bytes == 0
        again = await other.come()
        assert budget.claimed_bytes == 0
        rows.release()
        busy.go()
        await asyncio.sleep(0.01)
        assert other.inside == 1
        other.go()
        await again


async def test_a_model_has_one_queue_however_many_copies_of_it_there_are() -> None:
    """Those inside the one that was unloaded count as those who wait for the next."""
    shelf = Shelf()
    async with cache(shelf, max_models=2, queue_limit=2, load_wait_s=0.01) as models:
        users = Users(models, "a")
        await users.come()
        assert not await models.unload(spec("a"))
        await users.come()
        assert shelf.open == ["a", "a"]
        with pytest.raises(Overloaded):
            await (await users.come())
        users.go()
        await asyncio.gather(*users.tasks[:2])


async def test_a_queue_limit_of_a_new_catalog_holds_at_once() -> None:
    """Nothing is loaded for it."""
    shelf = Shelf()
    async with cache(shelf) as models:
        users = Users(models, "a")
        await users.come()
        shelf.catalog = Catalog([spec("a", queue_limit=1)])
        models.reconsider()
        with pytest.raises(Overloaded):
            await (await users.come())
        users.go()
        await users.tasks[0]
    assert shelf.loads == ["a"]


async def test_callers_who_wait_for_a_yielding_model_are_told_of_a_shutdown() -> None:
    """As everybody is."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=60) as models:
        busy, other = Users(models, "a"), Users(models, "b")
        await busy.come()
        newcomer = await other.come()
        late = await busy.come()
        asyncio.get_running_loop().call_later(0.05, busy.go)
    for task in (newcomer, late):
        with pytest.raises(Unavailable, match="shutting down"):
            await task


def test_what_is_gone_goes_nowhere() -> None:
    """And whatever is, may end: a process stops at any moment."""
    assert MOVES[State.GONE] == set()
    assert all(State.GONE in moves for state, moves in MOVES.items() if state is not State.GONE)
