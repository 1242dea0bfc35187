"""Models and rows in one budget, at random: every waiter ends, and no byte stays held."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.errors import GatewayError, ModelLoadFailed
from gateway.jobs import KvCost
from gateway.registry import Catalog, ModelSpec
from gateway.serving.budget import Budget
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.memory import KV_STEP, RowCosts, RowMemory
from gateway.serving.lane import Lane
from gateway.serving.models.cache import Loaded, ModelCache, Prepared
from tests.fakes import ScriptedChat, generate_job
from tests.serving.generation.harness import batching
from tests.serving.models.harness import spec

pytestmark = pytest.mark.anyio
WEIGHTS = {"a": 1000, "b": 2000, "c": 3000, "d": 9000}
LIMIT = 6000
LIMITS = {"max_batch_size": 3, "prefill_chunk_tokens": 64, "memory_wait_s": 0.1}


class Shelf:
    """Gives batchers of scripted writers, some of which are larger than they seemed or fail."""

    def __init__(self, chance: random.Random, lane: Lane) -> None:
        self._chance = chance
        self._lane = lane
        self.budget = Budget(LIMIT)
        self.catalog = self.drawn()
        self.models: ModelCache[GenerationBatcher] = ModelCache(
            self,
            lambda: self.catalog,
            self.budget,
            max_models=2,
            load_wait_s=0.1,
            ttl_s=0.02,
        )

    def drawn(self) -> Catalog:
        """Draw how models are kept, and whether they load otherwise than before."""
        return Catalog(
            spec(
                name,
                pinned=self._chance.random() < 0.1,
                max_context=self._chance.choice([1000, 1000, 1001]),
            )
            for name in WEIGHTS
        )

    async def prepare(
        self, spec: ModelSpec, base: GenerationBatcher | None = None
    ) -> Prepared[GenerationBatcher]:
        await asyncio.sleep(self._chance.choice([0, 0.005]))
        return Prepared(WEIGHTS[spec.id], lambda: self._opened(spec))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return None

    @asynccontextmanager
    async def _opened(self, spec: ModelSpec) -> AsyncIterator[Loaded[GenerationBatcher]]:
        await asyncio.sleep(self._chance.choice([0, 0.005]))
        if self._chance.random() < 0.05:
            raise ModelLoadFailed(spec.id, "bad luck")
        nbytes = WEIGHTS[spec.id] + self._chance.choice([0, 0, 500])
        engine = ScriptedChat(max_context=3000, prefix_bytes=self._chance.choice([0, 800, 9000]))
        included = self._chance.choice([0, 512])
        costs = RowCosts(KvCost(1), included, lambda: LIMIT - nbytes, answer_tokens=90)
        memory = RowMemory(self.budget, costs)
        async with batching(engine, memory, lane=self._lane, **LIMITS) as batcher:
            yield Loaded(batcher, nbytes)
        assert not engine.rows

    async def act(self) -> None:
        """Do one thing that a client or an operator may do."""
        match self._chance.randrange(12):
            case 0:
                await self.models.unload(self._spec())
            case 1:
                self.catalog = self.drawn()
                self.models.reconsider()
            case 2:
                await self.models.load(self._spec())
            case _:
                await self._ask()

    def _spec(self) -> ModelSpec:
        return self._chance.choice(self.catalog.specs)

    async def _ask(self) -> None:
        text = "x" * self._chance.choice([5, 40, 400])
        options: dict[str, Any] = {
            "n": self._chance.choice([1, 1, 3]),
            "max_tokens": self._chance.choice([None, 10, 4 * KV_STEP]),
        }
        async with (
            self.models.lease(self._spec()) as batcher,
            batcher.generate(generate_job(text, **options)) as generation,
        ):
            async for _ in generation.deltas:
                pass


async def survived(shelf: Shelf, chance: random.Random) -> None:
    """Act, and mostly be patient; what the gateway refuses is refused for good."""
    acting = asyncio.create_task(shelf.act())
    if chance.random() < 0.3:
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01, 0.1]))
        acting.cancel()
    with contextlib.suppress(GatewayError, asyncio.CancelledError):
        await acting


@pytest.mark.parametrize("seed", range(3))
async def test_no_byte_row_or_lease_is_left_whatever_happens(seed: int) -> None:
    """Leases, rows, clients who leave, unloads and reloads; models that fail or are too large."""
    chance = random.Random(seed)
    async with Lane() as lane:
        shelf = Shelf(chance, lane)
        async with shelf.models, asyncio.timeout(20):
            for _ in range(8):
                await asyncio.gather(*(survived(shelf, chance) for _ in range(12)))
                assert all(entry.leases == 0 for entry in shelf.models.entries)
                assert all(batcher.tickets == 0 for batcher in shelf.models.loaded())
        assert shelf.budget.free_bytes == LIMIT
        assert not shelf.models.entries
