"""Decides which models are admitted, leave or yield while some wait for room; no side effects."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Generic, TypeVar

K = TypeVar("K")

FORGET_S = 600.0  # refusals longer ago than this do not count


class Phase(Enum):
    """Where a model is between its wait for room and its end."""

    WAITING = auto()  # for room
    LOADING = auto()  # it has its room
    IDLE = auto()
    BUSY = auto()
    RETIRING = auto()  # in use; it leaves with its last lease
    LEAVING = auto()  # being freed


@dataclass(frozen=True, slots=True)
class Resident:
    """What the plan depends on of a model; `nbytes` is what it holds or, while it waits, needs.

    `is_requested`: callers wait for it. `may_yield`: its own callers may be made to wait. `base` is
    the key of the model that it is an adapter of; `is_base_open` is False if that was unloaded.
    """

    phase: Phase
    nbytes: int
    last_used: float = 0.0
    is_pinned: bool = False
    is_requested: bool = True
    is_yielding: bool = False
    may_yield: bool = True
    base: Hashable | None = None
    is_base_open: bool = True

    @property
    def places(self) -> int:
        """Return the places it takes: none if it is an adapter."""
        return 1 if self.base is None else 0


@dataclass(frozen=True, slots=True)
class Plan(Generic[K]):
    """What to do now.

    `yielding` are all models whose new callers wait until they are idle. `withdrawn` are waiting
    adapters that give their base back, and are asked for again. `claimed_bytes` are kept from new
    rows. `recalls`: cached prefixes have to be freed.
    """

    admitted: tuple[K, ...] = ()
    leaving: tuple[K, ...] = ()
    yielding: frozenset[K] = frozenset()
    withdrawn: tuple[K, ...] = ()
    claimed_bytes: int = 0
    recalls: bool = False


@dataclass(slots=True)
class _Room:
    """Free places and bytes, or missing ones below 0."""

    places: int
    nbytes: int

    @property
    def is_enough(self) -> bool:
        return self.places >= 0 and self.nbytes >= 0

    def with_these(self, residents: Iterable[Resident], nbytes: int = 0) -> "_Room":
        """Add the places and bytes of these models, and so many bytes more."""
        places, held = _sizes(residents)
        return _Room(self.places + places, self.nbytes + held + nbytes)

    def without_these(self, residents: Iterable[Resident]) -> "_Room":
        """Take the places and bytes of these models away."""
        places, held = _sizes(residents)
        return _Room(self.places - places, self.nbytes - held)


def make_plan(
    residents: Mapping[K, Resident],
    *,
    max_models: int,
    free_bytes: int,
    rows_bytes: int,
    may_hold_rows: bool = True,
) -> Plan[K]:
    """Plan for waiting models in order of arrival: adapters first, those without callers last.

    Adapters hold their base while they wait, so a model that waits for the base waits for them too.
    None can keep it out: new callers of an adapter wait for a base that yields, and an adapter that
    lacks room itself is withdrawn from such a base, or two would wait for each other's.

    For each there are five cases:
    1. There is room: it is admitted.
    2. There is with idle models' room: the fewest possible of them leave.
    3. There will be with the bytes of rows, as they end, and of retiring models: those bytes are
       kept from new rows, and no model leaves yet.
    4. There would be with models in use: those yield, and no model leaves until all can.
    5. There would not be even then: nothing is done.
    """
    held = {key: each for key, each in residents.items() if each.phase is not Phase.WAITING}
    free = _Room(max_models - sum(each.places for each in held.values()), free_bytes)
    leaving = [each for each in held.values() if each.phase is Phase.LEAVING]
    retiring = {key: each for key, each in held.items() if each.phase is Phase.RETIRING}
    idle = _movable(held, Phase.IDLE)
    busy = {key: each for key, each in _movable(held, Phase.BUSY).items() if each.may_yield}
    used = [each for each in held.values() if each.phase in (Phase.LOADING, Phase.BUSY)]
    rows_bytes = rows_bytes if may_hold_rows else 0

    admitted: list[K] = []
    evicted: list[K] = []
    withdrawn: list[K] = []
    yielding: set[K] = set()
    kept: set[Hashable] = set()  # bases of adapters that room is being made for
    stuck: list[tuple[K, Resident]] = []
    promised: list[Resident] = []
    recalls, claimed = False, 0
    for key, mine in _in_order(residents):
        if mine.base in yielding:
            withdrawn.append(key)
            continue
        promised.append(mine)
        now = free.without_these(promised)
        if now.is_enough:
            admitted.append(key)
            continue
        soon = now.with_these(leaving)
        if soon.with_these(idle.values()).is_enough:
            for each in pick(idle, places=-soon.places, nbytes=-soon.nbytes):
                leaving.append(idle.pop(each))
                evicted.append(each)
            claimed = max(claimed, free.nbytes - now.with_these(leaving).nbytes)
            continue
        if not (mine.is_requested and mine.is_base_open):
            promised.pop()
            withdrawn += [] if mine.base is None else [key]
            continue
        without_rows = soon.with_these([*idle.values(), *_without(retiring, {mine.base}).values()])
        recalls = recalls or without_rows.nbytes < 0
        later = without_rows.with_these([], rows_bytes)
        if later.is_enough:
            if without_rows.nbytes < 0:
                claimed = max(claimed, free.nbytes - without_rows.nbytes)
            kept.add(mine.base)
            continue
        others = busy if mine.base is None else _without(busy, {mine.base, *kept})
        givers = _with_adapters(others, [*used, *promised])
        if later.with_these(givers.values()).is_enough:
            yielding |= set(pick(givers, places=-later.places, nbytes=-later.nbytes))
            kept.add(mine.base)
        else:
            stuck.append((key, mine))
    withdrawn += [key for key, mine in stuck if mine.base in yielding]
    return Plan(
        tuple(admitted), tuple(evicted), frozenset(yielding), tuple(withdrawn), claimed, recalls
    )


def pick(held: Mapping[K, Resident], *, places: int, nbytes: int) -> list[K]:
    """Choose models that together hold `places` and `nbytes`, or all if they do not.

    Yielding models come first, then the least recently used.
    """
    chosen: list[K] = []
    for each in sorted(held, key=lambda each: (not held[each].is_yielding, held[each].last_used)):
        if places <= 0 and nbytes <= 0:
            break
        if nbytes <= 0 and not held[each].places:
            continue
        chosen.append(each)
        places -= held[each].places
        nbytes -= held[each].nbytes
    return chosen


def patience_s(wait_s: float, refusals: int, since_s: float) -> float:
    """Return how long a model waits for room after `refusals`, the last of them `since_s` ago.

    Each one doubles it, so a model whose neighbours' answers take longer than `wait_s` is loaded
    in the end, and one that is requested rarely delays them by `wait_s` at most.
    """
    return wait_s * 2 ** min(refusals, 10) if since_s < FORGET_S else wait_s


def _movable(held: Mapping[K, Resident], phase: Phase) -> dict[K, Resident]:
    return {key: each for key, each in held.items() if each.phase is phase and not each.is_pinned}


def _without(held: Mapping[K, Resident], left: Set[Hashable]) -> dict[K, Resident]:
    return {key: each for key, each in held.items() if key not in left}


def _in_order(residents: Mapping[K, Resident]) -> list[tuple[K, Resident]]:
    waiting = [pair for pair in residents.items() if pair[1].phase is Phase.WAITING]
    return sorted(waiting, key=lambda pair: (pair[1].base is None, not pair[1].is_requested))


def _with_adapters(bases: Mapping[K, Resident], adapters: Iterable[Resident]) -> dict[K, Resident]:
    """Add to each model what its adapters hold: they are idle when it is."""
    parts: Counter[Hashable] = Counter()
    for each in adapters:
        parts[each.base] += each.nbytes
    return {key: replace(each, nbytes=each.nbytes + parts[key]) for key, each in bases.items()}


def _sizes(residents: Iterable[Resident]) -> tuple[int, int]:
    """Return the sum of these models' places and that of their bytes."""
    sizes = [(each.places, each.nbytes) for each in residents]
    return sum(places for places, _ in sizes), sum(nbytes for _, nbytes in sizes)
