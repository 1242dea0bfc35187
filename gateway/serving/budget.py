"""The memory budget: the bytes that models and their sequences may hold, and those in use."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

LEAST_PREFIXES: Final = 1 << 30  # bytes that prefix caches may have if models leave that much


class Evictable(Protocol):
    """The loaded models, of which idle ones may be evicted."""

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict idle models if that frees `nbytes`; recently used ones only if it is pressing."""

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models but this one."""

    def model_bytes(self) -> int:
        """Return the bytes of all models, without those of sequences and prefix caches."""


class Budget:
    """The bytes of all models. A model's weights have one share, its sequences' KV another."""

    # The budget counts bytes and refuses none: code that needs more than `free_bytes` waits until
    # its listener is called, or calls `evict_idle`.
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.claimed_bytes = 0
        self._held_bytes = 0
        self._models: Evictable | None = None
        self._listeners: dict[Callable[[], None], None] = {}
        self.prefixes: list[PrefixShare] = []  # pools, in the order in which they give bytes back

    @property
    def free_bytes(self) -> int:
        """Return the bytes that nobody holds; negative if models are larger than estimated."""
        return self.limit_bytes - self._held_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the bytes that a new sequence may take: free ones, less those that are claimed."""
        return self.free_bytes - self.claimed_bytes

    def claim(self, nbytes: int) -> None:
        """Reserve bytes, whether free now or later, for models that wait to be loaded."""
        before, self.claimed_bytes = self.claimed_bytes, nbytes
        if nbytes < before or (nbytes > before and self.prefix_bytes):
            self.notify()

    def share(self) -> "Share":
        """Return a new share, which holds nothing yet."""
        return Share(self)

    def attach(self, models: Evictable) -> None:
        """Set the models that `evict_idle` evicts."""
        self._models = models

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict idle models if that frees `nbytes`; recently used ones only if it is pressing."""
        if self._models is not None:
            self._models.evict_idle(nbytes, is_pressing=is_pressing)

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models but this one."""
        if self._models is None:
            return 0
        return self._models.pinned_bytes(without=without)

    @property
    def model_bytes(self) -> int:
        return 0 if self._models is None else self._models.model_bytes()

    @property
    def prefix_bytes(self) -> int:
        """Return the bytes of all prefix pools, which are freed when others need them."""
        return sum(prefixes.nbytes for prefixes in self.prefixes)

    def kept_besides(self, own: "PrefixShare") -> int:
        """Return the bytes of all prefix pools except `own`."""
        return sum(prefixes.nbytes for prefixes in self.prefixes if prefixes is not own)

    def recall(self, nbytes: int, *, besides: "PrefixShare") -> bool:
        """Ask the other prefix pools to free `nbytes`. Return False if they hold none.

        Each pool frees its bytes in a turn of one of its models. Listeners are called after that.
        """
        is_new = is_due = False
        for prefixes in self.prefixes:
            if prefixes is not besides:
                given = min(nbytes, prefixes.nbytes)
                nbytes -= given
                is_due = is_due or given > 0
                is_new = is_new or given > prefixes.recalled
                prefixes.recalled = max(given, prefixes.recalled)
        if is_new:  # without this check, a listener that calls `recall` would be called forever
            self.notify()
        return is_due

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever bytes are freed, a model becomes idle and could be evicted, or
        prefix pools have to free bytes.
        """
        self._listeners[on_change] = None

    def unlisten(self, on_change: Callable[[], None]) -> None:
        """Remove a listener."""
        del self._listeners[on_change]

    def notify(self) -> None:
        """Call every listener."""
        for on_change in tuple(self._listeners):
            on_change()

    def _change(self, by: int) -> None:
        self._held_bytes += by
        # The listeners of models with prefix pools free the missing bytes.
        if by < 0 or (self.free_bytes < 0 and self.prefix_bytes):
            self.notify()


class Share:
    """The part of a budget that one holder has."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._is_changing = False
        self.nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, whether they are free or not: they may be allocated already.

        Raises ValueError for a negative number, and RuntimeError if a listener called by this
        method resizes the same share.
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
        """Release all bytes."""
        self.resize(0)


class PrefixShare:
    """The share of the budget that one prefix pool has. It is freed first if others need bytes."""

    # The pool has at most `most` bytes. With `leaves_room` it also leaves room beside it for the
    # models and one sequence.
    def __init__(self, budget: Budget, most: int, *, leaves_room: bool = False) -> None:
        self._budget = budget
        self._share = budget.share()
        self._most = most
        self._leaves_room = leaves_room
        self._users = 0
        self.recalled = 0  # bytes to free for sequences of models that use other pools

    @property
    def nbytes(self) -> int:
        return self._share.nbytes

    @property
    def excess_bytes(self) -> int:
        """Return the bytes that this pool has to free, after earlier pools have freed theirs."""
        wanted = -self._budget.spare_bytes
        for prefixes in self._budget.prefixes:
            if prefixes is self:
                break
            wanted -= prefixes.nbytes
        return max(0, min(self.nbytes, max(wanted, self.recalled)))

    def allowed(self, row_bytes: int) -> int:
        """Return the bytes that the pool may have from now on, beside a sequence of `row_bytes`.

        If it has to free bytes, it may keep the rest. If the budget has spare bytes, it may grow
        into them. Otherwise it keeps its size. `most` bounds all three.
        """
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
        """Lower the share to at most `nbytes`: the engine's next step frees the rest."""
        self.recalled = 0
        self.note(min(self.nbytes, nbytes))

    def note(self, nbytes: int) -> None:
        """Set the share to the bytes that the pool has now."""
        self._share.resize(nbytes)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let a model use the pool while entered. The last model to exit empties the pool."""
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
    """Return the most bytes of a prefix pool, at most `most`, within the `room` that models leave.

    They leave `row_bytes` of it for a sequence, unless the pool would get under LEAST_PREFIXES.
    """
    return max(0, min(most, max(room - row_bytes, min(room, LEAST_PREFIXES))))
