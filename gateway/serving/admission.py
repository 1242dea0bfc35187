"""Who may wait for a model: so many requests, each until its deadline."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from gateway import metrics
from gateway.errors import DeadlineExceeded, Overloaded
from gateway.jobs import Caller


class Admission:
    """Counts a model's requests, waiting and running, and refuses those beyond `limit`."""

    def __init__(self, model: str, limit: int) -> None:
        self._model = model
        self._limit = limit
        self._requests = 0

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a place while entered; raises Overloaded where there is none.

        A request that is cancelled inside has lost its caller, and is counted.
        """
        if self._requests >= self._limit:
            metrics.of(metrics.REJECTED, self._model).inc()
            raise Overloaded(
                f"The model `{self._model}` has {self._requests} requests waiting already.",
                retry_after_s=1,
            )
        self._count(1)
        try:
            yield
        except asyncio.CancelledError:
            metrics.of(metrics.CANCELLED, self._model).inc()
            raise
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._requests += change
        metrics.of(metrics.QUEUE_DEPTH, self._model).set(self._requests)


@contextlib.asynccontextmanager
async def until_deadline(caller: Caller) -> AsyncIterator[None]:
    """End what is inside at the caller's deadline; raises DeadlineExceeded then."""
    try:
        async with asyncio.timeout(caller.deadline - metrics.now()):
            yield
    except TimeoutError:
        raise DeadlineExceeded(caller.allowed_s) from None
