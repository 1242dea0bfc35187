"""The current catalog of served models, and facts about the models' inputs, such as their maximum
length. These facts are read from files on this disk, even for models that are not loaded.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gateway.registry import Catalog, Changes, Inputs, ModelSpec

ReadInputs = Callable[[Sequence[ModelSpec]], Awaitable[Mapping[str, Inputs | None]]]
LOOK_S = 3.0  # most seconds to wait for small files of all models: a network disk may hang


class Served:
    """The current catalog: the models of models.yaml, and the models that callers have named.

    A name in models.yaml takes precedence over that of a named model. Code that changes the catalog
    must tell the model cache, so that it forgets models that are gone.
    """

    def __init__(self, file: Catalog) -> None:
        self.catalog = self._file = file
        self.named: dict[str, ModelSpec] = {}  # by id; NamedModels changes it, then calls `publish`

    def replace(self, file: Catalog) -> Changes:
        """Serve the models of a reloaded models.yaml, and return the changes."""
        before, self._file = self.catalog, file
        self.publish()
        return self.catalog.changes_since(before)

    def publish(self) -> None:
        """Rebuild the catalog from the models of models.yaml and the named models."""
        taken, named = {*self._file.names()}, self.named.values()
        rest = [spec for spec in named if taken.isdisjoint((spec.id, f"hub:{spec.id}"))]
        self.catalog = Catalog([*self._file.specs, *rest])


class KnownInputs:
    """The Inputs of served models, as of the last time that their files were read.

    `read` returns them by model id, with None for a model whose files are not on this disk.
    """

    def __init__(self, served: Served, read: ReadInputs) -> None:
        self._served = served
        self._read = read
        self._known: Mapping[str, Inputs | None] = {}
        self._looking = asyncio.Lock()
        self._next: asyncio.Future[None] | None = None  # a read that has not begun

    def of(self, spec: ModelSpec) -> Inputs | None:
        """Return a model's Inputs; None if its files were not on this disk."""
        return self._known.get(spec.id)

    async def look(self) -> None:
        """Read the files of all models again. The wait ends after LOOK_S, but the read goes on.

        Only one read runs at a time, so a disk that hangs blocks only one thread.
        """
        if self._next is None:  # a read that has begun may miss newer files
            self._next = asyncio.ensure_future(self._look())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asyncio.shield(self._next)

    async def _look(self) -> None:
        async with self._looking:
            self._next = None
            self._known = await self._read(self._served.catalog.specs)
