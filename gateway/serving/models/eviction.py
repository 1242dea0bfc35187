"""Decides which waiting models are admitted and which idle ones leave for them; a pure function."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

K = TypeVar("K")


class Phase(Enum):
    """Where a model is between its wait for room and its end."""

    WAITING = auto()  # for room
    USED = auto()  # it has room, and callers, a load or a pin that forbid eviction
    IDLE = auto()  # it may be evicted
    LEAVING = auto()  # being freed


@dataclass(frozen=True, slots=True)
class Resident:
    """What the plan depends on of a model."""

    phase: Phase
    nbytes: int  # that it holds or, while it waits, needs
    last_used: float = 0.0
    is_requested: bool = True  # callers wait for it
    is_adapter: bool = False  # it takes no place

    @property
    def places(self) -> int:
        return 0 if self.is_adapter else 1


@dataclass(frozen=True, slots=True)
class Plan(Generic[K]):
    """What to do now."""

    admitted: tuple[K, ...] = ()
    leaving: tuple[K, ...] = ()
    abandoned: tuple[K, ...] = ()  # they need the room of models in use, and have no callers
    claimed_bytes: int = 0  # kept from new rows
    recalls: bool = False  # cached prefixes have to be freed


@dataclass(frozen=True, slots=True)
class _Space:
    """Free places and bytes, or missing ones below 0."""

    places: int
    nbytes: int

    @property
    def is_enough(self) -> bool:
        return self.places >= 0 and self.nbytes >= 0

    def plus(self, *residents: Resident) -> "_Space":
        places, nbytes = _sizes(residents)
        return _Space(self.places + places, self.nbytes + nbytes)

    def minus(self, *residents: Resident) -> "_Space":
        places, nbytes = _sizes(residents)
        return _Space(self.places - places, self.nbytes - nbytes)


def make_plan(
    residents: Mapping[K, Resident], *, max_models: int, free_bytes: int, rows_bytes: int
) -> Plan[K]:
    """Plan for the waiting models in order of arrival. None overtakes another: what the first
    waits for is not given to the second.

    For each there are four cases:
    1. There is room: it is admitted.
    2. There is with idle models' room: the fewest possible of them leave.
    3. There is not, and nobody asks for it any more: it is abandoned.
    4. There is not, but it has callers: it waits until models in use are idle. Prefixes are freed.
       If the end of rows makes enough room, no new ones take it.
    """
    admitted: list[K] = []
    leaving: list[K] = []
    abandoned: list[K] = []
    claimed_bytes, recalls = 0, False
    idle = _in_phase(residents, Phase.IDLE)
    places = sum(each.places for each in residents.values() if each.phase is not Phase.WAITING)
    free = _Space(max_models - places, free_bytes)
    soon = free.plus(*_in_phase(residents, Phase.LEAVING).values())
    for key, newcomer in _in_order(residents):
        # Both count what is promised to those before it.
        free, soon = free.minus(newcomer), soon.minus(newcomer)
        cleared = soon.plus(*idle.values())
        if free.is_enough:
            admitted.append(key)
        elif cleared.is_enough:
            for victim in pick(idle, places=-soon.places, nbytes=-soon.nbytes):
                leaving.append(victim)
                soon = soon.plus(idle.pop(victim))
            claimed_bytes = max(claimed_bytes, free_bytes - soon.nbytes)
        elif not newcomer.is_requested:
            abandoned.append(key)
            free, soon = free.plus(newcomer), soon.plus(newcomer)
        else:
            recalls = recalls or cleared.nbytes < 0
            if _Space(cleared.places, cleared.nbytes + rows_bytes).is_enough:
                claimed_bytes = max(claimed_bytes, free_bytes - soon.nbytes)
    return Plan(tuple(admitted), tuple(leaving), tuple(abandoned), claimed_bytes, recalls)


def pick(idle: Mapping[K, Resident], *, places: int, nbytes: int) -> list[K]:
    """Choose models that together hold `places` and `nbytes`, least recently used first; all if
    they do not.
    """
    chosen: list[K] = []
    for key, resident in sorted(idle.items(), key=lambda item: item[1].last_used):
        if places <= 0 and nbytes <= 0:
            break
        if nbytes <= 0 and resident.is_adapter:
            continue  # a place is lacking, and it has none
        chosen.append(key)
        places -= resident.places
        nbytes -= resident.nbytes
    return chosen


def _in_phase(residents: Mapping[K, Resident], phase: Phase) -> dict[K, Resident]:
    return {key: resident for key, resident in residents.items() if resident.phase is phase}


def _in_order(residents: Mapping[K, Resident]) -> list[tuple[K, Resident]]:
    # Adapters first: each holds its base, for which a model before it may wait.
    waiting = _in_phase(residents, Phase.WAITING).items()
    return sorted(waiting, key=lambda item: not item[1].is_adapter)


def _sizes(residents: Iterable[Resident]) -> tuple[int, int]:
    sizes = [(resident.places, resident.nbytes) for resident in residents]
    return sum(places for places, _ in sizes), sum(nbytes for _, nbytes in sizes)
