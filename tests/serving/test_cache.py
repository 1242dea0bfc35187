"""The model cache: loaded once, kept while leased, the oldest idle one leaves."""

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.errors import ModelLoadFailed, ModelLoading, ModelUnavailable, Unavailable
from gateway.registry import ModelSpec
from gateway.registry.specs import ChatSpec
from gateway.serving.cache import ModelCache, pick_evicted

pytestmark = pytest.mark.anyio


def spec(name: str) -> ModelSpec:
    return ChatSpec.model_validate(
        {"id": name, "kind": "chat", "source": "path:."}, context={"folder": Path()}
    )


class Shelf:
    """Opens models, remembering what is open and what was loaded."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.loads: list[str] = []
        self.most = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.failure: Exception | None = None

    @asynccontextmanager
    async def opened(self, spec: ModelSpec) -> AsyncIterator[str]:
        self.loads.append(spec.id)
        await self.hold.wait()
        if self.failure is not None:
            raise self.failure
        self.open.append(spec.id)
        self.most = max(self.most, len(self.open))
        try:
            yield spec.id
        finally:
            await asyncio.sleep(0)
            self.open.remove(spec.id)


def cache(shelf: Shelf, max_models: int = 2, load_wait_s: float = 5) -> ModelCache[str]:
    return ModelCache(shelf.opened, max_models=max_models, load_wait_s=load_wait_s)


def test_the_idle_model_used_longest_ago_is_picked() -> None:
    """A leased one never is, however old."""
    last_used = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert pick_evicted(last_used, {"a": 0, "b": 0, "c": 0}) == "a"
    assert pick_evicted(last_used, {"a": 1, "b": 0, "c": 0}) == "b"
    assert pick_evicted(last_used, {"a": 1, "b": 1, "c": 1}) is None


async def test_a_load_is_shared_by_all_who_wait_for_it() -> None:
    """Twice at once loads once."""
    shelf = Shelf()
    async with cache(shelf) as models:

        async def use() -> str:
            async with models.lease(spec("a")) as model:
                return model

        assert await asyncio.gather(*(use() for _ in range(5))) == ["a"] * 5
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


async def test_a_failed_load_is_told_to_all_and_tried_afresh() -> None:
    """A mended file needs no restart."""
    shelf = Shelf()
    shelf.failure = ModelLoadFailed("a", "corrupt")
    async with cache(shelf) as models:
        answers = await asyncio.gather(
            *(_use(models, "a") for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(answer, ModelLoadFailed) for answer in answers)
        shelf.failure = None
        assert await _use(models, "a") == "a"


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
    shelf = Shelf()
    closing = asyncio.Event()

    @asynccontextmanager
    async def opened(spec: ModelSpec) -> AsyncIterator[str]:
        async with shelf.opened(spec) as name:
            yield name
            closing.set()
            await asyncio.sleep(0.05)

    async with ModelCache(opened, max_models=1, load_wait_s=5) as models:
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


async def _use(models: ModelCache[str], name: str) -> str:
    async with models.lease(spec(name)) as model:
        await asyncio.sleep(0)
        return model
