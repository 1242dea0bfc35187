"""Gives room to models that are to be loaded, and evicts idle models to make room."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from gateway import clock, metrics
from gateway.errors import GatewayError, InsufficientMemory
from gateway.logs import human_bytes
from gateway.serving.budget import Budget, Share
from gateway.serving.models.entry import Entry, State

K = TypeVar("K")
M = TypeVar("M")

RECENT_S = 10.0  # seconds for which an idle model is likely to be needed again


class Phase(Enum):
    """The state of a model in the plan of evictions."""

    WAITING = auto()
    USED = auto()  # has callers, is loading or is pinned
    IDLE = auto()
    LEAVING = auto()


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in the plan of evictions."""

    phase: Phase
    nbytes: int  # bytes that the model holds or, while WAITING, needs
    last_used: float = 0.0
    is_requested: bool = True
    is_adapter: bool = False  # an adapter takes bytes, but no place

    @property
    def places(self) -> int:
        return 0 if self.is_adapter else 1


@dataclass(frozen=True, slots=True)
class EvictionPlan(Generic[K]):
    """The models to admit, evict and abandon now."""

    admitted: tuple[K, ...] = ()
    leaving: tuple[K, ...] = ()
    abandoned: tuple[K, ...] = ()  # waiting models without room and without callers
    claimed_bytes: int = 0  # bytes kept from new sequences for the first waiting model


def make_plan(
    residents: Mapping[K, Resident],
    *,
    max_models: int,
    free_bytes: int,
    rows_bytes: int,
    prefix_bytes: int = 0,  # the part of `rows_bytes` in prefix pools
) -> EvictionPlan[K]:
    """Plan which waiting models to admit, in order, and which idle models to evict for them."""
    admitted: list[K] = []
    abandoned: list[K] = []
    idle = _in_phase(residents, Phase.IDLE)
    going = _in_phase(residents, Phase.LEAVING).values()
    free_places = max_models
    free_places -= sum(model.places for model in residents.values() if model.phase != Phase.WAITING)
    # A waiting adapter keeps its base in use, and an earlier model may wait for that base to leave,
    # so adapters come first.
    waiting = _in_phase(residents, Phase.WAITING).items()
    for key, newcomer in sorted(waiting, key=lambda item: not item[1].is_adapter):
        places, nbytes = newcomer.places - free_places, newcomer.nbytes - free_bytes
        if places <= 0 and nbytes <= 0:
            admitted.append(key)
            free_places -= newcomer.places
            free_bytes -= newcomer.nbytes
            continue
        places -= sum(model.places for model in going)
        nbytes -= sum(model.nbytes for model in going)
        claimed_bytes = max(0, nbytes + free_bytes)
        victims = pick(idle, places=places, nbytes=nbytes - prefix_bytes)
        victims_bytes = sum(idle[victim].nbytes for victim in victims)
        places -= sum(idle[victim].places for victim in victims)
        nbytes -= victims_bytes
        if places <= 0 and nbytes <= prefix_bytes:
            claimed_bytes = max(0, claimed_bytes - victims_bytes)
            return EvictionPlan((*admitted,), (*victims,), (*abandoned,), claimed_bytes)
        # Evicting all idle models is not enough, so a newcomer without callers is abandoned.
        if not newcomer.is_requested:
            abandoned.append(key)
            continue
        # The newcomer waits, and the bytes of running sequences are claimed if they will suffice.
        if places > 0 or nbytes > rows_bytes:
            claimed_bytes = 0
        return EvictionPlan((*admitted,), (), (*abandoned,), claimed_bytes)
    return EvictionPlan((*admitted,), (), (*abandoned,))


def pick(idle: Mapping[K, Resident], *, places: int, nbytes: int) -> list[K]:
    """Choose idle models, least recently used first, until they hold `places` and `nbytes`."""
    chosen: list[K] = []
    for key, resident in sorted(idle.items(), key=lambda item: item[1].last_used):
        if places <= 0 and nbytes <= 0:
            break
        if nbytes <= 0 and resident.is_adapter:
            continue
        chosen.append(key)
        places -= resident.places
        nbytes -= resident.nbytes
    return chosen


def _in_phase(residents: Mapping[K, Resident], phase: Phase) -> dict[K, Resident]:
    return {key: resident for key, resident in residents.items() if resident.phase is phase}


class Abandoned(Exception):
    """Raised to end a load that no caller waits for, or whose model was unloaded."""


class Room(Generic[M]):
    """Gives places and bytes to models, and evicts idle models."""

    def __init__(
        self, budget: Budget, *, max_models: int, is_pinned: Callable[[Entry[M]], bool]
    ) -> None:
        self._budget = budget
        self._max_models = max_models
        self._is_pinned = is_pinned
        self._queue: list[
            Entry[M]
        ] = []  # models that hold room or wait for it, in order of arrival
        budget.attach(self)
        budget.listen(self._update)

    @contextlib.asynccontextmanager
    async def hold(self, entry: Entry[M], nbytes: int) -> AsyncIterator[Share]:
        """Hold a place and `nbytes` while entered, after evicting idle models if necessary.

        Raises Abandoned once the waiting model has no callers, and InsufficientMemory if there can
        never be room.
        """
        if nbytes < 0:
            raise ValueError(f"a model cannot have {nbytes} bytes")
        entry.needed_bytes = nbytes
        entry.admission = asyncio.get_running_loop().create_future()
        self._queue.append(entry)
        try:
            self.notify()
            share = await entry.admission
            if share is None:
                raise Abandoned
            yield share
        finally:
            self._queue.remove(entry)
            try:
                if entry.share is not None:
                    entry.share.release()
            finally:
                self.notify()

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict the least recently used idle models until `nbytes` are free, or else none."""
        residents = self._residents()
        going = _in_phase(residents, Phase.LEAVING).values()
        missing = nbytes - self._budget.free_bytes - sum(model.nbytes for model in going)
        evictable = {
            entry: model
            for entry, model in _in_phase(residents, Phase.IDLE).items()
            if is_pressing or model.last_used + RECENT_S <= clock.now()
        }
        if missing <= sum(model.nbytes for model in evictable.values()):
            for entry in pick(evictable, places=0, nbytes=missing):
                _evict(entry)

    def pinned_bytes(self, *, without: str) -> int:
        return sum(
            entry.nbytes
            for entry in self._queue
            if entry.spec.id != without and self._is_pinned(entry)
        )

    def model_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._queue)

    def users(self) -> list[str]:
        return [entry.spec.id for entry in self._queue if entry.share is not None and entry.leases]

    def notify(self) -> None:
        """Call the budget's listeners, after a model may have become idle or left."""
        self._budget.notify()

    def _update(self) -> None:
        if not any(entry.waits_for_room for entry in self._queue):
            self._budget.claim(0)
            return
        self._refuse_impossible()
        plan = make_plan(
            self._residents(),
            max_models=self._max_models,
            free_bytes=self._budget.free_bytes,
            rows_bytes=self._rows_bytes(),
            prefix_bytes=self._budget.prefix_bytes,
        )
        for entry in plan.leaving:
            _evict(entry)
        for entry in plan.admitted:
            self._admit(entry)
        for entry in plan.abandoned:
            entry.move_to(State.LEAVING)
        self._budget.claim(plan.claimed_bytes)

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
        if entry.is_leaving or entry.share is None:
            return Phase.LEAVING
        if entry.state is not State.READY or entry.leases or self._is_pinned(entry):
            return Phase.USED
        return Phase.IDLE

    def _rows_bytes(self) -> int:
        used_bytes = self._budget.limit_bytes - self._budget.free_bytes
        return max(0, used_bytes - self.model_bytes())

    def _admit(self, entry: Entry[M]) -> None:
        assert entry.admission is not None
        assert entry.needed_bytes is not None
        entry.share = self._budget.share()
        # `resize` calls listeners, which would admit the model again if the future were not done.
        entry.admission.set_result(entry.share)
        entry.share.resize(entry.needed_bytes)

    def _refuse_impossible(self) -> None:
        for entry in self._queue:
            if not entry.waits_for_room:
                continue
            obstacle = self._find_obstacle(entry)
            if obstacle is not None:
                assert entry.admission is not None
                entry.admission.set_exception(obstacle)

    def _find_obstacle(self, entry: Entry[M]) -> GatewayError | None:
        """Return an error if the model can never have room beside the pinned models."""
        assert entry.needed_bytes is not None
        pinned = [
            other
            for other in self._queue
            if other.share is not None and (self._is_pinned(other) or other is entry.base)
        ]
        allowed = self._budget.limit_bytes - sum(other.nbytes for other in pinned)
        if entry.needed_bytes > allowed:
            suffix = ""
            if entry.base is not None:
                suffix = " beside its base and the pinned models"
            elif pinned:
                suffix = " beside the pinned models"
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
