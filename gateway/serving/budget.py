"""The memory budget: the bytes that models and their sequences may hold, and those in use."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

LEAST_PREFIXES: Final = 1 << 30  # bytes that prefix caches may have if models leave that much


class Evictable(Protocol):
    """The loaded models, of which idle ones may be evicted."""

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict idle models until `nbytes` are free, or none if that is impossible. Recently used
        models are evicted only if `is_pressing`.
        """

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models except the one with this id."""

    def model_bytes(self) -> int:
        """Return the bytes of all models, without those of sequences and prefix caches."""


class Budget:
    """The memory that all models may take together, divided into shares. Each model has a share for
    its weights, and another for the KV of its sequences.
    """

    # The budget counts bytes but never refuses them: code that needs more than `free_bytes` has to
    # wait until its listener is called, or to call `evict_idle`.
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.claimed_bytes = 0
        self._held_bytes = 0
        self._models: Evictable | None = None
        self._listeners: dict[Callable[[], None], None] = {}
        self.prefixes: list[PrefixShare] = []  # pools, in the order in which they give bytes back

    @property
    def free_bytes(self) -> int:
        """Return the bytes that no share holds; negative if models are larger than estimated."""
        return self.limit_bytes - self._held_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the bytes that a new sequence may take: `free_bytes` less the claimed bytes."""
        return self.free_bytes - self.claimed_bytes

    def claim(self, nbytes: int) -> None:
        """Keep bytes from new sequences, for models that wait to be loaded. The bytes may be in use
        still.
        """
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
        """Evict idle models as `Evictable.evict_idle` does."""
        if self._models is not None:
            self._models.evict_idle(nbytes, is_pressing=is_pressing)

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models except the one with this id."""
        if self._models is None:
            return 0
        return self._models.pinned_bytes(without=without)

    @property
    def model_bytes(self) -> int:
        return 0 if self._models is None else self._models.model_bytes()

    @property
    def prefix_bytes(self) -> int:
        """Return the bytes of all prefix pools. They are freed if models or sequences need them."""
        return sum(prefixes.nbytes for prefixes in self.prefixes)

    def kept_besides(self, own: "PrefixShare") -> int:
        """Return the bytes of all prefix pools except `own`."""
        return sum(prefixes.nbytes for prefixes in self.prefixes if prefixes is not own)

    def recall(self, nbytes: int, *, besides: "PrefixShare") -> bool:
        """Ask all prefix pools except `besides` to free `nbytes` together. Return False if these
        pools are empty.

        A pool frees its bytes later, in a turn of one of its models. Then listeners are called.
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
        # If bytes are missing, the listeners of models with prefix pools free them.
        if by < 0 or (self.free_bytes < 0 and self.prefix_bytes):
            self.notify()


class Share:
    """The bytes of a budget that one holder has, such as a model's weights."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._is_changing = False
        self.nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, even if they are not free: they may be allocated already.

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
    """The share of the budget that one prefix pool has. When models or sequences need bytes, those
    of prefix pools are freed first.
    """

    # The pool has at most `most` bytes. With `leaves_room` it has less, if otherwise the models and
    # one sequence would not fit beside it.
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
        """Return the bytes that this pool has to free, once the pools before it are empty."""
        wanted = -self._budget.spare_bytes
        for prefixes in self._budget.prefixes:
            if prefixes is self:
                break
            wanted -= prefixes.nbytes
        return max(0, min(self.nbytes, max(wanted, self.recalled)))

    def allowed(self, row_bytes: int) -> int:
        """Return the bytes that the pool may have from now on, beside a sequence of `row_bytes`.

        A pool that has to free bytes may keep the rest. If the budget has spare bytes, the pool may
        grow by these. Otherwise the pool keeps its size. It never exceeds `most` bytes.
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
        """Lower the share to at most `nbytes`. The engine's next step must free the rest."""
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
    """Return the most bytes that a prefix pool may have: `most`, or less so that it fits into the
    `room` that models leave.

    In this room `row_bytes` stay free for a sequence, as long as the pool keeps LEAST_PREFIXES.
    """
    return max(0, min(most, max(room - row_bytes, min(room, LEAST_PREFIXES))))
