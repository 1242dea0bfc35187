"""How much each caller may take in a minute: buckets that fill again, evenly, within one.

A bucket may be overdrawn: what an answer costs is known only after it was let in. Who has
overdrawn one waits until it is paid back, so that the mean keeps to the limit.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from gateway import clock

MINUTE_S = 60.0
Kind: TypeAlias = Literal["requests", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def refilled(left: float, limit: int, seconds: float) -> float:
    """Return what is left after some seconds more, at `limit` a minute."""
    return min(limit, left + limit * seconds / MINUTE_S)


def seconds_until(wanted: float, left: float, limit: int) -> float:
    """Return the seconds until that much is left; 0 when it is."""
    return max(0.0, wanted - left) * MINUTE_S / limit


@dataclass(slots=True)
class Bucket:
    """One allowance of one caller, full at first."""

    limit: int
    _left: float = field(init=False)
    _at: float = field(init=False, default_factory=clock.now)

    def __post_init__(self) -> None:
        self._left = float(self.limit)

    @property
    def left(self) -> float:
        """Return what is left now; below 0 what is owed."""
        now = clock.now()
        self._left, self._at = refilled(self._left, self.limit, now - self._at), now
        return self._left

    def take(self, amount: float) -> None:
        """Take from it, whether or not it is there."""
        self._left = self.left - amount

    def wait_s(self) -> float:
        """Return the seconds until one more can be let in; 0 for now."""
        return seconds_until(1.0, self.left, self.limit)

    def reset_s(self) -> float:
        """Return the seconds until it is full again."""
        return seconds_until(self.limit, self.left, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a caller may take in a minute. None is no limit."""

    requests: int | None
    tokens: int | None

    @property
    def is_unlimited(self) -> bool:
        """Return True if there is no limit to count for."""
        return self.requests is None and self.tokens is None


@dataclass(slots=True)
class Accounts:
    """Every caller's buckets, by key id; those without a key share one account."""

    allowance: Allowance
    _accounts: dict[str | None, dict[Kind, Bucket]] = field(default_factory=dict)

    def of(self, key_id: str | None) -> dict[Kind, Bucket]:
        """Return a caller's buckets: those that have a limit."""
        if key_id not in self._accounts:
            limits: dict[Kind, int | None] = {
                "requests": self.allowance.requests,
                "tokens": self.allowance.tokens,
            }
            self._accounts[key_id] = {
                kind: Bucket(limit) for kind, limit in limits.items() if limit is not None
            }
        return self._accounts[key_id]
