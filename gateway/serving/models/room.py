"""Who holds memory and who waits for it: first come is first served, the idle give way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

from gateway.errors import InsufficientMemory, NoRoom
from gateway.serving.budget import Budget, Share, pick_leaving
from gateway.serving.models.entries import Entry

M = TypeVar("M")


class Room(Generic[M]):
    """Places and bytes for models. What `is_pinned` tells of stays, whoever waits."""

    def __init__(
        self,
        budget: Budget,
        *,
        max_models: int,
        wait_s: float,
        is_pinned: Callable[[Entry[M]], bool],
    ) -> None:
        self._budget = budget
        self._max_models = max_models
        self._wait_s = wait_s
        self._is_pinned = is_pinned
        self._queue: list[Entry[M]] = []  # holding or waiting, in the order they are served
        self._changed = asyncio.Event()
        budget.listen(self._wake)

    @contextlib.asynccontextmanager
    async def taken(self, mine: Entry[M], nbytes: int) -> AsyncIterator[Share]:
        """Hold a place and so many bytes, once others have left if need be.

        Raises InsufficientMemory where they can never be had, and NoRoom when models in use do
        not give way within `wait_s`.
        """
        mine.needed_bytes = nbytes
        self._queue.append(mine)
        share = self._budget.share()
        try:
            await self._given(mine, nbytes)
            share.state(nbytes)
            mine.share = share
            self._spare()
            yield share
        finally:
            self._queue.remove(mine)
            share.release()
            self.announce()

    def clear(self, nbytes: int) -> None:
        """Let idle models go, least recently used first, until so many bytes will be free."""
        self._send_away(self._queue, places=0, nbytes=nbytes, in_use=False)

    def announce(self) -> None:
        """Wake whoever waits, models and rows: one may have become idle, or gone."""
        self._budget.announce()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # for the next change

    async def _given(self, mine: Entry[M], nbytes: int) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._has_room(mine, nbytes):
                    self._refuse_the_impossible(mine, nbytes)
                    ahead = self._ahead(mine)
                    self._send_away(
                        ahead,
                        places=1 + len(ahead) - self._max_models,
                        nbytes=nbytes + _promised(ahead),
                        in_use=True,
                    )
                    await self._changed.wait()
        except TimeoutError:
            self._spare()
            users = [each.spec.id for each in self._ahead(mine) if each.leases]
            raise NoRoom(mine.spec.id, users) from None

    def _ahead(self, mine: Entry[M]) -> list[Entry[M]]:
        return self._queue[: self._queue.index(mine)]

    def _has_room(self, mine: Entry[M], nbytes: int) -> bool:
        """Tell whether mine fits beside those ahead: they hold memory, or will sooner."""
        ahead = self._ahead(mine)
        is_place = len(ahead) < self._max_models
        return is_place and nbytes + _promised(ahead) <= self._budget.free_bytes

    def _refuse_the_impossible(self, mine: Entry[M], nbytes: int) -> None:
        pinned = [each for each in self._ahead(mine) if self._is_pinned(each)]
        allowed = self._budget.limit_bytes - sum(each.nbytes for each in pinned)
        if nbytes > allowed:
            beside = " beside those that are pinned" if pinned else ""
            raise InsufficientMemory(
                mine.spec.id, f"it needs {nbytes:,} bytes, and {allowed:,} are allowed{beside}."
            )
        if len(pinned) >= self._max_models:
            raise InsufficientMemory(
                mine.spec.id, f"all {self._max_models} places are held by models that are pinned."
            )

    def _send_away(
        self, queue: Iterable[Entry[M]], *, places: int, nbytes: int, in_use: bool
    ) -> None:
        """Let go of as many as are too many: the idle now, those in use when their leases end.

        Where the idle are not enough, what is kept of prompts goes too.
        """
        gone = [each for each in queue if each.unwanted.is_set()]
        held = {
            each: each.held()
            for each in queue
            if each.is_loaded and not each.unwanted.is_set() and not self._is_pinned(each)
            if in_use or not each.leases
        }
        lacking = nbytes - self._budget.free_bytes - sum(each.nbytes for each in gone)
        for each in pick_leaving(held, places=places - len(gone), nbytes=lacking):
            if each.leases:
                each.is_doomed = True
            else:
                each.unwanted.set()
                lacking -= each.nbytes
        if lacking > 0:
            self._budget.recall()

    def _spare(self) -> None:
        """Give doomed models back to new leases, for room was found; whoever still waits for
        some dooms them again.
        """
        for each in self._queue:
            each.is_doomed = False
        self.announce()


def _promised(entries: Iterable[Entry[M]]) -> int:
    """Count what those need who wait."""
    return sum(each.needed_bytes or 0 for each in entries if each.is_waiting)
