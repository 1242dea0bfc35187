"""What is known of models' inputs by the files on this disk, be the models loaded or not."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from gateway.registry import Inputs, ModelSpec

# Returns the inputs of models by id, None for one whose files are not on this disk.
Read: TypeAlias = Callable[[Sequence[ModelSpec]], Awaitable[Mapping[str, Inputs | None]]]
LOOK_S = 3.0  # for some small files of each model; a network disk may never answer


class KnownInputs:
    """The inputs of models, as they were when their files were last looked at."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._known: dict[str, Inputs | None] = {}
        self._look: asyncio.Future[Mapping[str, Inputs | None]] | None = None

    def of(self, spec: ModelSpec) -> Inputs | None:
        """Return a model's inputs; None if its files were not on this disk."""
        return self._known.get(spec.id)

    async def look(self, specs: Iterable[ModelSpec]) -> None:
        """Look at the files of models, unless that takes too long. A disk that does not answer
        holds one look, and so one thread, whoever asks.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                while self._look is not None and not self._look.done():
                    await asyncio.wait({self._look})  # it may have begun before files came
                self._look = asyncio.ensure_future(self._read([*specs]))
                self._known |= await asyncio.shield(self._look)
