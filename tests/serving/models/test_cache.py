"""The model cache: loaded once, kept while leased, the oldest idle one leaves."""

import asyncio
import contextlib
import traceback

import pytest

from gateway import metrics
from gateway.errors import (
    InsufficientMemory,
    ModelLoadFailed,
    ModelLoading,
    NoRoom,
    Overloaded,
    Unavailable,
)
from gateway.registry import Catalog
from gateway.serving.budget import Budget
from gateway.serving.models.eviction import RECENT_S
from tests.serving.models.harness import SIZE, Shelf, cache, settle, spec, until, use

pytestmark = pytest.mark.anyio


async def test_no_more_wait_for_a_load_than_the_queue_holds() -> None:
    shelf = Shelf()
    async with cache(shelf, queue_limit=2) as models:
        shelf.may_load.clear()
        waiting = [asyncio.create_task(use(models, "a")) for _ in range(2)]
        await settle()
        with pytest.raises(Overloaded, match="2 requests waiting"):
            await use(models, "a")
        waiting.pop().cancel()
        await settle()
        waiting.append(asyncio.create_task(use(models, "a")))
        await settle()
        shelf.may_load.set()
        assert await asyncio.gather(*waiting) == ["a"] * 2
    assert shelf.loads == ["a"], "it is shared"


async def test_the_least_recently_used_idle_model_makes_room() -> None:
    shelf = Shelf()
    async with cache(shelf) as models:
        for name in "abac":
            await use(models, name)
        assert sorted(shelf.open) == ["a", "c"]
    assert shelf.most_open == 2
    assert shelf.open == []


async def test_a_stray_request_takes_no_busy_model_from_its_callers() -> None:
    shelf = Shelf()
    async with cache(shelf, max_models=1) as models:
        async with models.lease(spec("a")):
            stray = asyncio.create_task(use(models, "b"))
            await settle()
            assert await use(models, "a") == "a"
            assert not stray.done(), "it was served at once"
            with pytest.raises(NoRoom, match="`a`"):
                await stray
            assert await use(models, "a") == "a"
        assert await use(models, "b") == "b"
    assert shelf.loads == ["a", "b"]


async def test_the_load_that_finds_no_room_names_who_is_in_use() -> None:
    shelf = Shelf()
    async with cache(shelf, max_models=1, load_wait_s=2) as models:
        async with models.lease(spec("a")):
            early = asyncio.create_task(use(models, "b"))
            await asyncio.sleep(1)
            late = asyncio.create_task(use(models, "b"))
            with pytest.raises(NoRoom, match="`a`") as refusal:
                await early
            assert "retry-after" in refusal.value.headers
            assert not late.done()
        assert await late == "b"


async def test_a_caller_who_hangs_up_leaves_no_model_in_the_line() -> None:
    shelf = Shelf()
    shelf.sizes = {"a": 60, "b": 90, "c": 30}
    async with cache(shelf, Budget(100), load_wait_s=60) as models:
        async with models.lease(spec("a")):
            large = asyncio.create_task(use(models, "b"))
            await settle()
            small = asyncio.create_task(use(models, "c"))
            await settle()
            assert not small.done(), "nobody overtakes"
            large.cancel()
            assert await small == "c"
            assert "b" not in models.states()
    assert shelf.loads == ["a", "c"]


async def test_waiting_for_a_load_ends_in_503_while_the_load_goes_on() -> None:
    shelf = Shelf()
    shelf.may_load.clear()
    async with cache(shelf) as models:
        with pytest.raises(ModelLoading) as refusal:
            await use(models, "a")
        assert "retry-after" in refusal.value.headers
        assert models.states() == {"a": "loading"}
        shelf.may_load.set()
        await settle()
        assert await use(models, "a") == "a"
    assert shelf.loads == ["a"]


async def test_a_failed_load_is_told_to_all_and_again_for_a_while() -> None:
    """A broken file is not read by every request; an explicit load tries at once.

    Each caller gets an error of its own: a shared one would gather the frames of all.
    """
    shelf = Shelf()
    shelf.failures["a"] = failure = ModelLoadFailed("a", "corrupt")
    async with cache(shelf) as models:
        answers = await asyncio.gather(
            *(use(models, "a") for _ in range(100)), return_exceptions=True
        )
        assert {str(answer) for answer in answers} == {str(failure)}
        assert len({id(answer) for answer in answers}) == 100
        for _ in range(100):
            with pytest.raises(ModelLoadFailed, match="corrupt") as refusal:
                await use(models, "a")
            assert len(refusal.traceback) <= 12
        assert len(list(traceback.walk_tb(failure.__traceback__))) <= 12
        assert shelf.loads == ["a"]
        assert models.status(spec("a")).state == "failed"
        assert "corrupt" in (models.status(spec("a")).failure or "")
        del shelf.failures["a"]
        await models.load(spec("a"))
        assert models.status(spec("a")).failure is None


async def test_a_model_that_can_never_fit_is_refused_at_once() -> None:
    shelf = Shelf()
    shelf.sizes["a"] = 1234
    async with cache(shelf, load_wait_s=60) as models:
        await use(models, "b")
        with pytest.raises(InsufficientMemory, match=r"1 KiB, and 1000 B are allowed"):
            await use(models, "a")
        assert shelf.open == ["b"], "nobody had to leave for it"
        assert models.status(spec("a")).state == "failed"
    assert shelf.loads == ["b"]


async def test_a_model_that_measures_more_than_it_seemed_counts_as_measured() -> None:
    shelf = Shelf()
    shelf.sizes, shelf.measured = {"a": 30, "b": 50}, {"a": 60}
    async with cache(shelf, Budget(100)) as models:
        await use(models, "a")
        assert models.status(spec("a")).nbytes == 60
        await use(models, "b")
        assert shelf.open == ["b"]


async def test_a_model_used_a_moment_ago_does_not_leave_for_rows_beside_others() -> None:
    shelf = Shelf()
    budget = Budget(20)
    async with cache(shelf, budget) as models:
        await use(models, "a")
        budget.evict_idle(15, is_pressing=False)
        await settle()
        assert shelf.open == ["a"]
        await asyncio.sleep(RECENT_S + 1)
        async with models.lease(spec("b")):
            budget.evict_idle(5, is_pressing=False)
            await settle()
            assert shelf.open == ["b"]
            budget.evict_idle(15, is_pressing=True)
            await settle()
            assert shelf.open == ["b"], "it is in use"


async def test_nobody_leaves_while_a_download_is_under_way() -> None:
    shelf = Shelf()
    async with cache(shelf, max_models=1) as models:
        await use(models, "a")
        shelf.are_fetched.clear()
        waiting = asyncio.create_task(use(models, "b"))
        await settle()
        assert shelf.open == ["a"]
        shelf.are_fetched.set()
        assert await waiting == "b"
        shelf.are_fetched.clear()
        with pytest.raises(ModelLoading, match="40 %"):
            await use(models, "c")
        assert not await models.unload(spec("c"))
        shelf.are_fetched.set()
        await settle()
        assert models.states() == {"b": "loaded"}
    assert shelf.loads == ["a", "b"]


async def test_an_idle_model_leaves_after_its_time() -> None:
    shelf = Shelf(spec("a"), spec("b", ttl_s=90))
    async with cache(shelf, ttl_s=30) as models:
        async with models.lease(spec("a")):
            await asyncio.sleep(60)
            assert shelf.open == ["a"]
        for _ in range(4):
            await asyncio.sleep(20)
            await use(models, "a")
        assert shelf.loads == ["a"]
        await use(models, "b")
        await asyncio.sleep(31)
        assert shelf.open == ["b"]
        await asyncio.sleep(60)
        assert shelf.open == []


async def test_a_pinned_model_stays() -> None:
    pinned = spec("a", pinned=True)
    shelf = Shelf(pinned, spec("b"), spec("c"))
    shelf.sizes["b"] = 95
    async with cache(shelf, Budget(100), ttl_s=1) as models:
        await models.load(pinned)
        await use(models, "c")
        await until(lambda: shelf.open == ["a"])
        with pytest.raises(InsufficientMemory, match="95 B, and 90 B are allowed beside"):
            await use(models, "b")
        models.pin(spec("c"), is_pinned=True)
        await use(models, "c")
        shelf.sizes["b"] = 10
        with pytest.raises(InsufficientMemory, match="2 places are held by models that are pinned"):
            await use(models, "b")
        models.pin(spec("c"), is_pinned=False)
        assert await use(models, "b") == "b"
        assert await models.unload(pinned)
        assert models.status(pinned).state == "unloaded"
        assert await models.unload(pinned), "there is nothing to do"


async def test_a_model_in_use_is_unloaded_when_its_last_lease_ends() -> None:
    shelf = Shelf()
    async with cache(shelf) as models:
        async with models.lease(spec("a")):
            assert not await models.unload(spec("a"))
            assert not await models.unload(spec("a"))
            assert await use(models, "a") == "a"
            assert shelf.open == ["a", "a"]
        await settle()
        assert shelf.open == ["a"]


async def test_old_leases_finish_on_the_old_spec() -> None:
    shelf = Shelf()
    old, new = spec("a"), spec("a", max_context=99)
    async with cache(shelf, max_models=3) as models:
        await use(models, "b")
        async with models.lease(old):
            shelf.served.replace(Catalog([new, spec("b", aliases="beta", ttl_s=60)]))
            models.reconsider()
            assert shelf.adopted == [shelf.served.catalog.by_id("b")]
            async with models.lease(new):
                assert shelf.open == ["b", "a", "a"]
            async with models.lease(old):  # resolved before the reload, leased after it
                assert shelf.loads == ["b", "a", "a"]
        await settle()
        assert shelf.open == ["b", "a"]
        assert shelf.loads == ["b", "a", "a"]
        shelf.served.replace(Catalog([new]))
        models.reconsider()
        await settle()
        assert shelf.open == ["a"], "the file has it no more"


async def test_a_spec_that_was_replaced_while_it_loaded_fails_alone() -> None:
    """Its callers hear of it; the model that has its name now is tried at once."""
    shelf = Shelf()
    old, new = spec("a"), spec("a", max_context=99)
    shelf.failures["a"] = ModelLoadFailed("a", "corrupt")
    shelf.may_load.clear()
    async with cache(shelf) as models:
        loading = asyncio.create_task(use(models, old))
        await settle()
        shelf.served.replace(Catalog([new]))
        models.reconsider()
        shelf.may_load.set()
        with pytest.raises(ModelLoadFailed, match="corrupt"):
            await loading
        assert not models.has_failed(new)
        del shelf.failures["a"]
        assert await use(models, new) == "a"
    assert shelf.loads == ["a", "a"]


async def test_leaving_the_cache_ends_what_loads_or_waits_and_frees_the_rest() -> None:
    """They end at once, though a model is in use; but a model that is being freed is waited for."""
    shelf = Shelf()
    async with asyncio.timeout(50):
        async with cache(shelf, max_models=2, load_wait_s=60) as models:
            using = contextlib.AsyncExitStack()
            await using.enter_async_context(models.lease(spec("a")))
            shelf.may_free.clear()
            await use(models, "b")
            evicting = asyncio.create_task(use(models, "c"))  # b is being freed for it
            await settle()
            waiting = asyncio.create_task(use(models, "d"))
            asyncio.get_running_loop().call_later(10, shelf.may_free.set)
            await settle()
            unbegun = asyncio.create_task(use(models, "e"))
            await asyncio.sleep(0)  # it waits for a load whose task has not run yet
    assert shelf.open == []
    for task in (evicting, waiting, unbegun):
        with pytest.raises(Unavailable, match="shutting down"):
            await task
    await using.aclose()
    assert shelf.loads == ["a", "b"]
    assert models.entries == ()


async def test_counts_of_a_model_that_is_gone_are_dropped() -> None:
    """Otherwise callers who name ever more models of the hub fill memory and /metrics."""
    shelf = Shelf(spec("named-once"), spec("named-still"))

    def counted(model: str) -> bool:
        return f'model="{model}"' in metrics.text().decode()

    async with cache(shelf) as models:
        for name in ("named-once", "named-still"):
            await use(models, name)
        shelf.served.replace(Catalog([spec("named-still")]))
        models.forget()
        assert counted("named-once"), "it is in memory"
        models.reconsider()
        await settle()
        models.reconsider()  # it has left the memory by now
        assert not counted("named-once")
        assert counted("named-still")
        shelf.served.replace(Catalog([spec("named-once")]))
        await use(models, "named-once")
        assert counted("named-once")


async def test_a_model_of_negative_size_is_refused_and_holds_nothing() -> None:
    """A size that a broken file states must not give its bytes to others."""
    shelf, budget = Shelf(), Budget(1000)
    shelf.sizes["a"] = -(10**12)
    async with cache(shelf, budget) as models:
        with pytest.raises(ModelLoadFailed, match="-1000000000000 bytes"):
            await use(models, "a")
        assert budget.free_bytes == 1000
        assert await use(models, "b") == "b"
        assert budget.free_bytes == 1000 - SIZE
