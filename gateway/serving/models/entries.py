"""A model in the cache: asked for, loading, loaded, leaving."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

from gateway import metrics
from gateway.jobs import Caller
from gateway.registry import ModelSpec
from gateway.serving.admission import Admission
from gateway.serving.budget import Held, Share

M = TypeVar("M")
LOAD_RETRY_S = 5.0  # while it loads, nobody knows how fast its queue will drain


class Entry(Generic[M]):
    """A model from the moment it is asked for to the moment its memory is back.

    A doomed one is in use while others wait for its room: it gets no new leases, and is unwanted
    when the last one ends, unless it is spared before. A dismissed one is never spared.
    """

    def __init__(self, spec: ModelSpec, admission: Admission) -> None:
        self.spec = spec
        self.admission = admission  # of those who have leases
        self.is_doomed = False
        self.is_dismissed = False
        self.ready: asyncio.Future[M] = asyncio.get_running_loop().create_future()
        self.unwanted = asyncio.Event()
        self.leases = 0
        self.last_used = 0.0
        self.needed_bytes: int | None = None
        self.share: Share | None = None
        self.keeper: asyncio.Task[None] | None = None
        self._rest: asyncio.TimerHandle | None = None

    @property
    def is_loaded(self) -> bool:
        """Tell whether there is a model to use."""
        return self.ready.done() and not self.ready.cancelled() and not self.ready.exception()

    @property
    def is_waiting(self) -> bool:
        """Tell whether it is known what it needs, and not yet given."""
        return self.needed_bytes is not None and self.share is None

    @property
    def is_open(self) -> bool:
        """Tell whether it takes new leases."""
        return not (self.unwanted.is_set() or self.is_doomed or self.is_dismissed)

    @property
    def nbytes(self) -> int:
        """Count what it holds of the budget."""
        return 0 if self.share is None else self.share.nbytes

    def held(self) -> Held:
        """Tell what the choice of who leaves goes by."""
        return Held(self.nbytes, self.last_used, not self.leases, self.is_doomed)

    @contextlib.contextmanager
    def place(self, caller: Caller | None) -> Iterator[None]:
        """Hold a place in its queue while entered; who only loads it needs none.

        Raises Overloaded where there is none.
        """
        if caller is None:
            yield
            return
        caller.timings.model = self.spec.id
        with self.admission.admitted(retry_after_s=None if self.is_loaded else LOAD_RETRY_S):
            yield

    def enter(self) -> None:
        """Begin a lease."""
        self.leases += 1
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def leave(self) -> None:
        """End a lease."""
        self.leases -= 1
        self.last_used = metrics.now()

    def rest(self, ttl_s: float | None) -> None:
        """Be unwanted after so long a time without a lease; None is never."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._rest = loop.call_later(ttl_s, self.unwanted.set)
