"""Adapters in the model cache: parts of a base, which is loaded once and freed after them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import (
    InsufficientMemory,
    ModelLoadFailed,
    ModelLoading,
    ModelUnavailable,
    NoRoom,
)
from gateway.registry import Catalog
from gateway.registry.specs import ChatSpec
from gateway.serving.budget import Budget
from gateway.serving.models.cache import Loaded, ModelCache, Prepared

pytestmark = pytest.mark.anyio

CONTEXT = {"folder": Path()}


def model(name: str, **keys: Any) -> ChatSpec:
    entry = {"id": name, "kind": "chat", "source": "path:.", **keys}
    return ChatSpec.model_validate(entry, context=CONTEXT)


def adapter(name: str, base: ChatSpec, folder: str = ".", **keys: Any) -> ChatSpec:
    entry = {"id": name, "kind": "chat", "base": base.id, "adapter": f"path:{folder}", **keys}
    return ChatSpec.model_validate(entry, context=CONTEXT).with_base(base)


BASE, OTHER = model("base"), model("other")
ONE, TWO = adapter("one", BASE), adapter("two", BASE)
FOREIGN = adapter("foreign", OTHER)


class Shelf:
    """Opens models, noting what happens. A model has 100 bytes, an adapter 10, unless said."""

    def __init__(self, *specs: ChatSpec) -> None:
        self.catalog = Catalog(specs or (BASE, OTHER, ONE, TWO, FOREIGN))
        self.events: list[str] = []
        self.open: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.sizes: dict[str, int] = {}
        self.fetches: list[str] = []
        self.unfetched: dict[str, Exception] = {}
        self.are_fetched = asyncio.Event()
        self.are_fetched.set()
        self.preparing: set[str] = set()  # adapters, whose bases are held
        self.are_prepared = asyncio.Event()
        self.are_prepared.set()
        self.hold = asyncio.Event()
        self.hold.set()

    async def fetch(self, spec: Any) -> None:
        assert spec.base is not None
        self.fetches.append(spec.id)
        await self.are_fetched.wait()
        if spec.id in self.unfetched:
            raise self.unfetched[spec.id]

    async def prepare(self, spec: Any, base: str | None = None) -> Prepared[str]:
        assert (base is None) == (spec.base is None)
        assert base is None or base in self.open
        if base is not None:
            self.preparing.add(spec.id)
            await self.are_prepared.wait()
        return Prepared(self.size(spec), lambda: self.opened(spec, base))

    def size(self, spec: ChatSpec) -> int:
        return self.sizes.get(spec.id, 100 if spec.base is None else 10)

    def fetched_percent(self, spec: Any) -> int | None:
        return None

    @asynccontextmanager
    async def opened(self, spec: ChatSpec, base: str | None) -> AsyncIterator[Loaded[str]]:
        await self.hold.wait()
        if spec.id in self.failures:
            raise self.failures[spec.id]
        name = spec.id if base is None else f"{base}+{spec.id}"
        self.events.append(f"load {spec.id}")
        self.open.append(name)
        try:
            yield Loaded(name, self.size(spec))
        finally:
            await asyncio.sleep(0)
            assert base is None or base in self.open, "an adapter is freed before its base"
            self.open.remove(name)
            self.events.append(f"free {spec.id}")


def cache(shelf: Shelf, *, nbytes: int = 1000, **given: Any) -> ModelCache[str]:
    given = {"max_models": 4, "load_wait_s": 5, "ttl_s": None, **given}
    return ModelCache(shelf, lambda: shelf.catalog, Budget(nbytes), **given)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_ten_adapters_load_their_base_once() -> None:
    """Also when all are asked for at once; an adapter takes none of the places."""
    many = [adapter(f"a{i}", BASE) for i in range(10)]
    shelf = Shelf(BASE, *many)
    async with cache(shelf, max_models=1) as models:

        async def use(spec: ChatSpec) -> str:
            async with models.lease(spec) as found:
                return found

        found = await asyncio.gather(*(use(spec) for spec in [*many, *many, BASE]))
        assert found == [
            *(f"base+a{i}" for i in range(10)),
            *(f"base+a{i}" for i in range(10)),
            "base",
        ]
        assert sorted(shelf.events) == sorted(["load base", *(f"load a{i}" for i in range(10))])
        assert models.status(BASE).nbytes == 100
        assert models.status(many[0]).nbytes == 10
    assert not shelf.open
    assert shelf.events[-1] == "free base"


async def test_a_base_in_use_by_an_adapter_is_not_evicted() -> None:
    shelf = Shelf()
    async with cache(shelf, nbytes=120, load_wait_s=0.05) as models:
        async with models.lease(ONE):
            with pytest.raises(NoRoom):
                await models.load(OTHER)
            assert shelf.open == ["base", "base+one"]
        await models.load(OTHER)
        assert shelf.open == ["other"]


async def test_an_idle_base_leaves_after_its_adapters() -> None:
    """And comes back with the first that is asked for."""
    shelf = Shelf()
    async with cache(shelf, nbytes=125) as models:
        await models.load(ONE)
        await models.load(TWO)
        await models.load(OTHER)
        assert shelf.open == ["other"]
        assert shelf.events.index("free base") > shelf.events.index("free one")
        assert models.states() == {"other": "loaded"}
        async with models.lease(TWO) as found:
            assert found == "base+two"
        assert shelf.open == ["base", "base+two"]


async def test_an_idle_adapter_makes_room_for_another_and_the_base_stays() -> None:
    shelf = Shelf()
    async with cache(shelf, nbytes=110) as models:
        async with models.lease(BASE):
            await models.load(ONE)
            await models.load(TWO)
        assert shelf.events == ["load base", "load one", "free one", "load two"]


async def test_an_adapter_without_room_beside_its_base_is_refused_at_once() -> None:
    shelf = Shelf()
    async with cache(shelf, nbytes=105) as models:
        with pytest.raises(InsufficientMemory, match="5 B are allowed beside its base"):
            await models.load(ONE)
        async with models.lease(BASE) as found:
            assert found == "base"


async def test_places_are_made_by_models_alone() -> None:
    """An adapter that leaves would make none."""
    third = model("third")
    shelf = Shelf(BASE, OTHER, third, ONE)
    async with cache(shelf, max_models=2) as models:
        await models.load(ONE)
        await models.load(OTHER)
        async with models.lease(BASE):
            await models.load(third)
        assert shelf.open == ["base", "base+one", "third"]


async def test_unloading_a_base_frees_its_adapters_too() -> None:
    """After the last request to any of them."""
    shelf = Shelf()
    async with cache(shelf) as models:
        async with AsyncExitStack() as held:
            await held.enter_async_context(models.lease(ONE))
            unloading = asyncio.create_task(models.unload(BASE))
            await asyncio.sleep(0.02)
            assert shelf.open == ["base", "base+one"]
            async with models.lease(ONE) as found:  # by another copy of both
                assert found == "base+one"
            assert shelf.events.count("load base") == shelf.events.count("load one") == 2
        assert await unloading
        await until(lambda: shelf.open == ["base", "base+one"])
        assert await models.unload(BASE)
        assert not shelf.open


async def test_unloading_an_adapter_leaves_its_base() -> None:
    shelf = Shelf()
    async with cache(shelf) as models:
        await models.load(ONE)
        assert await models.unload(ONE)
        assert shelf.open == ["base"]
        assert models.states() == {"base": "loaded"}


async def test_a_pinned_adapter_keeps_its_base() -> None:
    """Until it is unpinned."""
    shelf = Shelf()
    async with cache(shelf, nbytes=120, ttl_s=0.02) as models:
        models.pin(ONE, is_pinned=True)
        await models.load(ONE)
        with pytest.raises(InsufficientMemory):
            await models.load(OTHER)
        await asyncio.sleep(0.05)
        assert shelf.open == ["base", "base+one"]
        models.pin(ONE, is_pinned=False)
        await until(lambda: not shelf.open)


async def test_an_idle_base_ends_its_time_with_its_adapters() -> None:
    shelf = Shelf(BASE, adapter("long", BASE, ttl_s=60))
    async with cache(shelf, ttl_s=0.02) as models:
        await models.load(shelf.catalog.specs[1])
        await until(lambda: not shelf.open)
        assert shelf.events[-2:] == ["free long", "free base"]


async def test_an_adapter_that_fails_leaves_its_base_and_the_others() -> None:
    shelf = Shelf()
    shelf.failures["one"] = ModelLoadFailed("one", "it is broken.")
    async with cache(shelf, ttl_s=0.05) as models:
        async with models.lease(TWO):
            with pytest.raises(ModelLoadFailed, match="it is broken"):
                await models.load(ONE)
        assert models.status(ONE).state == "failed"
        assert shelf.open == ["base", "base+two"]
        await until(lambda: not shelf.open)  # nothing holds the base


async def test_a_base_that_fails_fails_its_adapters_by_its_own_name() -> None:
    shelf = Shelf()
    shelf.failures["base"] = ModelLoadFailed("base", "it is broken.")
    async with cache(shelf) as models:
        with pytest.raises(ModelLoadFailed, match="`base`"):
            await models.load(ONE)
        assert not shelf.open


async def test_a_caller_who_leaves_during_the_load_leaves_no_lease() -> None:
    """The load goes on, and holds the base only until then."""
    shelf = Shelf()
    async with cache(shelf, ttl_s=0.05) as models:
        await models.load(BASE)
        shelf.hold.clear()
        caller = asyncio.create_task(models.load(ONE))
        await asyncio.sleep(0.02)
        caller.cancel()
        await asyncio.wait([caller])
        await asyncio.sleep(0.1)
        assert shelf.open == ["base"]
        shelf.hold.set()
        await until(lambda: "load one" in shelf.events)
        await until(lambda: not shelf.open)


async def test_a_new_catalog_moves_an_adapter_to_its_new_base() -> None:
    """Requests under way end with what they have; other adapters of an unchanged base stay."""
    shelf = Shelf()
    async with cache(shelf) as models:
        await models.load(TWO)
        async with models.lease(ONE):
            moved = adapter("one", OTHER)
            shelf.catalog = Catalog((BASE, OTHER, moved, TWO))
            models.reconsider()
            async with models.lease(moved) as found:
                assert found == "other+one"
            assert "base+one" in shelf.open
        await until(lambda: "base+one" not in shelf.open)
        assert "base+two" in shelf.open


async def test_a_base_that_changes_is_loaded_anew_with_its_adapters() -> None:
    shelf = Shelf()
    async with cache(shelf) as models:
        await models.load(ONE)
        changed = model("base", max_context=8)
        shelf.catalog = Catalog((changed, adapter("one", changed)))
        models.reconsider()
        await until(lambda: not shelf.open)
        await models.load(shelf.catalog.specs[1])
        assert shelf.open == ["base", "base+one"]


async def test_an_adapter_that_is_asked_for_while_its_base_yields_waits() -> None:
    """It holds nothing until then, so that the base becomes idle."""
    shelf = Shelf()
    async with cache(shelf, nbytes=120, load_wait_s=2) as models:
        async with models.lease(ONE):
            loading = asyncio.create_task(models.load(OTHER))
            await asyncio.sleep(0.05)
            late = asyncio.create_task(models.load(ONE))
            await asyncio.sleep(0.05)
            assert not late.done()
        await loading
        await late
        assert shelf.events == [
            *("load base", "load one", "free one", "free base"),
            *("load other", "free other", "load base", "load one"),
        ]


@pytest.mark.parametrize("given", [{"max_models": 1}, {"nbytes": 120}], ids=["places", "bytes"])
async def test_an_adapter_and_a_model_that_comes_before_its_base_is_there_are_both_served(
    given: dict[str, int],
) -> None:
    """The adapter, which holds the base, does not wait for who waits for the base."""
    shelf = Shelf()
    shelf.hold.clear()
    async with cache(shelf, load_wait_s=2, **given) as models:
        adapted = asyncio.create_task(models.load(ONE))
        await until(lambda: "base" in models.states())
        newcomer = asyncio.create_task(models.load(OTHER))
        await until(lambda: "other" in models.states())
        shelf.hold.set()
        await asyncio.gather(adapted, newcomer)
        assert shelf.events == [
            *("load base", "load one", "free one", "free base", "load other"),
        ]


async def test_both_are_served_though_the_adapter_s_caller_hangs_up() -> None:
    """Its load goes on, and holds the base until it has ended."""
    shelf = Shelf()
    shelf.are_prepared.clear()
    async with cache(shelf, max_models=1, load_wait_s=2) as models:
        hanging_up = asyncio.create_task(models.load(ONE))
        await until(lambda: "one" in shelf.preparing)
        newcomer = asyncio.create_task(models.load(OTHER))
        await until(lambda: "other" in models.states())
        hanging_up.cancel()
        await asyncio.wait([hanging_up])
        shelf.are_prepared.set()
        await newcomer
        assert shelf.open == ["other"]


async def test_an_adapter_does_not_wait_for_a_place_that_another_model_waits_for() -> None:
    """It takes none, and its base is there."""
    third, fourth = model("third"), model("fourth")
    shelf = Shelf(BASE, OTHER, third, fourth, ONE)
    async with cache(shelf, max_models=2, load_wait_s=2) as models:
        await models.load(third)
        async with models.lease(OTHER):
            adapted = asyncio.create_task(models.load(ONE))
            await until(lambda: "base" in models.states())
            newcomer = asyncio.create_task(models.load(fourth))
            await adapted
        await newcomer
        assert "fourth" in shelf.open


async def test_adapters_that_are_always_in_use_keep_no_model_out() -> None:
    """Though it needs their bytes too, and one of them always waits for another's."""
    shelf = Shelf()
    shelf.sizes["other"] = 105
    stop = asyncio.Event()
    served: list[str] = []

    async def keep_busy(spec: ChatSpec) -> None:
        while not stop.is_set():
            async with models.lease(spec):
                await asyncio.sleep(0.003)
            served.append(spec.id)

    async with cache(shelf, nbytes=112) as models:
        busy = [asyncio.create_task(keep_busy(spec)) for spec in (ONE, TWO)]
        for _ in range(3):
            before = len(served)
            await until(lambda before=before: {"one", "two"} <= set(served[before:]))
            await models.load(OTHER)
        stop.set()
        await asyncio.gather(*busy)
    assert shelf.events.count("load other") == 3


async def test_adapters_of_two_models_that_both_lack_bytes_are_both_served() -> None:
    """Each waits for the other's base: the later one gives its own back, and asks for it again."""
    shelf = Shelf()
    async with cache(shelf, nbytes=205, load_wait_s=2) as models:
        await asyncio.gather(models.load(ONE), models.load(FOREIGN))
        assert {"load one", "load foreign"} <= set(shelf.events)
        assert shelf.events.count("load base") == 1


async def test_the_later_one_waits_for_the_first_one_s_answers_however_long_they_are() -> None:
    """As callers of a model that yields do: they had been admitted."""
    shelf = Shelf()
    async with cache(shelf, nbytes=205, load_wait_s=0.1) as models:

        async def use(spec: ChatSpec, seconds: float) -> None:
            async with models.lease(spec):
                await asyncio.sleep(seconds)

        await asyncio.gather(use(ONE, 0.5), use(FOREIGN, 0))


async def test_an_adapter_of_an_unloaded_base_goes_to_its_next_copy() -> None:
    """Where it lacks bytes: it does not hold those that an adapter of another model waits for."""
    shelf = Shelf()
    shelf.are_prepared.clear()
    async with cache(shelf, nbytes=205, load_wait_s=2) as models:
        loading = [asyncio.create_task(models.load(spec)) for spec in (ONE, FOREIGN)]
        await until(lambda: shelf.preparing == {"one", "foreign"})
        unloading = asyncio.create_task(models.unload(OTHER))
        await asyncio.sleep(0.02)
        shelf.are_prepared.set()
        await asyncio.gather(*loading, unloading)
        assert unloading.result()
        assert shelf.events.count("load other") == 2


async def test_an_adapter_that_nobody_waits_for_holds_no_base_for_want_of_bytes() -> None:
    """Its caller hung up: a newcomer has the base's room."""
    newcomer = model("newcomer")
    shelf = Shelf(BASE, OTHER, FOREIGN, newcomer)
    shelf.are_prepared.clear()
    async with cache(shelf, nbytes=205, load_wait_s=0.5) as models:
        async with models.lease(BASE):
            hanging_up = asyncio.create_task(models.load(FOREIGN))
            await until(lambda: "foreign" in shelf.preparing)
            hanging_up.cancel()
            await asyncio.wait([hanging_up])
            shelf.are_prepared.set()
            await models.load(newcomer)
            assert shelf.open == ["base", "newcomer"]


async def test_no_base_is_held_while_an_adapter_is_downloaded() -> None:
    """Others have its memory; it comes back when the adapter is there."""
    shelf = Shelf()
    shelf.are_fetched.clear()
    async with cache(shelf, nbytes=120, load_wait_s=2) as models:
        await models.load(BASE)
        loading = asyncio.create_task(models.load(ONE))
        await until(lambda: models.status(ONE).state == "loading")
        await models.load(OTHER)
        assert shelf.open == ["other"]
        shelf.are_fetched.set()
        await loading
        assert shelf.open == ["base", "base+one"]


async def test_an_adapter_is_downloaded_once_for_all_who_ask() -> None:
    """And not again for those who ask when it is loaded."""
    shelf = Shelf()
    shelf.are_fetched.clear()
    async with cache(shelf) as models:
        loading = [asyncio.create_task(models.load(ONE)) for _ in range(5)]
        await until(lambda: shelf.fetches)
        shelf.are_fetched.set()
        await asyncio.gather(*loading)
        await models.load(ONE)
        assert shelf.fetches == ["one"]
        assert shelf.events == ["load base", "load one"]


async def test_who_waits_too_long_for_a_download_is_told_so_and_it_goes_on() -> None:
    shelf = Shelf()
    shelf.are_fetched.clear()
    async with cache(shelf, load_wait_s=0.05) as models:
        with pytest.raises(ModelLoading, match="`one`"):
            await models.load(ONE)
        shelf.are_fetched.set()
        await models.load(ONE)
        assert shelf.fetches == ["one"]


async def test_an_adapter_that_cannot_be_downloaded_costs_no_load_of_its_base() -> None:
    shelf = Shelf()
    shelf.unfetched["one"] = ModelUnavailable("one", "the hub does not answer.")
    async with cache(shelf) as models:
        for _ in range(2):
            with pytest.raises(ModelUnavailable, match="the hub does not answer"):
                async with models.lease(ONE):
                    pass
        assert shelf.fetches == ["one"]  # nor is it tried again at once
        assert models.status(ONE).state == "failed"
        assert not shelf.events


async def test_an_adapter_that_is_unloaded_while_it_is_downloaded_is_loaded_for_who_waits() -> None:
    """Nobody is left waiting; without callers nothing is loaded."""
    shelf = Shelf()
    shelf.are_fetched.clear()
    async with cache(shelf, load_wait_s=0.05) as models:
        hanging_up = asyncio.create_task(models.load(ONE))
        await until(lambda: shelf.fetches)
        hanging_up.cancel()
        await asyncio.wait([hanging_up])
        assert not await models.unload(ONE)  # a download is not cut off
        waiting = asyncio.create_task(models.load(TWO))
        await until(lambda: "two" in shelf.fetches)
        unloading = asyncio.create_task(models.unload(TWO))
        await asyncio.sleep(0)
        shelf.are_fetched.set()
        assert await unloading
        await waiting
        assert shelf.events == ["load base", "load two"]


async def test_leaving_the_cache_ends_the_download_of_an_adapter() -> None:
    shelf = Shelf()
    shelf.are_fetched.clear()
    async with cache(shelf) as models:
        loading = asyncio.create_task(models.load(ONE))
        await until(lambda: shelf.fetches)
    await asyncio.wait([loading])
    assert "shutting down" in str(loading.exception())
    assert not shelf.events


async def test_leaving_the_cache_frees_adapters_before_their_base() -> None:
    """Also one that is being loaded."""
    shelf = Shelf()
    async with cache(shelf) as models:
        await models.load(ONE)
        shelf.hold.clear()
        loading = asyncio.create_task(models.load(TWO))
        await asyncio.sleep(0.02)
    await asyncio.wait([loading])
    assert loading.exception() is not None
    assert shelf.events == ["load base", "load one", "free one", "free base"]
