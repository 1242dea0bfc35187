"""Places and bytes for models: which hold them, and which wait, in order of arrival."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from gateway import clock, metrics
from gateway.errors import GatewayError, InsufficientMemory
from gateway.logs import human_bytes
from gateway.serving.budget import Budget, Share
from gateway.serving.models.entry import Entry, State
from gateway.serving.models.eviction import Phase, Resident, make_plan, pick

M = TypeVar("M")

RECENT_S = 10.0  # an idle model used within it will probably be used again soon
CLOCK_SLACK_S = 0.001  # the loop's clock may be behind


class Abandoned(Exception):
    """Nobody waits for the model any more, and it has no room or was unloaded."""


class Room(Generic[M]):
    """The places and bytes of loaded models. Neither a pinned model nor one in use is evicted."""

    def __init__(
        self, budget: Budget, *, max_models: int, is_pinned: Callable[[Entry[M]], bool]
    ) -> None:
        self._budget = budget
        self._max_models = max_models
        self._is_pinned = is_pinned
        self._queue: list[Entry[M]] = []  # holding or waiting, in the order they are served
        self._timer: asyncio.TimerHandle | None = None
        budget.attach(self)
        budget.listen(self._update)

    @contextlib.asynccontextmanager
    async def hold(self, entry: Entry[M], nbytes: int) -> AsyncIterator[Share]:
        """Hold a place and `nbytes` while entered, evicting idle models if need be.

        Waits as long as the model has callers. Raises InsufficientMemory if there can never be
        room, and Abandoned.
        """
        entry.needed_bytes = nbytes
        entry.admission = asyncio.get_running_loop().create_future()
        self._queue.append(entry)
        try:
            self.notify()
            if (share := await entry.admission) is None:
                raise Abandoned
            yield share
        finally:
            self._queue.remove(entry)
            if entry.share is not None:
                entry.share.release()
            self.notify()

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict idle models, least recently used first, if that frees `nbytes`; else none.

        Models used in the last RECENT_S stay unless `is_pressing`, as they would probably be
        loaded again at once.
        """
        residents = self._residents()
        idle = {key: each for key, each in residents.items() if each.phase is Phase.IDLE}
        leaving = [each.nbytes for each in residents.values() if each.phase is Phase.LEAVING]
        missing = nbytes - self._budget.free_bytes - sum(leaving)
        now = clock.now()
        old = {
            key: each
            for key, each in idle.items()
            if is_pressing or each.last_used + RECENT_S <= now
        }
        if missing <= sum(each.nbytes for each in old.values()):
            for entry in pick(old, places=0, nbytes=missing):
                _evict(entry)
        elif missing <= sum(each.nbytes for each in idle.values()):
            recent = [each.last_used for key, each in idle.items() if key not in old]
            self._notify_in(min(recent) + RECENT_S - now)

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models but this one."""
        return sum(
            entry.nbytes
            for entry in self._queue
            if entry.spec.id != without and self._is_pinned(entry)
        )

    def users(self) -> list[str]:
        """Return the models that are in use."""
        return [entry.spec.id for entry in self._queue if entry.share is not None and entry.leases]

    def notify(self) -> None:
        """Wake waiting models and rows, as a model may have become idle or been freed."""
        self._budget.notify()

    def _update(self) -> None:
        """Make a plan for the present state, and carry it out."""
        self._refuse_impossible()
        plan = make_plan(
            self._residents(),
            max_models=self._max_models,
            free_bytes=self._budget.free_bytes,
            rows_bytes=self._rows_bytes(),
        )
        for entry in plan.leaving:
            _evict(entry)
        for entry in plan.admitted:
            self._admit(entry)
        for entry in plan.abandoned:
            entry.move_to(State.LEAVING)
        self._budget.claim(plan.claimed_bytes)
        if plan.recalls:
            self._budget.recall()

    def _residents(self) -> dict[Entry[M], Resident]:
        return {
            entry: Resident(
                self._phase(entry),
                (entry.needed_bytes or 0) if entry.waits_for_room else entry.nbytes,
                entry.last_used,
                is_requested=entry.leases > 0,
                is_adapter=entry.base is not None,
            )
            for entry in self._queue
        }

    def _phase(self, entry: Entry[M]) -> Phase:
        if entry.waits_for_room:
            return Phase.WAITING
        if entry.is_leaving or entry.share is None:  # without a share it was refused room
            return Phase.LEAVING
        is_idle = entry.state is State.READY and not entry.leases
        return Phase.IDLE if is_idle and not self._is_pinned(entry) else Phase.USED

    def _rows_bytes(self) -> int:
        """Return the bytes of rows and of cached prefixes."""
        held = self._budget.limit_bytes - self._budget.free_bytes
        return max(0, held - sum(entry.nbytes for entry in self._queue))

    def _admit(self, entry: Entry[M]) -> None:
        assert entry.admission is not None
        assert entry.needed_bytes is not None
        entry.share = self._budget.share()
        entry.share.resize(entry.needed_bytes)
        entry.admission.set_result(entry.share)

    def _notify_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds + CLOCK_SLACK_S, self.notify)

    def _refuse_impossible(self) -> None:
        for entry in self._queue:
            if entry.waits_for_room and (obstacle := self._find_obstacle(entry)) is not None:
                assert entry.admission is not None
                entry.admission.set_exception(obstacle)

    def _find_obstacle(self, entry: Entry[M]) -> GatewayError | None:
        """Return why a model can never be loaded while the pinned ones are, or None if it can."""
        assert entry.needed_bytes is not None
        pinned = [
            other
            for other in self._queue
            if other.share is not None and (self._is_pinned(other) or other is entry.base)
        ]
        allowed = self._budget.limit_bytes - sum(other.nbytes for other in pinned)
        if entry.needed_bytes > allowed:
            beside = "those that are pinned"
            if entry.base is not None:
                beside = "its base and what is pinned"
            suffix = f" beside {beside}" if pinned else ""
            return InsufficientMemory(
                entry.spec.id,
                f"it needs {human_bytes(entry.needed_bytes)}, and {human_bytes(allowed)} are "
                f"allowed{suffix}.",
            )
        places = sum(other.base is None for other in pinned)
        if entry.base is None and places >= self._max_models:
            return InsufficientMemory(
                entry.spec.id, f"all {self._max_models} places are held by models that are pinned."
            )
        return None


def _evict(entry: Entry[M]) -> None:
    entry.move_to(State.LEAVING)
    metrics.of(metrics.EVICTIONS, entry.spec.id).inc()
