"""The bytes that models and their sequences may hold, and those they hold."""

from collections.abc import Callable
from typing import Protocol


class Evictable(Protocol):
    """The loaded models, those among them that are idle being evictable."""

    def evict_idle(self, nbytes: int, *, is_pressing: bool) -> None:
        """Evict idle models if that frees `nbytes`; recently used ones only if it is pressing."""

    def pinned_bytes(self, *, without: str) -> int:
        """Return the bytes of all pinned models but this one."""


class Budget:
    """The bytes of all models: a model's weights have one share, the KV of its rows another."""

    # Bytes are counted here, not refused: code that needs more than `free_bytes` waits until its
    # listener is called, or calls `evict_idle`.
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.claimed_bytes = 0
        self._held_bytes = 0
        self._models: Evictable | None = None
        self._listeners: dict[Callable[[], None], Callable[[], None]] = {}

    @property
    def free_bytes(self) -> int:
        """Return the bytes not held; below 0 if models turned out larger than they seemed."""
        return self.limit_bytes - self._held_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the bytes that a new row may take: free, and not claimed for a waiting model."""
        return self.free_bytes - self.claimed_bytes

    def claim(self, nbytes: int) -> None:
        """Reserve bytes, free now or later, for a model that waits."""
        before, self.claimed_bytes = self.claimed_bytes, nbytes
        if nbytes < before:
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

    def listen(
        self, on_change: Callable[[], None], on_recall: Callable[[], None] = lambda: None
    ) -> None:
        """Call `on_change` whenever bytes are freed, or could be because a model became idle, and
        `on_recall` when cached prefixes have to be freed.
        """
        self._listeners[on_change] = on_recall

    def unlisten(self, on_change: Callable[[], None]) -> None:
        """Remove a listener, and its `on_recall`."""
        del self._listeners[on_change]

    def notify(self) -> None:
        """Call every `on_change`."""
        for on_change in tuple(self._listeners):
            on_change()

    def recall(self) -> None:
        """Call every `on_recall`."""
        for on_recall in tuple(self._listeners.values()):
            on_recall()

    def _change(self, by: int) -> None:
        self._held_bytes += by
        if by < 0:
            self.notify()


class Share:
    """The bytes that one holder has of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, free or not: they may be in memory already."""
        change, self.nbytes = nbytes - self.nbytes, nbytes
        self._budget._change(change)

    def release(self) -> None:
        """Hold nothing."""
        self.resize(0)
