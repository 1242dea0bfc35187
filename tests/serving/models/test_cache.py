"""The model cache: loaded once, kept while leased, the oldest idle one leaves."""

import asyncio
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import (
    InsufficientMemory,
    ModelLoadFailed,
    ModelLoading,
    ModelUnavailable,
    NoRoom,
    Overloaded,
    Unavailable,
)
from gateway.registry import Catalog, ModelSpec
from gateway.registry.specs import ChatSpec
from gateway.serving.budget import Budget
from gateway.serving.models.cache import Loaded, ModelCache, Prepared, Status
from gateway.serving.models.memory import RECENT_S
from tests.fakes import caller

pytestmark = pytest.mark.anyio


def spec(name: str, **keys: Any) -> ModelSpec:
    return ChatSpec.model_validate(
        {"id": name, "kind": "chat", "source": "path:.", **keys}, context={"folder": Path()}
    )


class Shelf:
    """Opens models, remembering what is open and what was loaded. Each is 10 bytes, unless said."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.loads: list[str] = []
        self.most = 0
        self.most_bytes = 0
        self.are_fetched = asyncio.Event()
        self.are_fetched.set()
        self.hold = asyncio.Event()
        self.hold.set()
        self.failure: Exception | None = None
        self.sizes: dict[str, int] = {}
        self.measured: dict[str, int] = {}
        self.catalog = Catalog(spec(name) for name in "abcd")

    async def fetch(self, spec: ModelSpec) -> None:
        assert isinstance(spec, ChatSpec)
        assert spec.base is not None

    async def prepare(self, spec: ModelSpec, base: str | None = None) -> Prepared[str]:
        await self.are_fetched.wait()
        return Prepared(self.sizes.get(spec.id, 10), lambda: self.opened(spec))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return None if self.are_fetched.is_set() else 40

    @asynccontextmanager
    async def opened(self, spec: ModelSpec) -> AsyncIterator[Loaded[str]]:
        self.loads.append(spec.id)
        await self.hold.wait()
        if self.failure is not None:
            raise self.failure
        self.open.append(spec.id)
        self.most = max(self.most, len(self.open))
        self.most_bytes = max(self.most_bytes, sum(self.sizes.get(each, 10) for each in self.open))
        try:
            yield Loaded(spec.id, self.measured.get(spec.id, self.sizes.get(spec.id, 10)))
        finally:
            await asyncio.sleep(0)
            self.open.remove(spec.id)


def cache(
    shelf: Shelf,
    max_models: int = 2,
    load_wait_s: float = 5,
    max_bytes: int = 1000,
    ttl_s: float | None = None,
    queue_limit: int = 100,
) -> ModelCache[str]:
    return ModelCache(
        shelf,
        lambda: shelf.catalog,
        Budget(max_bytes),
        max_models=max_models,
        load_wait_s=load_wait_s,
        ttl_s=ttl_s,
        queue_limit=queue_limit,
    )


async def test_a_load_is_shared_by_all_who_wait_for_it() -> None:
    """Twice at once loads once."""
    shelf = Shelf()
    async with cache(shelf) as models:

        async def use() -> str:
            async with models.lease(spec("a")) as model:
                return model

        assert await asyncio.gather(*(use() for _ in range(5))) == ["a"] * 5
    assert shelf.loads == ["a"]


async def test_no_more_wait_for_a_load_than_the_queue_holds() -> None:
    """The next is refused at once, and the load is for the others; one that leaves gives way."""
    shelf = Shelf()
    async with cache(shelf, queue_limit=2) as models:
        shelf.hold.clear()

        async def use() -> str:
            async with models.lease(spec("a"), caller()) as model:
                return model

        waiting = [asyncio.create_task(use()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests waiting"):
            await use()
        waiting.pop().cancel()
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(use()))
        await asyncio.sleep(0)
        shelf.hold.set()
        assert await asyncio.gather(*waiting) == ["a"] * 2
        assert await use() == "a"
    assert shelf.loads == ["a"]


async def test_the_least_recently_used_idle_model_makes_room() -> None:
    """And its memory is back before the next is loaded."""
    shelf = Shelf()
    async with cache(shelf) as models:
        for name in ("a", "b", "a", "c"):
            async with models.lease(spec(name)):
                pass
        assert sorted(shelf.open) == ["a", "c"]
    assert shelf.most == 2
    assert shelf.open == []


async def test_a_leased_model_is_never_evicted() -> None:
    """Whoever needs room waits for the lease to end."""
    shelf = Shelf()
    async with cache(shelf, max_models=1) as models:
        async with models.lease(spec("a")):
            waiting = asyncio.create_task(_use(models, "b"))
            await asyncio.sleep(0.02)
            assert shelf.open == ["a"]
        assert await waiting == "b"
    assert shelf.most == 1


async def test_waiting_for_a_load_ends_in_503_while_the_load_goes_on() -> None:
    """With Retry-After; the next request finds it loaded."""
    shelf = Shelf()
    shelf.hold.clear()
    async with cache(shelf, load_wait_s=0.02) as models:
        with pytest.raises(ModelLoading) as refusal:
            await _use(models, "a")
        assert "retry-after" in refusal.value.headers
        assert models.states() == {"a": "loading"}
        shelf.hold.set()
        await asyncio.sleep(0.02)
        assert await _use(models, "a") == "a"
    assert shelf.loads == ["a"]


async def test_a_waiter_who_leaves_does_not_stop_the_load() -> None:
    """Others may be waiting for it."""
    shelf = Shelf()
    shelf.hold.clear()
    async with cache(shelf) as models:
        leaving = asyncio.create_task(_use(models, "a"))
        staying = asyncio.create_task(_use(models, "a"))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.sleep(0.01)
        shelf.hold.set()
        assert await staying == "a"


async def test_a_failed_load_is_told_to_all_and_again_for_a_while() -> None:
    """A broken file is not read by every request; an explicit load tries at once."""
    shelf = Shelf()
    shelf.failure = ModelLoadFailed("a", "corrupt")
    async with cache(shelf) as models:
        answers = await asyncio.gather(
            *(_use(models, "a") for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(answer, ModelLoadFailed) for answer in answers)
        shelf.failure = None
        with pytest.raises(ModelLoadFailed, match="corrupt"):
            await _use(models, "a")
        assert shelf.loads == ["a"]
        assert models.status(spec("a")).state == "failed"
        assert "corrupt" in (models.status(spec("a")).failure or "")
        await models.load(spec("a"))
        assert await _use(models, "a") == "a"
        assert models.status(spec("a")).failure is None


async def test_an_unavailable_model_is_remembered_for_a_while() -> None:
    """A dead network is not asked again by every request."""
    shelf = Shelf()
    shelf.failure = ModelUnavailable("a", "no network")
    async with cache(shelf) as models:
        for _ in range(3):
            with pytest.raises(ModelUnavailable):
                await _use(models, "a")
        assert models.states() == {"a": "failed"}
    assert shelf.loads == ["a"]


async def test_a_remembered_failure_does_not_grow() -> None:
    """However often it is told: each is told a copy, as full as the first."""
    shelf = Shelf()
    shelf.failure = ModelUnavailable("a", "no network")
    async with cache(shelf) as models:
        for _ in range(1000):
            with pytest.raises(ModelUnavailable, match="no network") as failure:
                await _use(models, "a")
            assert len(failure.traceback) <= 10
            assert failure.value.code == "model_unavailable"
            assert failure.value.headers == {"x-should-retry": "false"}
    assert len(list(traceback.walk_tb(shelf.failure.__traceback__))) <= 10


async def test_those_who_wait_for_a_failing_load_are_told_one_error_each() -> None:
    """One object, raised in many requests, would gather all their frames."""
    shelf = Shelf()
    shelf.failure = ModelLoadFailed("a", "corrupt")
    async with cache(shelf) as models:
        told = await asyncio.gather(*(_use(models, "a") for _ in range(5)), return_exceptions=True)
    assert len({id(each) for each in told}) == 5
    assert {str(each) for each in told} == {str(shelf.failure)}


@pytest.mark.parametrize("places", [1, 2])
async def test_a_model_that_is_never_idle_makes_room_all_the_same(places: int) -> None:
    """New leases wait behind who waited first; then its users are served again."""
    shelf = Shelf()
    served: list[str] = []
    stop = asyncio.Event()

    async def keep_busy(name: str) -> None:
        while not stop.is_set():
            async with models.lease(spec(name)):
                await asyncio.sleep(0.01)
            served.append(name)

    names = ["a", "b"][:places]
    async with cache(shelf, max_models=places) as models, asyncio.timeout(10):
        busy = []
        for name in names * 3:
            busy.append(asyncio.create_task(keep_busy(name)))
            await asyncio.sleep(0.003)
        for _ in range(3):
            assert await _use(models, "c") == "c"
            before = len(served) + 3 * places
            while not set(names) <= set(served[before:]):
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*busy)
    assert shelf.most <= places


async def test_leaving_the_cache_waits_for_a_model_that_is_being_evicted() -> None:
    """Its memory is back before the lane may close."""
    closing = asyncio.Event()

    class Slow(Shelf):
        @asynccontextmanager
        async def opened(self, spec: ModelSpec) -> AsyncIterator[Loaded[str]]:
            async with super().opened(spec) as loaded:
                yield loaded
                closing.set()
                await asyncio.sleep(0.05)

    shelf = Slow()
    async with cache(shelf, max_models=1) as models:
        await _use(models, "a")
        waiting = asyncio.create_task(_use(models, "b"))
        await closing.wait()
    assert shelf.open == []
    with pytest.raises(Unavailable):
        await waiting


async def test_three_models_on_two_places_thrash_without_a_wrong_answer() -> None:
    """Concurrently, for a while."""
    shelf = Shelf()
    async with cache(shelf) as models:

        async def use(name: str) -> None:
            for _ in range(30):
                assert await _use(models, name) == name

        await asyncio.gather(*(use(name) for name in "abcabc"))
    assert shelf.most <= 2


async def test_leaving_the_cache_closes_what_is_open_and_ends_what_loads() -> None:
    """Shutdown waits for neither."""
    shelf = Shelf()
    async with cache(shelf) as models:
        await _use(models, "a")
        shelf.hold.clear()
        loading = asyncio.create_task(_use(models, "b"))
        await asyncio.sleep(0.01)
    assert shelf.open == []
    with pytest.raises(Exception, match="shutting down"):
        await loading


async def test_a_model_that_can_never_fit_is_refused_at_once() -> None:
    """Saying what it needs and what is allowed; it is never loaded."""
    shelf = Shelf()
    shelf.sizes["a"] = 1234
    async with cache(shelf, load_wait_s=60) as models:
        async with models.lease(spec("b")), asyncio.timeout(5):
            with pytest.raises(InsufficientMemory, match=r"1 KiB, and 1000 B are allowed"):
                await _use(models, "a")
        assert shelf.open == ["b"], "nobody had to leave for it"
        assert models.status(spec("a")).state == "failed"
    assert shelf.loads == ["b"]


async def test_as_many_idle_models_leave_as_bytes_are_needed() -> None:
    """The least recently used first."""
    shelf = Shelf()
    shelf.sizes = {"a": 30, "b": 30, "c": 30, "d": 60}
    async with cache(shelf, max_models=10, max_bytes=100) as models:
        for name in ("a", "b", "c", "a", "d"):
            await _use(models, name)
        assert sorted(shelf.open) == ["a", "d"]
    assert shelf.most_bytes == 90


async def test_a_model_that_measures_more_than_it_seemed_counts_as_measured() -> None:
    """The next one finds less room."""
    shelf = Shelf()
    shelf.sizes, shelf.measured = {"a": 30, "b": 50}, {"a": 60}
    async with cache(shelf, max_models=10, max_bytes=100) as models:
        await _use(models, "a")
        assert models.status(spec("a")).nbytes == 60
        await _use(models, "b")
        assert shelf.open == ["b"]


async def test_waiting_for_models_in_use_ends_in_503() -> None:
    """With Retry-After and their names; they take new leases again, and stay."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=0.05) as models:
        async with models.lease(spec("a")):
            with pytest.raises(Unavailable) as refusal:
                await _use(models, "b")
            assert "retry-after" in refusal.value.headers
            await asyncio.sleep(0.1)
            assert models.states() == {"a": "loaded"}
            assert await _use(models, "a") == "a"
        assert shelf.loads == ["a"]
        assert await _use(models, "b") == "b"


async def test_the_load_that_finds_no_room_names_who_is_in_use() -> None:
    """To whoever came for it later than it began to wait."""
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=0.1) as models:
        async with models.lease(spec("a")):
            early = asyncio.create_task(_use(models, "b"))
            await asyncio.sleep(0.05)
            with pytest.raises(NoRoom, match="`a`"):
                await _use(models, "b")
            with pytest.raises(Unavailable):
                await early


async def test_bytes_that_rows_hold_are_not_given_to_models() -> None:
    """A batcher's share is the budget's too; its end lets the load go on."""
    shelf = Shelf()
    budget = Budget(100)
    shelf.sizes = {"a": 50}
    async with ModelCache(
        shelf, lambda: shelf.catalog, budget, max_models=2, load_wait_s=5
    ) as models:
        rows = budget.share()
        rows.resize(60)
        waiting = asyncio.create_task(_use(models, "a"))
        await asyncio.sleep(0.02)
        assert shelf.loads == []
        rows.release()
        assert await waiting == "a"


async def test_rows_may_have_idle_models_leave() -> None:
    """As few as suffice, never those in use, and nobody where all would not suffice."""
    shelf = Shelf()
    budget = Budget(30)
    async with ModelCache(
        shelf, lambda: shelf.catalog, budget, max_models=3, load_wait_s=5
    ) as models:
        await _use(models, "a")
        await _use(models, "b")
        async with models.lease(spec("c")):
            models.room.clear(21, True)
            await asyncio.sleep(0.02)
            assert shelf.open == ["a", "b", "c"]
            models.room.clear(5, True)
            await asyncio.sleep(0.02)
            assert shelf.open == ["b", "c"]
            models.room.clear(20, True)
            await asyncio.sleep(0.02)
            assert shelf.open == ["c"]


async def test_a_model_used_a_moment_ago_does_not_leave_for_rows_beside_others() -> None:
    """It would be back at once; rows that run give their memory back."""
    shelf = Shelf()
    budget = Budget(20)
    async with ModelCache(
        shelf, lambda: shelf.catalog, budget, max_models=3, load_wait_s=5
    ) as models:
        await _use(models, "a")
        models.room.clear(15, False)
        await asyncio.sleep(0.02)
        assert shelf.open == ["a"]
        [entry] = models.entries
        entry.last_used -= RECENT_S
        models.room.clear(15, False)
        await asyncio.sleep(0.02)
        assert shelf.open == []


async def test_nobody_leaves_while_a_download_is_under_way() -> None:
    """Room is made when the files are here."""
    shelf = Shelf()
    async with cache(shelf, max_models=1) as models:
        await _use(models, "a")
        shelf.are_fetched.clear()
        waiting = asyncio.create_task(_use(models, "b"))
        await asyncio.sleep(0.02)
        assert shelf.open == ["a"]
        assert await _use(models, "a") == "a"
        shelf.are_fetched.set()
        assert await waiting == "b"


async def test_an_idle_model_leaves_after_its_time() -> None:
    """One in use never does, and its time begins with the end of its last lease."""
    shelf = Shelf()
    async with cache(shelf, ttl_s=0.1) as models:
        async with models.lease(spec("a")):
            await asyncio.sleep(0.2)
            assert shelf.open == ["a"]
        for _ in range(4):
            await asyncio.sleep(0.05)
            await _use(models, "a")
        assert shelf.loads == ["a"]
        async with asyncio.timeout(5):
            while shelf.open:
                await asyncio.sleep(0.01)
        assert models.states() == {}


async def test_a_model_s_own_time_wins() -> None:
    """Over the setting, which here is never."""
    shelf = Shelf()
    shelf.catalog = Catalog([spec("a", ttl_s=0.05), spec("b")])
    async with cache(shelf) as models, asyncio.timeout(5):
        await _use(models, "a")
        await _use(models, "b")
        while "a" in shelf.open:
            await asyncio.sleep(0.01)
        assert shelf.open == ["b"]


async def test_a_pinned_model_stays() -> None:
    """Whoever needs room and however long it is idle; what does not fit beside it is refused."""
    shelf = Shelf()
    shelf.sizes = {"b": 95}
    shelf.catalog = Catalog([spec("a", pinned=True), spec("b"), spec("c"), spec("d")])
    async with cache(shelf, ttl_s=0.02, max_bytes=100) as models:
        await models.load(spec("a"))
        await _use(models, "c")
        await _use(models, "d")
        async with asyncio.timeout(5):
            while shelf.open != ["a"]:
                await asyncio.sleep(0.01)
        with pytest.raises(InsufficientMemory, match="95 B, and 90 B are allowed beside"):
            await _use(models, "b")


async def test_where_every_place_is_pinned_the_next_model_is_refused() -> None:
    """It would wait for ever."""
    shelf = Shelf()
    shelf.catalog = Catalog([spec("a", pinned=True), spec("b")])
    async with cache(shelf, max_models=1) as models:
        await _use(models, "a")
        with pytest.raises(InsufficientMemory, match="pinned"):
            await _use(models, "b")


async def test_a_pinned_model_may_be_unloaded_by_hand() -> None:
    """The next request loads it again."""
    shelf = Shelf()
    shelf.catalog = Catalog([spec("a", pinned=True)])
    async with cache(shelf) as models:
        await _use(models, "a")
        assert await models.unload(spec("a"))
        assert shelf.open == []
        assert models.status(spec("a")).state == "unloaded"
        await _use(models, "a")
    assert shelf.loads == ["a", "a"]


async def test_a_model_in_use_is_unloaded_when_its_last_lease_ends() -> None:
    """New leases load it anew meanwhile; twice is as once."""
    shelf = Shelf()
    async with cache(shelf, load_wait_s=0.05) as models:
        async with models.lease(spec("a")):
            assert not await models.unload(spec("a"))
            assert not await models.unload(spec("a"))
            assert await _use(models, "a") == "a"
            assert shelf.open == ["a", "a"]
        await asyncio.sleep(0.02)
        assert shelf.open == ["a"]


async def test_unloading_what_is_not_loaded_is_done_at_once() -> None:
    """Nothing to do is no error."""
    async with cache(Shelf()) as models:
        assert await models.unload(spec("a"))


async def test_a_model_let_go_of_while_it_is_fetched_is_not_loaded() -> None:
    """When nobody waits for it any more."""
    shelf = Shelf()
    async with cache(shelf, load_wait_s=0.02) as models:
        shelf.are_fetched.clear()
        with pytest.raises(ModelLoading, match="40 %"):
            await _use(models, "a")
        assert not await models.unload(spec("a"))
        shelf.are_fetched.set()
        await asyncio.sleep(0.02)
        assert shelf.loads == []
        assert models.states() == {}


async def test_old_leases_finish_on_the_old_spec() -> None:
    """New ones load the new one; what did not change stays loaded."""
    shelf = Shelf()
    old, new = spec("a"), spec("a", max_context=99)
    async with cache(shelf, max_models=3) as models:
        await _use(models, "b")
        async with models.lease(old):
            shelf.catalog = Catalog([new, spec("b", aliases="beta", ttl_s=60)])
            models.reconsider()
            async with models.lease(new):
                assert shelf.open == ["b", "a", "a"]
            async with models.lease(old):  # resolved before the reload, leased after it
                assert shelf.loads == ["b", "a", "a"]
        await asyncio.sleep(0.02)
        assert shelf.open == ["b", "a"]
        async with models.lease(new):
            await _use(models, "b")
    assert shelf.loads == ["b", "a", "a"]


async def test_a_model_that_is_in_the_file_no_more_goes_when_it_is_idle() -> None:
    """A late request for it is served, and then it goes again."""
    shelf = Shelf()
    async with cache(shelf) as models:
        await _use(models, "a")
        async with models.lease(spec("b")):
            shelf.catalog = Catalog([])
            models.reconsider()
            await asyncio.sleep(0.02)
            assert shelf.open == ["b"]
        await _use(models, "a")
        await asyncio.sleep(0.02)
        assert shelf.open == []


async def test_a_pin_given_by_a_reload_holds_what_is_loaded() -> None:
    """Without loading it again; taken away, its time begins."""
    shelf = Shelf()
    async with cache(shelf, ttl_s=0.05) as models, asyncio.timeout(5):
        await _use(models, "a")
        shelf.catalog = Catalog([spec("a", pinned=True)])
        models.reconsider()
        await asyncio.sleep(0.1)
        assert shelf.open == ["a"]
        shelf.catalog = Catalog([spec("a")])
        models.reconsider()
        while shelf.open:
            await asyncio.sleep(0.01)
    assert shelf.loads == ["a"]


async def test_an_error_that_is_not_ours_names_the_model() -> None:
    """A folder that cannot be read, for one."""
    shelf = Shelf()
    shelf.failure = PermissionError(13, "Permission denied", "/models/a")
    async with cache(shelf) as models:
        with pytest.raises(ModelLoadFailed, match=r"`a`.*Permission denied.*/models/a"):
            await _use(models, "a")


async def test_a_loaded_model_tells_its_bytes_and_when_it_was_used() -> None:
    """A Unix time; one that is loading tells neither."""
    shelf = Shelf()
    async with cache(shelf) as models:
        assert models.status(spec("a")).state == "unloaded"
        shelf.hold.clear()
        loading = asyncio.create_task(_use(models, "a"))
        await asyncio.sleep(0.01)
        assert models.status(spec("a")) == Status("loading")
        shelf.hold.set()
        await loading
        status = models.status(spec("a"))
    assert (status.state, status.nbytes) == ("loaded", 10)
    assert status.last_used is not None
    assert abs(time.time() - status.last_used) < 60


async def test_leaving_the_cache_ends_what_waits_for_room() -> None:
    """At once, though the model in its way is in use."""
    shelf = Shelf()

    async def use_for_ever() -> None:
        async with models.lease(spec("a")):
            await asyncio.Event().wait()

    async with asyncio.timeout(5):
        async with cache(shelf, max_models=1, load_wait_s=60) as models:
            using = asyncio.create_task(use_for_ever())
            waiting = asyncio.create_task(_use(models, "b"))
            await asyncio.sleep(0.01)
            assert shelf.open == ["a"]
        with pytest.raises(Unavailable, match="shutting down"):
            await waiting
    using.cancel()
    await asyncio.wait([using])
    assert shelf.loads == ["a"]
    assert shelf.open == []


async def _use(models: ModelCache[str], name: str) -> str:
    async with models.lease(spec(name)) as model:
        await asyncio.sleep(0)
        return model


async def test_an_old_specs_failure_says_nothing_of_the_new_one() -> None:
    """It failed after the file was mended and read again."""
    shelf = Shelf()
    shelf.hold.clear()
    shelf.failure = ModelUnavailable("a", "no network")

    async def use(wanted: ModelSpec) -> str:
        async with models.lease(wanted) as model:
            return model

    async with cache(shelf) as models:
        old = asyncio.create_task(use(spec("a")))
        while not shelf.loads:
            await asyncio.sleep(0)
        mended = spec("a", max_context=64)
        shelf.catalog = Catalog([mended])
        models.reconsider()
        shelf.hold.set()
        with pytest.raises(ModelUnavailable):
            await old
        assert models.status(mended) == Status("unloaded")
        shelf.failure = None
        assert await use(mended) == "a"
