"""Which replica answers a request: a decision from numbers, without Ray.

1. Who keeps the response that the request goes on from has it alone.
2. Else those that have the model loaded, and among them the one that keeps the longest beginning of
   the conversation; of several, the one with the fewest tokens waiting.
3. If that one, without the tokens that need not be read there, has more than SPILL times those of
   the least busy of them, the latter.
4. Where nobody has the model, or all who have it are as busy as loading it elsewhere is worth, who
   has the fewest models, and then the fewest tokens waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

SPILL: Final = 1.5
# Below it a replica is not busy: leaving a warm prefix would cost more than the wait. In tokens.
BUSY: Final = 512
# From here on another replica loads the model too. Seconds of prefill on any Mac, as a load takes.
SPREAD: Final = 16_384
BLOCK_TOKENS: Final = 64  # of a block of the conversation, about


@dataclass(frozen=True, slots=True)
class Call:
    """What a request asks for, as far as it decides who answers it.

    `blocks` are digests of the conversation's beginning, each of all up to its own end. `owner` is
    the replica that an id in the request names. `tokens` is a guess at the prompt's length.
    """

    model: str | None = None
    blocks: Sequence[bytes] = ()
    owner: str | None = None
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica: the models it has, its tokens waiting or running, and by model what it keeps."""

    name: str
    models: frozenset[str] = frozenset()
    waiting: float = 0
    kept: Mapping[str, frozenset[bytes]] = field(default_factory=dict)

    def shares(self, call: Call) -> int:
        """Count the first blocks of a call's conversation that are kept here."""
        kept = self.kept.get(call.model or "", frozenset())
        return next((i for i, each in enumerate(call.blocks) if each not in kept), len(call.blocks))


class Reason(StrEnum):
    """Why a replica was chosen."""

    OWNER = "owner"
    PREFIX = "prefix"
    LOADED = "loaded"
    SPILL = "spill"
    LOAD = "load"
    SPREAD = "spread"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates' names, best first, and why the first is. Those after it are for when it is
    full; for an owner there is none.
    """

    names: Sequence[str]
    reason: Reason


def choose(call: Call, candidates: Sequence[Candidate]) -> Choice:
    """Choose among one candidate or more."""
    if call.owner is not None and any(each.name == call.owner for each in candidates):
        return Choice([call.owner], Reason.OWNER)
    by_load = sorted(candidates, key=lambda each: (each.waiting, each.name))
    if call.model is None:
        return _choice(by_load[0], by_load, Reason.ANY)
    have = [each for each in by_load if call.model in each.models]
    others = sorted(
        (each for each in by_load if call.model not in each.models),
        key=lambda each: (len(each.models), each.waiting, each.name),
    )
    if not have:
        return _choice(others[0], others, Reason.LOAD)
    least, in_order = have[0], [*have, *others]
    best = max(have, key=lambda each: (each.shares(call), -each.waiting))
    if _is_crowded(best, least, best.shares(call) * BLOCK_TOKENS):
        best, reason = least, Reason.SPILL
    else:
        reason = Reason.PREFIX if best.shares(call) else Reason.LOADED
    if others and best.waiting > SPREAD and _is_crowded(best, others[0]):
        return _choice(others[0], in_order, Reason.SPREAD)
    return _choice(best, in_order, reason)


def _is_crowded(one: Candidate, other: Candidate, saved: int = 0) -> bool:
    return one.waiting - saved > SPILL * max(other.waiting, BUSY)


def _choice(first: Candidate, rest: Sequence[Candidate], reason: Reason) -> Choice:
    return Choice([first.name, *(each.name for each in rest if each is not first)], reason)


def replicas_for(waiting: float, running: int, target: float, least: int, most: int) -> int:
    """Return how many replicas keep the tokens that wait, of all together, at `target` each.

    One is given up only if those left would then have less than half of it, so that their number
    does not swing.
    """
    wanted = max(least, min(most, -int(-waiting // target)))
    if wanted < running and waiting > target / 2 * wanted:
        wanted = running
    return max(least, min(most, wanted))
