"""Scripted models for the cache's tests: a shelf that opens them, and callers who use them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.registry import Catalog, ModelSpec
from gateway.registry.specs import ChatSpec
from gateway.serving.budget import Budget
from gateway.serving.models.cache import Loaded, ModelCache, Prepared
from gateway.serving.models.served import Served
from tests.fakes import caller

CONTEXT = {"folder": Path()}
SIZE = 10


def spec(name: str, **keys: Any) -> ChatSpec:
    entry = {"id": name, "kind": "chat", "source": "path:.", **keys}
    return ChatSpec.model_validate(entry, context=CONTEXT)


def adapter(name: str, base: ChatSpec, folder: str = ".", **keys: Any) -> ChatSpec:
    entry = {"id": name, "kind": "chat", "base": base.id, "adapter": f"path:{folder}", **keys}
    return ChatSpec.model_validate(entry, context=CONTEXT).with_part("base", base)


class Shelf:
    """Opens models and notes each event. Each model has SIZE bytes, unless said otherwise."""

    def __init__(self, *specs: ChatSpec) -> None:
        self.served = Served(Catalog(specs or [spec(name) for name in "abcd"]))
        self.open: list[str] = []
        self.loads: list[str] = []
        self.freed: list[str] = []
        self.adopted: list[ModelSpec] = []
        self.most_open = 0
        self.sizes: dict[str, int] = {}
        self.measured: dict[str, int] = {}
        self.failures: dict[str, Exception] = {}
        self.are_fetched = asyncio.Event()
        self.are_fetched.set()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.may_free = asyncio.Event()
        self.may_free.set()

    async def prepare(self, spec: ModelSpec, base: str | None = None) -> Prepared[str]:
        await self.are_fetched.wait()
        nbytes = self.sizes.get(spec.id, SIZE)
        return Prepared(nbytes, lambda: self._opened(spec.id, base, nbytes))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return None if self.are_fetched.is_set() else 40

    @asynccontextmanager
    async def _opened(self, name: str, base: str | None, nbytes: int) -> AsyncIterator[Loaded[str]]:
        self.loads.append(name)
        await self.may_load.wait()
        if name in self.failures:
            raise self.failures[name]
        model = name if base is None else f"{base}+{name}"
        self.open.append(model)
        self.most_open = max(self.most_open, len(self.open))
        try:
            yield Loaded(model, self.measured.get(name, nbytes), self.adopted.append)
        finally:
            await self.may_free.wait()
            assert base is None or base in self.open, "an adapter is freed before its base"
            self.open.remove(model)
            self.freed.append(name)


def cache(shelf: Shelf, budget: Budget | None = None, **given: Any) -> ModelCache[str]:
    options = {"max_models": 2, "load_wait_s": 5, "queue_limit": 100, **given}
    return ModelCache(shelf, shelf.served, budget or Budget(1000), **options)


async def use(models: ModelCache[str], wanted: str | ModelSpec) -> str:
    """Lease a model for a moment."""
    if isinstance(wanted, str):
        wanted = spec(wanted)
    async with models.lease(wanted, caller()) as model:
        await asyncio.sleep(0)
        return model


async def settle() -> None:
    """Run everything that waits for nothing but its turn on the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let virtual time pass until a condition holds."""
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.01)
