"""How many bytes models and their rows may hold, who holds them, and who gives way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Held:
    """A loaded model, as the choice of who leaves sees it. `is_doomed`: it was chosen before."""

    nbytes: int
    last_used: float
    is_idle: bool = True
    is_doomed: bool = False


def pick_leaving(held: Mapping[K, Held], *, places: int, nbytes: int) -> list[K]:
    """Choose who leaves so that `places` and `nbytes` become free, as far as these have them.

    The idle before those in use, those chosen before ahead of others, and among equals the one
    that was used longest ago.
    """
    leaving: list[K] = []
    for each in sorted(held, key=lambda each: _rank(held[each])):
        if places <= 0 and nbytes <= 0:
            break
        leaving.append(each)
        places -= 1
        nbytes -= held[each].nbytes
    return leaving


def _rank(held: Held) -> tuple[bool, bool, float]:
    return not held.is_idle, not held.is_doomed, held.last_used


class Budget:
    """Bytes to share out: a model's weights have one share, its rows another.

    It is counted here and refused elsewhere: who wants more than `free_bytes` waits for a `listen`
    to tell of more, or asks `Room.clear` to make room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held_bytes = 0
        self._listeners: dict[Callable[[], None], Callable[[], None]] = {}

    @property
    def free_bytes(self) -> int:
        """Count what nobody holds; below 0 when models turned out larger than they seemed."""
        return self.limit_bytes - self._held_bytes

    def share(self) -> "Share":
        """Give a share, which holds nothing yet."""
        return Share(self)

    def listen(
        self, changed: Callable[[], None], wanted: Callable[[], None] = lambda: None
    ) -> None:
        """Have `changed` called whenever bytes come back, or might: somebody has become idle; and
        `wanted` when those that only save time, kept prefixes, are to be given back.
        """
        self._listeners[changed] = wanted

    def ignore(self, changed: Callable[[], None]) -> None:
        """Call it, and what came with it, no more."""
        del self._listeners[changed]

    def announce(self) -> None:
        """Tell those who wait to look again."""
        for changed in tuple(self._listeners):
            changed()

    def recall(self) -> None:
        """Ask for what is kept to save time alone."""
        for wanted in tuple(self._listeners.values()):
            wanted()

    def _moved(self, by: int) -> None:
        self._held_bytes += by
        if by < 0:
            self.announce()


class Share:
    """The bytes that one holder has of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.nbytes = 0

    def state(self, nbytes: int) -> None:
        """Hold so many bytes from now on, free or not: they may be in memory already."""
        change, self.nbytes = nbytes - self.nbytes, nbytes
        self._budget._moved(change)

    def release(self) -> None:
        """Hold nothing any more."""
        self.state(0)
