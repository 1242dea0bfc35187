"""The memory budget, which models, their sequences and prefix pools share."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

LEAST_PREFIXES: Final = 1 << 30  # bytes that a prefix pool may keep instead of room for a sequence


class Evictable(Protocol):
    """The loaded models, as the budget uses them."""

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict idle models until `nbytes` are free, or none if that is impossible.

        Recently used models are evicted only if `is_pressing`.
        """

    def pinned_bytes(self, *, without: str) -> int: ...

    def model_bytes(self) -> int:
        """Return the bytes of all models, without their sequences and prefix caches."""


class Budget:
    """The memory that all models may take together, divided into shares."""

    # Code that needs more than `free_bytes` has to wait for its listener, or call `evict_idle`.
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.claimed_bytes = 0
        self._held_bytes = 0
        self._models: Evictable | None = None
        self._listeners: dict[Callable[[], None], None] = {}
        self.prefixes: list[PrefixShare] = []

    @property
    def free_bytes(self) -> int:
        """Return the bytes that no share holds; negative if models are larger than estimated."""
        return self.limit_bytes - self._held_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the bytes that a new sequence may take."""
        return self.free_bytes - self.claimed_bytes

    def claim(self, nbytes: int) -> None:
        """Keep `nbytes` from new sequences, for models that wait to be loaded."""
        before, self.claimed_bytes = self.claimed_bytes, nbytes
        if nbytes < before or (nbytes > before and self.prefix_bytes):
            self.notify()

    def share(self) -> "Share":
        return Share(self)

    def attach(self, models: Evictable) -> None:
        self._models = models

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        if self._models is not None:
            self._models.evict_idle(nbytes, is_pressing=is_pressing)

    def pinned_bytes(self, *, without: str) -> int:
        if self._models is None:
            return 0
        return self._models.pinned_bytes(without=without)

    @property
    def model_bytes(self) -> int:
        return 0 if self._models is None else self._models.model_bytes()

    @property
    def prefix_bytes(self) -> int:
        return sum(prefixes.nbytes for prefixes in self.prefixes)

    def kept_besides(self, own: "PrefixShare") -> int:
        return sum(prefixes.nbytes for prefixes in self.prefixes if prefixes is not own)

    def recall(self, nbytes: int, *, besides: "PrefixShare") -> bool:
        """Ask the other prefix pools to free `nbytes` later; return False if they are empty."""
        is_new = is_due = False
        for prefixes in self.prefixes:
            if prefixes is not besides:
                given = min(nbytes, prefixes.nbytes)
                nbytes -= given
                is_due = is_due or given > 0
                is_new = is_new or given > prefixes.recalled
                prefixes.recalled = max(given, prefixes.recalled)
        if is_new:  # else a listener that calls `recall` would be called forever
            self.notify()
        return is_due

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` when bytes are freed, a model becomes idle, or pools must free bytes."""
        self._listeners[on_change] = None

    def unlisten(self, on_change: Callable[[], None]) -> None:
        del self._listeners[on_change]

    def notify(self) -> None:
        for on_change in tuple(self._listeners):
            on_change()

    def _change(self, by: int) -> None:
        self._held_bytes += by
        if by < 0 or (self.free_bytes < 0 and self.prefix_bytes):
            self.notify()


class Share:
    """The bytes that one holder, such as a model, has of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._is_changing = False
        self.nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, even if they exceed the budget.

        Raises ValueError for a negative number, and RuntimeError if a listener resizes the share
        that is being resized.
        """
        if nbytes < 0:
            raise ValueError(f"a share cannot have {nbytes} bytes")
        if self._is_changing:
            raise RuntimeError("a share was resized during its own resize, by a listener")
        change, self.nbytes = nbytes - self.nbytes, nbytes
        self._is_changing = True
        try:
            self._budget._change(change)
        finally:
            self._is_changing = False

    def release(self) -> None:
        self.resize(0)


class PrefixShare:
    """The bytes of one prefix pool, which are freed first when models or sequences need memory."""

    # With `leaves_room`, the pool is kept small enough for the models and one sequence.
    def __init__(self, budget: Budget, most: int, *, leaves_room: bool = False) -> None:
        self._budget = budget
        self._share = budget.share()
        self._most = most
        self._leaves_room = leaves_room
        self._users = 0
        self.recalled = 0  # bytes to free for models that use other pools

    @property
    def nbytes(self) -> int:
        return self._share.nbytes

    @property
    def excess_bytes(self) -> int:
        """Return the bytes that this pool has to free, once the pools before it are empty."""
        wanted = -self._budget.spare_bytes
        for prefixes in self._budget.prefixes:
            if prefixes is self:
                break
            wanted -= prefixes.nbytes
        return max(0, min(self.nbytes, max(wanted, self.recalled)))

    def allowed(self, row_bytes: int) -> int:
        """Return the most bytes that the pool may have now, beside a sequence of `row_bytes`."""
        most, excess, spare = self._most, self.excess_bytes, self._budget.spare_bytes
        if self._leaves_room:
            room = self._budget.limit_bytes - self._budget.model_bytes
            most = bound_prefixes(most, room, row_bytes)
        if excess > 0:
            return min(most, self.nbytes - excess)
        if spare > 0:
            return min(most, self.nbytes + spare)
        return min(most, self.nbytes)

    def shrink_to(self, nbytes: int) -> None:
        """Lower the share to at most `nbytes`, before the engine's next step frees the rest."""
        self.recalled = 0
        self.note(min(self.nbytes, nbytes))

    def note(self, nbytes: int) -> None:
        self._share.resize(nbytes)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let a model use the pool while entered; the last one to exit releases its bytes."""
        if not self._users:
            self._budget.prefixes.append(self)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._budget.prefixes.remove(self)
                self.note(0)


def bound_prefixes(most: int, room: int, row_bytes: int) -> int:
    """Return the most bytes of a prefix pool in the `room` that models leave: at most `most`.

    `row_bytes` stay free for a sequence, unless the pool would have less than LEAST_PREFIXES.
    """
    return max(0, min(most, max(room - row_bytes, min(room, LEAST_PREFIXES))))
