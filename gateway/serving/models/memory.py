"""Places and bytes for models: which hold them, and which wait, in order of arrival."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

from gateway import clock, metrics
from gateway.errors import GatewayError, InsufficientMemory, NoRoom
from gateway.logs import human_bytes
from gateway.serving.budget import Budget, Share
from gateway.serving.models.entry import Entry, State
from gateway.serving.models.eviction import (
    Phase,
    Plan,
    Resident,
    make_plan,
    patience_s,
    pick,
)

M = TypeVar("M")

# A model that yielded in vain does not yield again for three times as long, so that repeated
# requests for another model cost it a quarter of its time at most.
SPARED_TIMES = 3
RECENT_S = 10.0  # an idle model used within it will probably be used again soon
CLOCK_SLACK_S = 0.001  # the loop's clock may be behind


class Abandoned(Exception):
    """The model was unloaded, or an adapter gave its base back, while it waited for room."""


class Room(Generic[M]):
    """The places and bytes of loaded models. A pinned model is never evicted.

    `is_current` returns False for a model that the current catalog lacks, or would load
    differently: it leaves with its last lease.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        max_models: int,
        wait_s: float,
        is_pinned: Callable[[Entry[M]], bool],
        is_current: Callable[[Entry[M]], bool],
    ) -> None:
        self._budget = budget
        self._max_models = max_models
        self._wait_s = wait_s
        self._is_pinned = is_pinned
        self._is_current = is_current
        self._queue: list[Entry[M]] = []  # holding or waiting, in the order they are served
        self._refusals: dict[str, tuple[int, float]] = {}  # by model: how many, and the last
        self._rows_held_since: float | None = None
        self._rows_spared_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        budget.listen(self._update)

    @contextlib.asynccontextmanager
    async def hold(self, entry: Entry[M], nbytes: int) -> AsyncIterator[Share]:
        """Hold a place and `nbytes` while entered, evicting other models if need be.

        Raises InsufficientMemory if there can never be room, NoRoom if there is none in time, and
        Abandoned if the model is unloaded or withdrawn meanwhile. The successor of an evicted model
        waits as long as it has callers, who had been admitted before.
        """
        entry.needed_bytes = nbytes
        entry.admission = admission = asyncio.get_running_loop().create_future()
        self._queue.append(entry)
        try:
            self.notify()
            wait_s = self._patience_s(entry)
            while not admission.done():
                await asyncio.wait([admission], timeout=wait_s)
                if not (entry.is_successor and entry.waiting_callers):
                    break
            yield self._take_share(entry, admission)
        finally:
            admission.cancel()
            self._queue.remove(entry)
            if entry.share is not None:
                entry.share.release()
            self.notify()

    def clear(self, nbytes: int, is_pressing: bool) -> None:
        """Evict idle models, least recently used first, if that frees `nbytes`; else none.

        Models used in the last RECENT_S stay unless `is_pressing`, as they would probably be
        loaded again at once.
        """
        residents = {each: self._resident(each) for each in self._queue}
        leaving = [each for each in residents.values() if each.phase is Phase.LEAVING]
        missing = nbytes - self._budget.free_bytes - sum(each.nbytes for each in leaving)
        idle = {
            each: resident
            for each, resident in residents.items()
            if resident.phase is Phase.IDLE and not resident.is_pinned
        }
        old = {
            each: resident
            for each, resident in idle.items()
            if is_pressing or resident.last_used + RECENT_S <= clock.now()
        }
        if missing <= sum(each.nbytes for each in old.values()):
            for each in pick(old, places=0, nbytes=missing):
                _evict(each)
        elif missing <= sum(each.nbytes for each in idle.values()):
            self._schedule_update([each.last_used + RECENT_S for each in idle])

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models without this one."""
        return sum(
            each.nbytes for each in self._queue if each.spec.id != without and self._is_pinned(each)
        )

    def notify(self) -> None:
        """Wake waiting models and rows, as a model may have become idle or been freed."""
        self._budget.notify()

    def _take_share(self, entry: Entry[M], admission: asyncio.Future[None]) -> Share:
        if admission.done():
            admission.result()
        if entry.share is not None:
            return entry.share
        if entry.state is State.LEAVING:
            raise Abandoned
        refusals, _ = self._refusals.get(entry.spec.id, (0, 0.0))
        self._refusals[entry.spec.id] = (refusals + 1, clock.now())
        users = [each.spec.id for each in self._queue if each is not entry and each.leases]
        raise NoRoom(entry.spec.id, users)

    def _patience_s(self, entry: Entry[M]) -> float:
        refusals, last = self._refusals.get(entry.spec.id, (0, 0.0))
        return patience_s(self._wait_s, refusals, clock.now() - last)

    def _update(self) -> None:
        """Make a plan for the present state, and carry it out."""
        self._refuse_impossible()
        now = clock.now()
        plan = make_plan(
            {each: self._resident(each) for each in self._queue},
            max_models=self._max_models,
            free_bytes=self._budget.free_bytes,
            rows_bytes=self._rows_bytes(),
            may_hold_rows=self._rows_spared_until <= now,
        )
        for each in plan.withdrawn:
            each.move_to(State.LEAVING)
            _end_wait(each)
        for each in plan.leaving:
            _evict(each)
        for each in plan.admitted:
            self._admit(each)
        is_in_vain = not (plan.admitted or plan.leaving)
        self._hold_back(plan, is_in_vain=is_in_vain)
        self._hold_rows(plan.claimed_bytes, is_in_vain=is_in_vain)
        if plan.recalls:
            self._budget.recall()
        if any(each.is_waiting for each in self._queue):
            times = [each.spared_until for each in self._queue]
            if self._rows_held_since is not None:
                times.append(self._rows_held_since + self._wait_s)
            self._schedule_update([*times, self._rows_spared_until])

    def _resident(self, each: Entry[M]) -> Resident:
        phase = self._phase(each)
        return Resident(
            phase,
            each.needed_bytes or 0 if phase is Phase.WAITING else each.nbytes,
            each.last_used,
            is_pinned=self._is_pinned(each),
            is_requested=each.waiting_callers > 0,
            is_yielding=each.state is State.YIELDING,
            # An adapter's callers hold its base: they wait for that, and before they have it.
            may_yield=each.spared_until <= clock.now() and each.base is None,
            base=each.base,
            is_base_open=each.base is None or each.base.is_open,
        )

    def _phase(self, each: Entry[M]) -> Phase:
        if each.is_leaving:
            return Phase.LEAVING
        if each.is_waiting:
            is_over = each.admission is None or each.admission.done()
            return Phase.LEAVING if is_over else Phase.WAITING
        if not each.is_loaded:
            return Phase.LOADING
        if each.state is State.RETIRING or not self._is_current(each):
            return Phase.RETIRING
        return Phase.BUSY if each.leases else Phase.IDLE

    def _rows_bytes(self) -> int:
        """Return the bytes of rows and of cached prefixes."""
        held = self._budget.limit_bytes - self._budget.free_bytes
        return max(0, held - sum(each.nbytes for each in self._queue))

    def _admit(self, entry: Entry[M]) -> None:
        assert entry.needed_bytes is not None
        entry.share = self._budget.share()
        entry.share.resize(entry.needed_bytes)
        entry.admitted_at = clock.now()
        self._refusals.pop(entry.spec.id, None)
        _end_wait(entry)

    def _hold_back(self, plan: Plan[Entry[M]], *, is_in_vain: bool) -> None:
        """Make new callers of yielding models wait, and admit those of the others."""
        now = clock.now()
        for each in self._queue:
            if each in plan.yielding and each.state is State.READY:
                each.move_to(State.YIELDING)
                each.yielding_since = now
            elif each not in plan.yielding and each.state is State.YIELDING:
                if is_in_vain:
                    each.spared_until = now + SPARED_TIMES * (now - each.yielding_since)
                each.move_to(State.READY)

    def _hold_rows(self, nbytes: int, *, is_in_vain: bool) -> None:
        """Keep bytes that a model waits for from new rows, for at most `wait_s`."""
        now = clock.now()
        if nbytes and self._rows_held_since is None:
            self._rows_held_since = now
        since = self._rows_held_since
        is_too_long = since is not None and now - since >= self._wait_s
        if since is not None and (not nbytes or is_too_long):
            self._rows_held_since = None
            if is_in_vain:
                self._rows_spared_until = now + SPARED_TIMES * (now - since)
            nbytes = 0
        self._budget.claim(nbytes)

    def _schedule_update(self, times: Sequence[float]) -> None:
        """Plan again at the first of these times that is in the future."""
        now = clock.now()
        if not (future := [each for each in times if each > now]):
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + min(future) - now + CLOCK_SLACK_S
        if self._timer is not None:
            if loop.time() < self._timer.when() <= when and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self.notify)

    def _refuse_impossible(self) -> None:
        for entry in self._queue:
            if entry.is_waiting and entry.admission is not None and not entry.admission.done():
                if entry.state is State.LEAVING:
                    _end_wait(entry)
                elif (error := self._find_obstacle(entry)) is not None:
                    entry.admission.set_exception(error)

    def _find_obstacle(self, entry: Entry[M]) -> GatewayError | None:
        """Return why a model can never be loaded while the pinned ones are, or None if it can."""
        pinned = [
            each
            for each in self._queue
            if not each.is_waiting and (self._is_pinned(each) or each is entry.base)
        ]
        allowed = self._budget.limit_bytes - sum(each.nbytes for each in pinned)
        if (nbytes := entry.needed_bytes or 0) > allowed:
            beside = (
                "those that are pinned" if entry.base is None else "its base and what is pinned"
            )
            suffix = f" beside {beside}" if pinned else ""
            return InsufficientMemory(
                entry.spec.id,
                f"it needs {human_bytes(nbytes)}, and {human_bytes(allowed)} are allowed{suffix}.",
            )
        places = sum(each.base is None for each in pinned)
        if entry.base is None and places >= self._max_models:
            return InsufficientMemory(
                entry.spec.id, f"all {self._max_models} places are held by models that are pinned."
            )
        return None


def _evict(entry: Entry[M]) -> None:
    entry.move_to(State.LEAVING)
    metrics.of(metrics.EVICTIONS, entry.spec.id).inc()


def _end_wait(entry: Entry[M]) -> None:
    if entry.admission is not None and not entry.admission.done():
        entry.admission.set_result(None)
