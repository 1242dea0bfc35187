"""The bytes that models and their sequences may hold, and those they hold."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

LEAST_PREFIXES: Final = 1 << 30  # bytes for kept prompts, if models leave that much


class Evictable(Protocol):
    """The loaded models, of which idle ones may be evicted."""

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict idle models if that frees `nbytes`; recently used ones only if it is pressing."""

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models but this one."""

    def model_bytes(self) -> int:
        """Return the bytes of all models, without those of sequences and kept prompts."""


class Budget:
    """The bytes of all models: a model's weights have a share, the KV of its sequences another."""

    # Bytes are counted here, not refused: code that needs more than `free_bytes` waits until its
    # listener is called, or calls `evict_idle`.
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.claimed_bytes = 0
        self._held_bytes = 0
        self._models: Evictable | None = None
        self._listeners: dict[Callable[[], None], None] = {}
        self.prefixes: list[PrefixShare] = []  # pools, in the order in which they give bytes back

    @property
    def free_bytes(self) -> int:
        """Return the bytes not held; below 0 if models turned out larger than they seemed."""
        return self.limit_bytes - self._held_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the bytes that a new sequence may take: free, and claimed for no waiting model."""
        return self.free_bytes - self.claimed_bytes

    def claim(self, nbytes: int) -> None:
        """Reserve bytes, free now or later, for a model that waits."""
        before, self.claimed_bytes = self.claimed_bytes, nbytes
        if nbytes < before or (nbytes > before and self.prefix_bytes):
            self.notify()

    def share(self) -> "Share":
        """Return a new share, which holds nothing yet."""
        return Share(self)

    def attach(self, models: Evictable) -> None:
        """Set the models that are evicted from now on."""
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
        """Return the bytes of kept prompts, which are freed when others need them."""
        return sum(prefixes.nbytes for prefixes in self.prefixes)

    def kept_besides(self, own: "PrefixShare") -> int:
        """Return the bytes of prompts kept in other pools."""
        return sum(prefixes.nbytes for prefixes in self.prefixes if prefixes is not own)

    def recall(self, nbytes: int, *, besides: "PrefixShare") -> bool:
        """Have `nbytes` of the prompts in other pools freed; return False if they keep none.

        They are freed in turns of those pools' models, after which listeners are called.
        """
        is_new = is_due = False
        for prefixes in self.prefixes:
            if prefixes is not besides:
                given = min(nbytes, prefixes.nbytes)
                nbytes -= given
                is_due = is_due or given > 0
                is_new = is_new or given > prefixes.recalled
                prefixes.recalled = max(given, prefixes.recalled)
        if is_new:  # only then, or a waiting listener would call this again at once
            self.notify()
        return is_due

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever bytes are freed, or could be because a model became idle, and
        when kept prompts have to go.
        """
        self._listeners[on_change] = None

    def unlisten(self, on_change: Callable[[], None]) -> None:
        """Remove a listener."""
        del self._listeners[on_change]

    def notify(self) -> None:
        """Call every `on_change`."""
        for on_change in tuple(self._listeners):
            on_change()

    def _change(self, by: int) -> None:
        self._held_bytes += by
        # Models that keep prompts free the missing bytes.
        if by < 0 or (self.free_bytes < 0 and self.prefix_bytes):
            self.notify()


class Share:
    """The bytes that one holder has of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._is_changing = False
        self.nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, free or not: they may be in memory already.

        Raises ValueError for a negative number, and RuntimeError if a listener that this calls
        resizes the same share.
        """
        if nbytes < 0:
            raise ValueError(f"a share of {nbytes} bytes")
        if self._is_changing:
            raise RuntimeError("a share is resized while it is resized")
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
    """The share of the budget that one prefix pool has: the first to go when others need bytes."""

    # The pool has at most `most` bytes; with `leaves_room`, it leaves room for models and a
    # sequence.
    def __init__(self, budget: Budget, most: int, *, leaves_room: bool = False) -> None:
        self._budget = budget
        self._share = budget.share()
        self._most = most
        self._leaves_room = leaves_room
        self._users = 0
        self.recalled = 0  # bytes that sequences of models with another pool wait for

    @property
    def nbytes(self) -> int:
        return self._share.nbytes

    @property
    def excess_bytes(self) -> int:
        """Return the bytes that have to go, beyond those that earlier pools can give."""
        wanted = -self._budget.spare_bytes
        for prefixes in self._budget.prefixes:
            if prefixes is self:
                break
            wanted -= prefixes.nbytes
        return max(0, min(self.nbytes, max(wanted, self.recalled)))

    def allowed(self, row_bytes: int) -> int:
        """Return the bytes that may be kept from now on, beside a sequence of `row_bytes`.

        There are three cases. Bytes that are kept here have to go: the rest stays. The budget has
        bytes to spare: these may be kept, too. Neither: all stays, and no more is kept.
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
        """Count at most `nbytes` as kept: the engine's next step frees the others."""
        self.recalled = 0
        self.note(min(self.nbytes, nbytes))

    def note(self, nbytes: int) -> None:
        """Note the bytes of kept prompts."""
        self._share.resize(nbytes)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While entered, a model may keep prompts here. The pool empties after the last model."""
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
    """Return the most bytes of kept prompts, of the `room` beside models: they leave bytes for a
    sequence, unless that makes them fewer than LEAST_PREFIXES.
    """
    return max(0, min(most, max(room - row_bytes, min(room, LEAST_PREFIXES))))
