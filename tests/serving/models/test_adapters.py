"""Adapters in the model cache: parts of a base, which is loaded once and freed after them."""

import asyncio

import pytest

from gateway.errors import InsufficientMemory, ModelLoadFailed, NoRoom
from gateway.registry import Catalog
from gateway.serving.budget import Budget
from tests.serving.models.harness import Shelf, adapter, cache, settle, spec, until, use

pytestmark = pytest.mark.anyio

BASE, OTHER = spec("base"), spec("other")
ONE, TWO = adapter("one", BASE), adapter("two", BASE)


def shelf_of_large_bases() -> Shelf:
    shelf = Shelf(BASE, OTHER, ONE, TWO)
    shelf.sizes = {"base": 100, "other": 100}
    return shelf


async def test_a_base_in_use_by_an_adapter_is_not_evicted() -> None:
    shelf = shelf_of_large_bases()
    async with cache(shelf, Budget(125)) as models:
        await use(models, TWO)
        async with models.lease(ONE):
            with pytest.raises(NoRoom, match="`base`, `one`"):
                await use(models, OTHER)
            assert shelf.open == ["base", "base+two", "base+one"]
        await use(models, OTHER)
        assert shelf.open == ["other"]
        assert await use(models, TWO) == "base+two"
        assert shelf.open == ["base", "base+two"]


async def test_an_idle_adapter_makes_room_for_another_and_the_base_stays() -> None:
    shelf = shelf_of_large_bases()
    async with cache(shelf, Budget(110)) as models:
        async with models.lease(BASE):
            await use(models, ONE)
            await use(models, TWO)
        assert (shelf.loads, shelf.freed) == (["base", "one", "two"], ["one"])
        shelf.sizes["one"] = 15
        with pytest.raises(InsufficientMemory, match="10 B are allowed beside its base"):
            await use(models, ONE)


async def test_unloading_a_base_frees_its_adapters_too() -> None:
    shelf = Shelf(BASE, ONE)
    async with cache(shelf) as models:
        async with models.lease(ONE):
            unloading = asyncio.create_task(models.unload(BASE))
            await settle()
            assert shelf.open == ["base", "base+one"]
            assert await use(models, ONE) == "base+one"  # another copy of both serves it
            assert shelf.loads == ["base", "one"] * 2
        assert await unloading
        assert shelf.open == ["base", "base+one"]
        assert await models.unload(ONE)
        assert models.states() == {"base": "loaded"}


async def test_a_pinned_adapter_keeps_its_base() -> None:
    """Once the adapter is unpinned, its base ends its time and takes the adapter with it."""
    shelf = Shelf(BASE, adapter("long", BASE, ttl_s=600))
    long = shelf.served.catalog.specs[1]
    async with cache(shelf, Budget(20), ttl_s=1) as models:
        models.pin(long, is_pinned=True)
        await use(models, long)
        with pytest.raises(InsufficientMemory):
            await use(models, OTHER)
        await asyncio.sleep(60)
        assert shelf.open == ["base", "base+long"]
        models.pin(long, is_pinned=False)
        await until(lambda: not shelf.open)
        assert shelf.freed == ["long", "base"]


async def test_an_adapter_that_fails_leaves_its_base_and_the_others() -> None:
    shelf = Shelf(BASE, ONE, TWO)
    shelf.failures["one"] = ModelLoadFailed("one", "it is broken.")
    async with cache(shelf, ttl_s=1) as models:
        async with models.lease(TWO):
            with pytest.raises(ModelLoadFailed, match="it is broken"):
                await use(models, ONE)
        assert models.status(ONE).state == "failed"
        assert shelf.open == ["base", "base+two"]
        await until(lambda: not shelf.open)  # nothing holds the base
        with pytest.raises(ModelLoadFailed, match="it is broken"):
            await use(models, ONE)
        assert shelf.loads == ["base", "two", "one"]


async def test_a_new_catalog_moves_an_adapter_to_its_new_base() -> None:
    shelf = Shelf(BASE, OTHER, ONE, TWO)
    moved = adapter("one", OTHER)
    async with cache(shelf) as models:
        await use(models, TWO)
        async with models.lease(ONE):
            shelf.served.replace(Catalog((BASE, OTHER, moved, TWO)))
            models.reconsider()
            assert await use(models, moved) == "other+one"
            assert "base+one" in shelf.open
        await settle()
        assert shelf.open == ["base", "base+two", "other", "other+one"]
