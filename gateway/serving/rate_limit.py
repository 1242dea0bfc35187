"""Requests and tokens per minute of each caller."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from gateway import clock

MINUTE_S = 60.0
Kind: TypeAlias = Literal["requests", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def refill(left: float, limit: int, seconds: float) -> float:
    """Return the amount left after a refill for `seconds` at `limit` per minute, up to `limit`."""
    return min(limit, left + limit * seconds / MINUTE_S)


def seconds_until(needed: float, left: float, limit: int) -> float:
    """Return the seconds until `needed` is left; 0 if it is left now."""
    return max(0.0, needed - left) * MINUTE_S / limit


@dataclass(slots=True)
class Bucket:
    """A token bucket that starts full and refills evenly.

    It may be overdrawn, because the tokens of an answer are known only at its end.
    """

    limit: int
    _left: float = field(init=False)
    _at: float = field(init=False, default_factory=clock.now)

    def __post_init__(self) -> None:
        self._left = float(self.limit)

    @property
    def left(self) -> float:
        """Return the amount left now; negative if overdrawn."""
        now = clock.now()
        self._left, self._at = refill(self._left, self.limit, now - self._at), now
        return self._left

    def take(self, amount: float) -> None:
        self._left = self.left - amount

    def wait_s(self) -> float:
        return seconds_until(1.0, self.left, self.limit)

    def reset_s(self) -> float:
        return seconds_until(self.limit, self.left, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The requests and tokens per minute that a caller may use; None for no limit."""

    requests: int | None
    tokens: int | None

    @property
    def is_unlimited(self) -> bool:
        return self.requests is None and self.tokens is None


@dataclass(slots=True)
class Accounts:
    """Every caller's buckets by the id of the API key, which is None for callers without one."""

    allowance: Allowance
    _accounts: dict[str | None, dict[Kind, Bucket]] = field(default_factory=dict)

    def of(self, key_id: str | None) -> dict[Kind, Bucket]:
        if key_id not in self._accounts:
            limits: dict[Kind, int | None] = {
                "requests": self.allowance.requests,
                "tokens": self.allowance.tokens,
            }
            self._accounts[key_id] = {
                kind: Bucket(limit) for kind, limit in limits.items() if limit is not None
            }
        return self._accounts[key_id]
