"""Downloads of models' files: one at a time, in the order they were asked for, each watched by all
who wait for it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from gateway import clock, logs, metrics
from gateway.errors import ShuttingDown
from gateway.registry import ChatSpec, ModelSpec
from gateway.serving.models.entry import shared

log = logs.get("pulls")
ADMIN = "admin"  # an admin's pull is counted to this name, others to the id of a key
NOBODY = "none"


class Fetched(NamedTuple):
    """How much of a model is on disk, in bytes."""

    completed: int
    # Bytes of all its files; None until the hub has listed them.
    total: int | None = None


class Store(Protocol):
    """The place of models' files, and their source."""

    async def find(self, spec: ModelSpec) -> Path | None:
        """Return the place of a model's files if all that it loads is on this disk."""

    async def files(self, spec: ModelSpec, *, is_pull: bool = False) -> Path:
        """Find or download a model's files. An admin's pull may download whatever the settings."""

    def fetched(self, spec: ModelSpec) -> Fetched:
        """Return how much of a model is on disk."""


@dataclass(slots=True, eq=False)
class Pull:
    """A model whose files are fetched, or wait for those of another to be there."""

    spec: ModelSpec
    key: str
    whole: int  # bytes of the whole model on disk; 0 until the hub has listed its files
    status: Literal["waiting", "downloading"] = "waiting"
    task: "asyncio.Task[Path]" = field(init=False)

    async def wait(self) -> Path:
        """Return the place of the files. A caller that is cancelled does not stop the download.

        Raises ModelUnavailable, ModelLoadFailed, and Unavailable at a shutdown.
        """
        try:
            return await shared(self.task)
        except asyncio.CancelledError:
            if self.task.cancelled():
                raise ShuttingDown from None
            raise


class Pulls:
    """The downloads under way. A context manager: leaving it ends them, and fetched files stay."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()  # asyncio's locks are fair
        self._pulls: dict[object, Pull] = {}

    @property
    def under_way(self) -> Sequence[Pull]:
        """Return the downloads under way, the oldest first."""
        return tuple(self._pulls.values())

    @property
    def pending(self) -> int:
        """Return the bytes that are still to be fetched, as far as they are known."""
        return sum(max(0, pull.whole - self._on_disk(pull.spec)) for pull in self.under_way)

    def _on_disk(self, spec: ModelSpec) -> int:
        return self._store.fetched(spec).completed

    def fetched(self, pull: Pull) -> Fetched:
        """Return how much of a pull's model is on disk."""
        # Files that an older revision left may count too.
        completed, total = self._store.fetched(pull.spec)
        return Fetched(min(completed, total or completed), total)

    def begin(self, spec: ModelSpec, key: str = NOBODY, whole: int = 0) -> Pull:
        """Return the pull of a model that is under way, or begin one that is counted to a key.

        It will have `whole` bytes on disk, if that is known.
        """
        name = (spec.id, spec.source)
        pull = self._pulls.get(name)
        if pull is None:
            pull = self._pulls[name] = Pull(spec, key, whole)
            pull.task = asyncio.create_task(self._run(pull), name=f"pull {spec.id}")
            pull.task.add_done_callback(lambda _: self._end(name))
        return pull

    def percent(self, spec: ModelSpec) -> int | None:
        """Return how much of a model's download is done; None if none is under way."""
        pull = self._pulls.get((spec.id, spec.source))
        completed, total = self.fetched(pull) if pull is not None else Fetched(0)
        if not total:
            return None
        return min(99, 100 * completed // total)

    def _end(self, name: object) -> None:
        task = self._pulls.pop(name).task
        if not task.cancelled():
            task.exception()  # retrieved: asyncio would log it if nobody waits any more

    async def _run(self, pull: Pull) -> Path:
        files = await self._store.find(pull.spec)
        if files is not None:
            return files
        async with self._turn:
            pull.status = "downloading"
            for part in _parts(pull.spec):
                files = await self._fetch(part, pull.key)
            assert files is not None
            return files

    async def _fetch(self, spec: ModelSpec, key: str) -> Path:
        """Fetch one model's files, if another's download has not brought them by now."""
        started, before = clock.now(), self._on_disk(spec)
        try:
            return await self._store.files(spec, is_pull=key == ADMIN)
        finally:
            nbytes = max(0, self._on_disk(spec) - before)
            metrics.of(metrics.PULLED_BYTES, key).inc(nbytes)
            seconds = round(clock.now() - started, 2)
            log.info("pull_ended", model=spec.id, key=key, bytes=nbytes, seconds=seconds)

    async def __aenter__(self) -> "Pulls":
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [pull.task for pull in self._pulls.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _parts(spec: ModelSpec) -> Sequence[ModelSpec]:
    """Return a model, after the base whose weights it shares."""
    if isinstance(spec, ChatSpec) and spec.base_spec is not None:
        return (spec.base_spec, spec)
    return (spec,)
