"""What must come back to zero, and the memory held: read when somebody asks for metrics."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from gateway import metrics
from gateway.api.limits import Bodies
from gateway.app.opening import Batcher, Engines
from gateway.serving.budget import Budget
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.models.cache import ModelCache
from gateway.serving.response_store import ResponseStore


class Gauges:
    """One gateway's. Nothing is counted while requests are served."""

    def __init__(
        self,
        models: ModelCache[Batcher],
        budget: Budget,
        engines: Engines,
        responses: ResponseStore,
        bodies: Bodies,
    ) -> None:
        self._models = models
        self._budget = budget
        self._engines = engines
        self._responses = responses
        self._bodies = bodies

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Have them among the metrics while entered, on the loop that is to be looked at."""
        loop = asyncio.get_running_loop()
        with metrics.shown(lambda: self._read(loop)):
            yield

    def _read(self, loop: asyncio.AbstractEventLoop) -> Iterator[metrics.Reading]:
        rows, tickets, leases = Counter[str](), Counter[str](), Counter[str]()
        for entry in self._models.entries:  # an id may have two: one leaves, one replaces it
            model = entry.spec.id
            leases[model] += entry.leases + entry.asked
            if (batcher := entry.model) is not None:
                tickets[model] += batcher.tickets
                if isinstance(batcher, GenerationBatcher):
                    rows[model] += batcher.rows
        yield metrics.ROWS.read_by_model(rows)
        yield metrics.TICKETS.read_by_model(tickets)
        yield metrics.LEASES.read_by_model(leases)
        yield metrics.TASKS.read(len(asyncio.all_tasks(loop)))
        yield metrics.BUDGET_HELD.read(self._budget.limit_bytes - self._budget.free_bytes)
        yield metrics.BUDGET_LIMIT.read(self._budget.limit_bytes)
        yield metrics.DEVICE_ACTIVE.read(self._engines.active_bytes)
        yield metrics.RESPONSES_KEPT.read(len(self._responses))
        yield metrics.RESPONSES_BYTES.read(self._responses.nbytes)
        yield metrics.BODY_BYTES.read(self._bodies.nbytes)
        yield metrics.DEVICE_CACHED.read(self._engines.cached_bytes)
