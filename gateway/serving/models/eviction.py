"""Who is let in, who leaves and who yields, when models wait for room: a decision, no doing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

K = TypeVar("K")

FORGET_S = 600.0  # a model that was refused longer ago than this waits as one that never was


class Standing(Enum):
    """What a model is doing with its place, or for want of one."""

    WAITING = auto()  # for room
    COMING = auto()  # it has its room, and is being loaded
    IDLE = auto()
    BUSY = auto()
    RETIRING = auto()  # in use, and it leaves with its last lease
    LEAVING = auto()  # being freed now


@dataclass(frozen=True, slots=True)
class Resident:
    """A model as the decision sees it; `nbytes` is what it holds or, while it waits, needs.

    `is_asked`: callers wait for it. `may_yield`: its own callers may be made to wait.
    """

    standing: Standing
    nbytes: int
    last_used: float = 0.0
    is_pinned: bool = False
    is_asked: bool = True
    is_yielding: bool = False
    may_yield: bool = True


@dataclass(frozen=True, slots=True)
class Plan(Generic[K]):
    """What is to be done.

    `yielding` lists every model whose new callers wait, so that it empties; `claimed_bytes` are
    not for new rows; `recalls`: what is kept to save time alone has to go.
    """

    admitted: tuple[K, ...] = ()
    leaving: tuple[K, ...] = ()
    yielding: frozenset[K] = frozenset()
    claimed_bytes: int = 0
    recalls: bool = False


@dataclass(slots=True)
class _Room:
    """Places and bytes: free ones, or, below 0, those that are lacking."""

    places: int
    nbytes: int

    @property
    def is_enough(self) -> bool:
        return self.places >= 0 and self.nbytes >= 0

    def with_these(self, residents: Iterable[Resident], nbytes: int = 0) -> "_Room":
        """Add what these would give back, and so many bytes."""
        given = [each.nbytes for each in residents]
        return _Room(self.places + len(given), self.nbytes + sum(given) + nbytes)


def make_plan(
    residents: Mapping[K, Resident],
    *,
    max_models: int,
    free_bytes: int,
    rows_bytes: int,
    may_hold_rows: bool = True,
) -> Plan[K]:
    """Decide for models in the order in which they came.

    Who waits is served in turn, those nobody asks for any more last. There are four cases:
    1. There is room: it is let in.
    2. Idle models suffice: as few of them leave as need be.
    3. They will suffice with the bytes that rows give back one by one, and with models that leave
       anyway: no new row takes those bytes, and nobody leaves yet.
    4. They would suffice with models in use: those yield, and nobody leaves before all can.
    Where even that does not suffice, nothing is done: it would be for nothing.
    """
    held = {key: each for key, each in residents.items() if each.standing is not Standing.WAITING}
    free = _Room(max_models - len(held), free_bytes)
    leaving = [each for each in held.values() if each.standing is Standing.LEAVING]
    retiring = [each for each in held.values() if each.standing is Standing.RETIRING]
    idle = _movable(held, Standing.IDLE)
    busy = {key: each for key, each in _movable(held, Standing.BUSY).items() if each.may_yield}
    rows_bytes = rows_bytes if may_hold_rows else 0

    admitted: list[K] = []
    sent_away: list[K] = []
    yielding: set[K] = set()
    recalls, claimed, promised = False, 0, _Room(0, 0)
    for key, mine in _in_turn(residents):
        promised = _Room(promised.places + 1, promised.nbytes + mine.nbytes)
        now = _Room(free.places - promised.places, free.nbytes - promised.nbytes)
        if now.is_enough:
            admitted.append(key)
            continue
        soon = now.with_these(leaving)
        if soon.with_these(idle.values()).is_enough:
            for each in pick(idle, places=-soon.places, nbytes=-soon.nbytes):
                leaving.append(idle.pop(each))
                sent_away.append(each)
            claimed = max(claimed, free.nbytes - now.with_these(leaving).nbytes)
            continue
        if not mine.is_asked:
            continue
        without_rows = soon.with_these([*idle.values(), *retiring])
        recalls = recalls or without_rows.nbytes < 0
        later = without_rows.with_these([], rows_bytes)
        if later.is_enough:
            if without_rows.nbytes < 0:
                claimed = max(claimed, free.nbytes - without_rows.nbytes)
        elif later.with_these(busy.values()).is_enough:
            yielding |= set(pick(busy, places=-later.places, nbytes=-later.nbytes))
    return Plan(tuple(admitted), tuple(sent_away), frozenset(yielding), claimed, recalls)


def pick(held: Mapping[K, Resident], *, places: int, nbytes: int) -> list[K]:
    """Choose who gives up `places` and `nbytes`, as far as these have them.

    Those that yield already before others, and among equals the one used longest ago.
    """
    chosen: list[K] = []
    for each in sorted(held, key=lambda each: (not held[each].is_yielding, held[each].last_used)):
        if places <= 0 and nbytes <= 0:
            break
        chosen.append(each)
        places -= 1
        nbytes -= held[each].nbytes
    return chosen


def patience_s(wait_s: float, refusals: int, since_s: float) -> float:
    """Return how long a model waits for room that was refused so often, last so long ago.

    Each refusal doubles it. So one whose neighbours' answers outlast `wait_s` has its turn in the
    end, and one that is asked for now and then costs its neighbours no more than `wait_s`.
    """
    return wait_s * 2 ** min(refusals, 10) if since_s < FORGET_S else wait_s


def _movable(held: Mapping[K, Resident], standing: Standing) -> dict[K, Resident]:
    return {
        key: each for key, each in held.items() if each.standing is standing and not each.is_pinned
    }


def _in_turn(residents: Mapping[K, Resident]) -> list[tuple[K, Resident]]:
    waiting = [pair for pair in residents.items() if pair[1].standing is Standing.WAITING]
    return sorted(waiting, key=lambda pair: not pair[1].is_asked)
