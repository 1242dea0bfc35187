"""Which models hold memory and which wait for it: in order of arrival, idle ones give way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

from gateway import clock
from gateway.errors import GatewayError, InsufficientMemory, NoRoom
from gateway.serving.budget import Budget, Share
from gateway.serving.models.entry import Entry, State
from gateway.serving.models.eviction import (
    Plan,
    Resident,
    Standing,
    make_plan,
    patience_s,
    pick,
)

M = TypeVar("M")

# A model that yielded in vain does not yield again for three times as long, so that a model that
# is asked for again and again costs its neighbours a quarter of their time at most.
TIMES_IN_PEACE = 3
RECENT_S = 10.0  # an idle model used within it will probably be used again soon
A_MOMENT_S = 0.001  # clocks are not exact


class Abandoned(Exception):
    """The model was unloaded, or lost its last caller, while it waited for room."""


class Room(Generic[M]):
    """Places and bytes for models. A pinned model is never evicted.

    `is_current` returns False for a model that the catalog in force lacks, or would load
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
        self._refusals: dict[str, tuple[int, float]] = {}  # in a row, by model, and the last
        self._rows_held_since: float | None = None
        self._rows_spared_until = 0.0
        self._again: asyncio.TimerHandle | None = None
        budget.listen(self._settle)

    @contextlib.asynccontextmanager
    async def hold(self, mine: Entry[M], nbytes: int) -> AsyncIterator[Share]:
        """Hold a place and `nbytes`, evicting other models if need be.

        Raises InsufficientMemory if they can never be had, NoRoom if the models in use do not
        give way in time, and Abandoned if it is unloaded meanwhile. The successor of an evicted
        model waits as long as it has callers: they did not ask for the eviction.
        """
        mine.needed_bytes = nbytes
        mine.admitted = admitted = asyncio.get_running_loop().create_future()
        self._queue.append(mine)
        try:
            self.announce()
            waits_s = self._patience_s(mine)
            while not admitted.done():
                await asyncio.wait([admitted], timeout=waits_s)
                if not (mine.is_successor and mine.asked):
                    break
            yield self._grant(mine, admitted)
        finally:
            admitted.cancel()
            self._queue.remove(mine)
            if mine.share is not None:
                mine.share.release()
            self.announce()

    def clear(self, nbytes: int, is_pressing: bool) -> None:
        """Evict idle models, least recently used first, if that frees `nbytes`.

        Otherwise none is evicted. Those used in the last RECENT_S stay unless `is_pressing`, as
        they would be loaded again at once.
        """
        residents = {each: self._resident(each) for each in self._queue}
        leaving = [each for each in residents.values() if each.standing is Standing.LEAVING]
        lacking = nbytes - self._budget.free_bytes - sum(each.nbytes for each in leaving)
        idle = {
            each: resident
            for each, resident in residents.items()
            if resident.standing is Standing.IDLE and not resident.is_pinned
        }
        old = {
            each: resident
            for each, resident in idle.items()
            if is_pressing or resident.last_used + RECENT_S <= clock.now()
        }
        if lacking <= sum(each.nbytes for each in old.values()):
            for each in pick(old, places=0, nbytes=lacking):
                each.to(State.LEAVING)
        elif lacking <= sum(each.nbytes for each in idle.values()):
            self._look_again([each.last_used + RECENT_S for each in idle])

    def pinned_bytes(self, *, beside: str) -> int:
        """Return the bytes of pinned models, without the one of this id."""
        return sum(
            each.nbytes for each in self._queue if each.spec.id != beside and self._is_pinned(each)
        )

    def announce(self) -> None:
        """Wake waiting models and rows, as a model may have become idle or been freed."""
        self._budget.announce()

    def _grant(self, mine: Entry[M], admitted: asyncio.Future[None]) -> Share:
        if admitted.done():
            admitted.result()
        if mine.share is not None:
            return mine.share
        if mine.state is State.LEAVING:
            raise Abandoned
        refusals, _ = self._refusals.get(mine.spec.id, (0, 0.0))
        self._refusals[mine.spec.id] = (refusals + 1, clock.now())
        raise NoRoom(mine.spec.id, self._users(mine))

    def _users(self, mine: Entry[M]) -> list[str]:
        return [each.spec.id for each in self._queue if each is not mine and each.leases]

    def _patience_s(self, mine: Entry[M]) -> float:
        refusals, last = self._refusals.get(mine.spec.id, (0, 0.0))
        return patience_s(self._wait_s, refusals, clock.now() - last)

    def _settle(self) -> None:
        """Make a plan for this moment, and carry it out."""
        self._refuse_the_impossible()
        now = clock.now()
        plan = make_plan(
            {each: self._resident(each) for each in self._queue},
            max_models=self._max_models,
            free_bytes=self._budget.free_bytes,
            rows_bytes=self._rows_bytes(),
            may_hold_rows=self._rows_spared_until <= now,
        )
        for each in plan.leaving:
            each.to(State.LEAVING)
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
            self._look_again([*times, self._rows_spared_until])

    def _resident(self, each: Entry[M]) -> Resident:
        standing = self._standing(each)
        return Resident(
            standing,
            each.needed_bytes or 0 if standing is Standing.WAITING else each.nbytes,
            each.last_used,
            is_pinned=self._is_pinned(each),
            is_asked=each.asked > 0,
            is_yielding=each.state is State.YIELDING,
            may_yield=each.spared_until <= clock.now(),
        )

    def _standing(self, each: Entry[M]) -> Standing:
        if each.is_leaving:
            return Standing.LEAVING
        if each.is_waiting:
            is_over = each.admitted is None or each.admitted.done()
            return Standing.LEAVING if is_over else Standing.WAITING
        if not each.is_loaded:
            return Standing.COMING
        if each.state is State.RETIRING or not self._is_current(each):
            return Standing.RETIRING
        return Standing.BUSY if each.leases else Standing.IDLE

    def _rows_bytes(self) -> int:
        """Return the bytes of rows and of kept prefixes."""
        held = self._budget.limit_bytes - self._budget.free_bytes
        return max(0, held - sum(each.nbytes for each in self._queue))

    def _admit(self, mine: Entry[M]) -> None:
        assert mine.needed_bytes is not None
        mine.share = self._budget.share()
        mine.share.state(mine.needed_bytes)
        mine.resumed = clock.now()
        self._refusals.pop(mine.spec.id, None)
        _settle_admission(mine)

    def _hold_back(self, plan: Plan[Entry[M]], *, is_in_vain: bool) -> None:
        """Make new callers wait for the yielding models, and let in those of the others."""
        now = clock.now()
        for each in self._queue:
            if each in plan.yielding and each.state is State.READY:
                each.to(State.YIELDING)
                each.yielding_since = now
            elif each not in plan.yielding and each.state is State.YIELDING:
                if is_in_vain:
                    each.spared_until = now + TIMES_IN_PEACE * (now - each.yielding_since)
                each.to(State.READY)

    def _hold_rows(self, nbytes: int, *, is_in_vain: bool) -> None:
        """Reserve bytes that a model waits for from new rows, for at most `wait_s`."""
        now = clock.now()
        if nbytes and self._rows_held_since is None:
            self._rows_held_since = now
        since = self._rows_held_since
        is_too_long = since is not None and now - since >= self._wait_s
        if since is not None and (not nbytes or is_too_long):
            self._rows_held_since = None
            if is_in_vain:
                self._rows_spared_until = now + TIMES_IN_PEACE * (now - since)
            nbytes = 0
        self._budget.claim(nbytes)

    def _look_again(self, times: Sequence[float]) -> None:
        """Plan again at the first of these times that is still to come."""
        now = clock.now()
        if not (coming := [each for each in times if each > now]):
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + min(coming) - now + A_MOMENT_S
        if self._again is not None:
            if loop.time() < self._again.when() <= when and not self._again.cancelled():
                return
            self._again.cancel()
        self._again = loop.call_at(when, self.announce)

    def _refuse_the_impossible(self) -> None:
        for mine in self._queue:
            if mine.is_waiting and mine.admitted is not None and not mine.admitted.done():
                if mine.state is State.LEAVING:
                    _settle_admission(mine)
                elif (error := self._impossible(mine)) is not None:
                    mine.admitted.set_exception(error)

    def _impossible(self, mine: Entry[M]) -> GatewayError | None:
        """Return why it can never be loaded beside the pinned models, or None if it can."""
        pinned = [each for each in self._queue if not each.is_waiting and self._is_pinned(each)]
        allowed = self._budget.limit_bytes - sum(each.nbytes for each in pinned)
        if (nbytes := mine.needed_bytes or 0) > allowed:
            beside = " beside those that are pinned" if pinned else ""
            return InsufficientMemory(
                mine.spec.id, f"it needs {nbytes:,} bytes, and {allowed:,} are allowed{beside}."
            )
        if len(pinned) >= self._max_models:
            return InsufficientMemory(
                mine.spec.id, f"all {self._max_models} places are held by models that are pinned."
            )
        return None


def _settle_admission(mine: Entry[M]) -> None:
    if mine.admitted is not None and not mine.admitted.done():
        mine.admitted.set_result(None)
