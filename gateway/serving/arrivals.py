"""Requests on their way: being read or tokenised, so that a burst can be waited for."""

import asyncio
import contextlib
from collections.abc import Iterator

from gateway import metrics


class Arrival:
    """One request on its way, until it waits in a queue, or is answered without."""

    def __init__(self, arrivals: "Arrivals") -> None:
        self._arrivals = arrivals

    def over(self) -> None:
        """Note that it has arrived, or never will. The second call does nothing."""
        self._arrivals._over(self)


class Arrivals:
    """Those on their way, in the order they came."""

    def __init__(self) -> None:
        self._since: dict[Arrival, float] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def expected(self) -> Iterator[Arrival]:
        """Announce a request while entered, unless it is over sooner."""
        arrival = Arrival(self)
        self._since[arrival] = metrics.now()
        try:
            yield arrival
        finally:
            arrival.over()

    @property
    def count(self) -> int:
        """Count those on their way."""
        return len(self._since)

    @property
    def newest_age_s(self) -> float | None:
        """Tell how long ago the newest of them came; None when there is none."""
        newest = next(reversed(self._since.values()), None)
        return None if newest is None else metrics.now() - newest

    async def looked(self) -> None:
        """Let those be counted whose bytes are here already, unread: a socket, its reader and the
        request take a round of the loop each. A burst of ten was cut in two a quarter of the time.
        """
        for _ in range(3):
            await asyncio.sleep(0)

    async def changed(self, timeout_s: float) -> None:
        """Wait until another one is over, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _over(self, arrival: Arrival) -> None:
        if self._since.pop(arrival, None) is not None:
            self._changed.set()
            self._changed = asyncio.Event()  # for the next change
