"""How many bytes models and their rows may hold, who holds them, and who gives way."""

from collections.abc import Callable


class Budget:
    """Bytes to share out: a model's weights have one share, its rows another.

    It is counted here and refused elsewhere: who wants more than `free_bytes` waits for a `listen`
    to tell of more, or asks `Room.clear` to make room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.claimed_bytes = 0
        self._held_bytes = 0
        self._listeners: dict[Callable[[], None], Callable[[], None]] = {}

    @property
    def free_bytes(self) -> int:
        """Count what nobody holds; below 0 when models turned out larger than they seemed."""
        return self.limit_bytes - self._held_bytes

    @property
    def spare_bytes(self) -> int:
        """Count what a new row may take: what is free, and not for a model that waits for it."""
        return self.free_bytes - self.claimed_bytes

    def claim(self, nbytes: int) -> None:
        """Keep so many of the free bytes, those to come too, for a model that waits."""
        was, self.claimed_bytes = self.claimed_bytes, nbytes
        if nbytes < was:
            self.announce()

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
