"""The bytes that models and their rows may hold, and those they do."""

from collections.abc import Callable


class Budget:
    """Bytes to share out: a model's weights have one share, its rows another.

    Bytes are counted here and refused elsewhere: who needs more than `free_bytes` waits for a call
    of its listener, or asks `Room.clear` to make room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.claimed_bytes = 0
        self._held_bytes = 0
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
        was, self.claimed_bytes = self.claimed_bytes, nbytes
        if nbytes < was:
            self.announce()

    def share(self) -> "Share":
        """Return a new share, which holds nothing yet."""
        return Share(self)

    def listen(
        self, changed: Callable[[], None], wanted: Callable[[], None] = lambda: None
    ) -> None:
        """Call `changed` whenever bytes come back, or might because a model became idle, and
        `wanted` when kept prefixes, which only save time, are to be freed.
        """
        self._listeners[changed] = wanted

    def ignore(self, changed: Callable[[], None]) -> None:
        """Remove a listener, and its `wanted`."""
        del self._listeners[changed]

    def announce(self) -> None:
        """Call every listener, to look again."""
        for changed in tuple(self._listeners):
            changed()

    def recall(self) -> None:
        """Ask for what is kept only to save time."""
        for wanted in tuple(self._listeners.values()):
            wanted()

    def _change(self, by: int) -> None:
        self._held_bytes += by
        if by < 0:
            self.announce()


class Share:
    """The bytes that one holder has of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.nbytes = 0

    def state(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, free or not: they may be in memory already."""
        change, self.nbytes = nbytes - self.nbytes, nbytes
        self._budget._change(change)

    def release(self) -> None:
        """Hold nothing any more."""
        self.state(0)
