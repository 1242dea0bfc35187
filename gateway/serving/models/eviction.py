"""Places and bytes for loaded models: which models hold them, which wait in order of arrival, and
which idle ones leave for the waiting.
"""

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

RECENT_S = 10.0  # an idle model used this recently would probably be loaded again at once


class Phase(Enum):
    """The phase of a model, from its wait for room to its end."""

    WAITING = auto()  # it waits for room
    USED = auto()  # it has room, and callers, a load or a pin that forbid eviction
    IDLE = auto()  # it may be evicted
    LEAVING = auto()  # it is being freed


@dataclass(frozen=True, slots=True)
class Resident:
    """The facts of a model that the plan depends on."""

    phase: Phase
    nbytes: int  # bytes that it holds or, while it waits, needs
    last_used: float = 0.0
    is_requested: bool = True  # callers wait for it
    is_adapter: bool = False  # it takes no place

    @property
    def places(self) -> int:
        return 0 if self.is_adapter else 1


@dataclass(frozen=True, slots=True)
class EvictionPlan(Generic[K]):
    """The models to admit, evict and abandon now."""

    admitted: tuple[K, ...] = ()
    leaving: tuple[K, ...] = ()
    abandoned: tuple[K, ...] = ()  # they need the room of models in use, and have no callers
    claimed_bytes: int = 0  # bytes kept from new sequences


def make_plan(
    residents: Mapping[K, Resident],
    *,
    max_models: int,
    free_bytes: int,
    rows_bytes: int,
    prefix_bytes: int = 0,  # the part of these for kept prompts: freed when claimed
) -> EvictionPlan[K]:
    """Admit the waiting models that there is room for, in order of arrival. None overtakes another.

    For the first without room, kept prompts go, then the fewest possible idle models.
    """
    admitted: list[K] = []
    abandoned: list[K] = []
    idle = _in_phase(residents, Phase.IDLE)
    going = _in_phase(residents, Phase.LEAVING).values()
    free_places = max_models
    free_places -= sum(model.places for model in residents.values() if model.phase != Phase.WAITING)
    # Adapters come first: each holds its base, and an earlier model may wait for that to leave.
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
        # Evictions would not be enough: the model is abandoned if nobody asks for it any more.
        if not newcomer.is_requested:
            abandoned.append(key)
            continue
        # Otherwise it waits until models in use are idle. If the end of sequences makes enough
        # room, its claim keeps that room from new sequences.
        if places > 0 or nbytes > rows_bytes:
            claimed_bytes = 0
        return EvictionPlan((*admitted,), (), (*abandoned,), claimed_bytes)
    return EvictionPlan((*admitted,), (), (*abandoned,))


def pick(idle: Mapping[K, Resident], *, places: int, nbytes: int) -> list[K]:
    """Choose models that together hold `places` and `nbytes`, least recently used first; all if
    they do not.
    """
    chosen: list[K] = []
    for key, resident in sorted(idle.items(), key=lambda item: item[1].last_used):
        if places <= 0 and nbytes <= 0:
            break
        if nbytes <= 0 and resident.is_adapter:
            continue  # a place is lacking, and an adapter has none
        chosen.append(key)
        places -= resident.places
        nbytes -= resident.nbytes
    return chosen


def _in_phase(residents: Mapping[K, Resident], phase: Phase) -> dict[K, Resident]:
    return {key: resident for key, resident in residents.items() if resident.phase is phase}


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
        budget.attach(self)
        budget.listen(self._update)

    @contextlib.asynccontextmanager
    async def hold(self, entry: Entry[M], nbytes: int) -> AsyncIterator[Share]:
        """Hold a place and `nbytes` while entered, evicting idle models if need be.

        Waits as long as the model has callers. Raises InsufficientMemory if there can never be
        room, and Abandoned.
        """
        if nbytes < 0:
            raise ValueError(f"a model of {nbytes} bytes")
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
        """Evict idle models, least recently used first, if that frees `nbytes`; else none.

        Models used in the last RECENT_S stay unless `is_pressing`.
        """
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
        """Return the bytes of all pinned models but this one."""
        return sum(
            entry.nbytes
            for entry in self._queue
            if entry.spec.id != without and self._is_pinned(entry)
        )

    def model_bytes(self) -> int:
        """Return the bytes of all models, without those of sequences and kept prompts."""
        return sum(entry.nbytes for entry in self._queue)

    def users(self) -> list[str]:
        """Return the models that are in use."""
        return [entry.spec.id for entry in self._queue if entry.share is not None and entry.leases]

    def notify(self) -> None:
        """Wake waiting models and sequences, as a model may have become idle or been freed."""
        self._budget.notify()

    def _update(self) -> None:
        """Make a plan for the present state, and carry it out."""
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
        if entry.is_leaving or entry.share is None:  # no share: it was refused room
            return Phase.LEAVING
        if entry.state is not State.READY or entry.leases or self._is_pinned(entry):
            return Phase.USED
        return Phase.IDLE

    def _rows_bytes(self) -> int:
        """Return the bytes of sequences and of cached prefixes."""
        used_bytes = self._budget.limit_bytes - self._budget.free_bytes
        return max(0, used_bytes - self.model_bytes())

    def _admit(self, entry: Entry[M]) -> None:
        assert entry.admission is not None
        assert entry.needed_bytes is not None
        entry.share = self._budget.share()
        # Settled first: a listener of the budget must not admit it again.
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
        """Return the error of a model that can never have room beside pinned ones, else None."""
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
