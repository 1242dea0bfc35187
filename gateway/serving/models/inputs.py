"""The inputs of models by the files on this disk, be the models loaded or not."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from gateway.registry import Inputs, ModelSpec

LOOK_S = 3.0  # for some small files of each model; a network disk may never answer


class KnownInputs:
    """The inputs of models, as they were when their files were last looked at.

    `read` returns those of all models by id, None for one whose files are not on this disk.
    """

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, Inputs | None]]]) -> None:
        self._read = read
        self._known: Mapping[str, Inputs | None] = {}
        self._looking = asyncio.Lock()
        self._next: asyncio.Future[None] | None = None  # a look that has not begun

    def of(self, spec: ModelSpec) -> Inputs | None:
        """Return a model's inputs; None if its files were not on this disk."""
        return self._known.get(spec.id)

    async def look(self) -> None:
        """Look at the files of all models, or wait no longer than a while for a look that goes on.
        A disk that does not answer holds one look, and so one thread, however many ask.
        """
        if self._next is None:  # one that has begun may be older than some files
            self._next = asyncio.ensure_future(self._look())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asyncio.shield(self._next)

    async def _look(self) -> None:
        async with self._looking:
            self._next = None
            self._known = await self._read()
