"""The catalog of served models, and facts about the models' inputs, such as their lengths."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gateway.registry import Catalog, Changes, Inputs, ModelSpec

ReadInputs = Callable[[Sequence[ModelSpec]], Awaitable[Mapping[str, Inputs | None]]]
LOOK_S = 3.0  # seconds to wait for files, since a network disk may hang


class Served:
    """The current catalog of the models in models.yaml and of the models that callers have named.

    A model in models.yaml hides a named model with the same name.
    """

    def __init__(self, file: Catalog) -> None:
        self.catalog = self._file = file
        self.named: dict[str, ModelSpec] = {}

    def replace(self, file: Catalog) -> Changes:
        before, self._file = self.catalog, file
        self.publish()
        return self.catalog.changes_since(before)

    def publish(self) -> None:
        taken, named = {*self._file.names()}, self.named.values()
        rest = [spec for spec in named if taken.isdisjoint((spec.id, f"hub:{spec.id}"))]
        self.catalog = Catalog([*self._file.specs, *rest])


class KnownInputs:
    """The Inputs of served models, as of the last time that their files were read.

    `read` returns None for a model whose files are not on this disk.
    """

    def __init__(self, served: Served, read: ReadInputs) -> None:
        self._served = served
        self._read = read
        self._known: Mapping[str, Inputs | None] = {}
        self._looking = asyncio.Lock()
        self._next: asyncio.Future[None] | None = None  # a read that has not begun

    def of(self, spec: ModelSpec) -> Inputs | None:
        return self._known.get(spec.id)

    async def look(self) -> None:
        """Read all models' files again, and wait for LOOK_S at most."""
        if self._next is None:  # a running read may miss newer files
            self._next = asyncio.ensure_future(self._look())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asyncio.shield(self._next)

    async def _look(self) -> None:
        # One read runs at a time, so a disk that hangs blocks only one thread.
        async with self._looking:
            self._next = None
            self._known = await self._read(self._served.catalog.specs)
