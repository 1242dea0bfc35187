"""What the router and the ingress of one process share: who is there, and what was chosen.

Ray pickles a router's class by value: what is to be one for both has a module of its own.
"""

import asyncio
import contextlib

from prometheus_client import Counter

CHOICES = Counter("gateway_ray_choices", "Replicas chosen, by why.", ["reason"])
RETRIES = Counter("gateway_ray_retries", "Requests given to a second replica: the first had died.")
BROKEN = Counter("gateway_ray_broken", "Answers that had begun when their replica died.")


class Board:
    """The replicas that the router knows of now."""

    def __init__(self) -> None:
        self._is_any = asyncio.Event()

    def update(self, replicas: int) -> None:
        """Set how many there are."""
        if replicas:
            self._is_any.set()
        else:
            self._is_any.clear()

    async def wait_for_any(self, seconds: float) -> bool:
        """Wait until there is one; return False if there is none after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_any.wait()
        return self._is_any.is_set()


BOARD = Board()
