"""The models that are served: the catalog, as it is now, and their inputs by the files on this
disk, whether loaded or not.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gateway.registry import Catalog, Changes, Inputs, ModelSpec

ReadInputs = Callable[[Sequence[ModelSpec]], Awaitable[Mapping[str, Inputs | None]]]
LOOK_S = 3.0  # longest wait for small files of all models: a network disk may never answer


class Served:
    """The current catalog: the models of models.yaml, whose names win, and those that callers have
    named, by id. Whoever changes it tells the model cache, which forgets the models that are gone.
    """

    def __init__(self, file: Catalog) -> None:
        self.catalog = self._file = file
        self.named: dict[str, ModelSpec] = {}  # NamedModels changes it, and publishes

    def replace(self, file: Catalog) -> Changes:
        """Serve the models of another reading of models.yaml, and return the changes."""
        before, self._file = self.catalog, file
        self.publish()
        return self.catalog.changes_since(before)

    def publish(self) -> None:
        """Make the catalog anew."""
        taken, named = {*self._file.names()}, self.named.values()
        rest = [spec for spec in named if taken.isdisjoint((spec.id, f"hub:{spec.id}"))]
        self.catalog = Catalog([*self._file.specs, *rest])


class KnownInputs:
    """The inputs of served models, as they were when their files were last looked at.

    `read` returns those of models by id, None for one whose files are not on this disk.
    """

    def __init__(self, served: Served, read: ReadInputs) -> None:
        self._served = served
        self._read = read
        self._known: Mapping[str, Inputs | None] = {}
        self._looking = asyncio.Lock()
        self._next: asyncio.Future[None] | None = None  # a look that has not begun

    def of(self, spec: ModelSpec) -> Inputs | None:
        """Return a model's inputs; None if its files were not on this disk."""
        return self._known.get(spec.id)

    async def look(self) -> None:
        """Look at the files of all models; stop waiting after LOOK_S, while the look goes on. A
        disk that does not answer holds one look, and so one thread, however many ask.
        """
        if self._next is None:  # a look under way may be older than some files
            self._next = asyncio.ensure_future(self._look())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asyncio.shield(self._next)

    async def _look(self) -> None:
        async with self._looking:
            self._next = None
            self._known = await self._read(self._served.catalog.specs)
