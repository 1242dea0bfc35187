"""Downloads models' files, one model at a time; all callers of a model share its download."""

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
ADMIN = "admin"
NOBODY = "none"  # the key id of pulls that no key asked for


class Fetched(NamedTuple):
    """The progress of a model's download, in bytes."""

    completed: int
    total: int | None = None  # None until the hub has listed the files


class Store(Protocol):
    """The interface for finding and downloading models' files."""

    async def find(self, spec: ModelSpec) -> Path | None:
        """Return the path of a model's files if all are on this disk."""

    async def files(self, spec: ModelSpec, *, is_pull: bool = False) -> Path:
        """Find or download a model's files; an admin's pull may do so despite the settings."""

    def fetched(self, spec: ModelSpec) -> Fetched: ...


@dataclass(slots=True, eq=False)
class Pull:
    """A waiting or running download."""

    spec: ModelSpec
    key: str
    whole: int  # bytes of all the model's files; 0 if they are unknown
    status: Literal["waiting", "downloading"] = "waiting"
    task: "asyncio.Task[Path]" = field(init=False)

    async def wait(self) -> Path:
        """Wait for the download. Raises ModelUnavailable, ModelLoadFailed, and ShuttingDown."""
        try:
            return await shared(self.task)
        except asyncio.CancelledError:
            if self.task.cancelled():
                raise ShuttingDown from None
            raise


class Pulls:
    """The waiting and running downloads, which end when this context exits."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()  # asyncio's locks are fair
        self._pulls: dict[object, Pull] = {}

    @property
    def under_way(self) -> Sequence[Pull]:
        return tuple(self._pulls.values())

    @property
    def pending(self) -> int:
        """Return the bytes that all downloads still need, as far as sizes are known."""
        return sum(max(0, pull.whole - self._on_disk(pull.spec)) for pull in self.under_way)

    def _on_disk(self, spec: ModelSpec) -> int:
        return self._store.fetched(spec).completed

    def fetched(self, pull: Pull) -> Fetched:
        # Files of an older revision may be on disk too, so the bytes are capped.
        completed, total = self._store.fetched(pull.spec)
        return Fetched(min(completed, total or completed), total)

    def begin(self, spec: ModelSpec, key: str = NOBODY, whole: int = 0) -> Pull:
        """Return a model's download, and begin it for `key` unless it is under way."""
        name = (spec.id, spec.source)
        pull = self._pulls.get(name)
        if pull is None:
            pull = self._pulls[name] = Pull(spec, key, whole)
            pull.task = asyncio.create_task(self._run(pull), name=f"pull {spec.id}")
            pull.task.add_done_callback(lambda _: self._end(name))
        return pull

    def percent(self, spec: ModelSpec) -> int | None:
        pull = self._pulls.get((spec.id, spec.source))
        completed, total = self.fetched(pull) if pull is not None else Fetched(0)
        if not total:
            return None
        return min(99, 100 * completed // total)

    def _end(self, name: object) -> None:
        task = self._pulls.pop(name).task
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it

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
    if isinstance(spec, ChatSpec) and spec.base_spec is not None:
        return (spec.base_spec, spec)
    return (spec,)
