"""Lease a model by name: load once, keep while used, let go of what is idle, unwanted or old."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway import logs, metrics
from gateway.errors import GatewayError, ModelLoadFailed, ModelLoading, Unavailable
from gateway.jobs import Caller
from gateway.registry import Catalog, ModelSpec, load_alike
from gateway.serving.admission import NO_BOUND, Admission, Noun, waiting_for_load
from gateway.serving.budget import Budget
from gateway.serving.models.entries import LOAD_RETRY_S, Entry
from gateway.serving.models.failures import Failures, fresh
from gateway.serving.models.room import Room

M = TypeVar("M")
log = logs.get("cache")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """A model in memory, and the bytes it holds there."""

    model: M
    nbytes: int


@dataclass(frozen=True, slots=True)
class Prepared(Generic[M]):
    """A model whose files are here: the bytes it will hold; `opened` loads it, and frees it."""

    nbytes: int
    opened: Callable[[], AbstractAsyncContextManager[Loaded[M]]]


class Loader(Protocol[M]):
    """Where models come from."""

    async def prepared(self, spec: ModelSpec) -> Prepared[M]:
        """Find or fetch a model's files, and tell its size."""

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        """Tell how much of a model's download is done; None when none is under way."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a model is: unloaded, loading, loaded, or failed when it was last to be loaded.

    `nbytes` is what it holds of the budget, `last_used` a Unix time.
    """

    state: str
    nbytes: int | None = None
    last_used: int | None = None
    failure: str | None = None


class ModelCache(Generic[M]):
    """At most `max_models` at once, and no more bytes than the budget has.

    `catalog` gives the one in force: a model that it would load otherwise, or not at all, serves
    its leases to their end and goes. A context manager: leaving it lets every model go.
    """

    def __init__(
        self,
        loader: Loader[M],
        catalog: Callable[[], Catalog],
        budget: Budget,
        *,
        max_models: int,
        load_wait_s: float,
        ttl_s: float | None = None,
        queue_limit: int = NO_BOUND,
    ) -> None:
        self._loader = loader
        self._catalog = catalog
        self._load_wait_s = load_wait_s
        self._ttl_s = ttl_s
        self._queue_limit = queue_limit
        self._entries: list[Entry[M]] = []
        self._failures = Failures()
        self.room: Room[M] = Room(
            budget, max_models=max_models, wait_s=load_wait_s, is_pinned=self._is_pinned
        )

    @contextlib.asynccontextmanager
    async def lease(self, spec: ModelSpec, caller: Caller | None = None) -> AsyncIterator[M]:
        """Give the loaded model, loading it first if need be. A leased model is never evicted.

        Raises what loading raised, ModelLoading when it takes longer than `load_wait_s`,
        Overloaded when its queue is full, and DeadlineExceeded when the caller will not wait so
        long. The caller has a place in the queue as long as the lease lasts.
        """
        entry = self._entry(spec)
        entry.enter()
        try:
            with entry.place(caller):
                yield await self._loaded(entry, caller)
        finally:
            entry.leave()
            self._rest(entry)

    async def load(self, spec: ModelSpec) -> None:
        """Load a model, though it failed a moment ago; raises as `lease` does."""
        self._failures.forget(spec.id)
        async with self.lease(spec):
            pass

    async def unload(self, spec: ModelSpec) -> bool:
        """Let a model go, pinned or not, as soon as nobody uses it.

        Tells whether its memory was back within `load_wait_s`. Whoever asks for it meanwhile
        loads it anew.
        """
        self._failures.forget(spec.id)
        leaving = [entry for entry in self._entries if entry.spec.id == spec.id]
        for entry in leaving:
            entry.is_dismissed = True
            self._rest(entry)
        keepers = [entry.keeper for entry in leaving if entry.keeper is not None]
        if keepers:
            _, keepers_left = await asyncio.wait(keepers, timeout=self._load_wait_s)
            return not keepers_left
        return True

    def reconsider(self) -> None:
        """See what a new catalog changes: idle models may have to go, failures may be mended."""
        self._failures.clear()
        for entry in self._entries:
            # The catalog's own object, where it serves it still: they compare at a glance.
            entry.spec = self._catalog().current(entry.spec) or entry.spec
            self._rest(entry)

    @property
    def entries(self) -> Sequence[Entry[M]]:
        """List the models there are, from when they are asked for to when they are freed."""
        return tuple(self._entries)

    def loaded(self) -> list[M]:
        """List the models that are loaded now."""
        return [entry.ready.result() for entry in self._wanted() if entry.is_loaded]

    def states(self) -> dict[str, str]:
        """Tell, by id, which models are `loading`, `loaded` or `failed` when last loaded."""
        failed = dict.fromkeys(self._failures.models(), "failed")
        return failed | {entry.spec.id: _state(entry) for entry in self._wanted()}

    def status(self, spec: ModelSpec) -> Status:
        """Tell how a model is."""
        entries = [entry for entry in self._wanted() if entry.spec.id == spec.id]
        if not entries:
            failure = self._failures.of(spec.id)
            return Status("failed", failure=str(failure)) if failure else Status("unloaded")
        entry = entries[-1]
        if not entry.is_loaded:
            return Status("loading")
        used_s_ago = 0 if entry.leases else metrics.now() - entry.last_used
        return Status("loaded", entry.nbytes, int(time.time() - used_s_ago))

    def _wanted(self) -> list[Entry[M]]:
        return [entry for entry in self._entries if not entry.unwanted.is_set()]

    def _is_pinned(self, entry: Entry[M]) -> bool:
        current = self._catalog().current(entry.spec)
        return current is not None and current.pinned and not entry.is_dismissed

    def _entry(self, spec: ModelSpec) -> Entry[M]:
        namesakes = [entry for entry in self._entries if entry.spec.id == spec.id]
        for entry in namesakes:
            if entry.is_open and load_alike(entry.spec, spec):
                return entry
        self._failures.check(spec.id)
        for entry in namesakes:
            entry.is_dismissed = entry.is_dismissed or entry.is_doomed
        admission = Admission(spec.id, Noun.REQUESTS, spec.queue_limit or self._queue_limit)
        entry = Entry[M](spec, admission)
        self._entries.append(entry)
        entry.keeper = asyncio.create_task(self._keep(entry), name=f"keep {spec.id}")
        return entry

    def _rest(self, entry: Entry[M]) -> None:
        """Decide what becomes of a model that nobody uses: it goes, or stays for its time."""
        if entry.leases:
            return
        current = self._catalog().current(entry.spec)
        if entry.is_doomed or entry.is_dismissed or current is None:
            entry.unwanted.set()
        elif entry.is_loaded:
            ttl_s = self._ttl_s if current.ttl_s is None else current.ttl_s
            entry.rest(None if current.pinned else ttl_s)
        self.room.announce()

    async def _loaded(self, entry: Entry[M], caller: Caller | None) -> M:
        if not entry.ready.done():
            async with waiting_for_load(caller) if caller else contextlib.nullcontext():
                await asyncio.wait([entry.ready], timeout=self._load_wait_s)
        if not entry.ready.done():
            raise ModelLoading(
                f"The model `{entry.spec.id}` is still {self._stage(entry)}. Try again shortly.",
                retry_after_s=LOAD_RETRY_S,
            )
        if isinstance(error := entry.ready.exception(), GatewayError):
            raise fresh(error) from None
        return entry.ready.result()

    def _stage(self, entry: Entry[M]) -> str:
        if entry.is_waiting:
            return "waiting for room"
        percent = self._loader.fetched_percent(entry.spec)
        return "loading" if percent is None else f"being downloaded ({percent} %)"

    async def _keep(self, entry: Entry[M]) -> None:
        """Hold one model for its whole life here: files, room, load, use, free."""
        started = metrics.now()
        try:
            prepared = await self._loader.prepared(entry.spec)
            if entry.unwanted.is_set():
                return  # it was let go of while it was fetched
            async with (
                self.room.taken(entry, prepared.nbytes) as share,
                prepared.opened() as loaded,
            ):
                share.state(loaded.nbytes)
                with self._welcomed(entry, loaded, metrics.now() - started):
                    await entry.unwanted.wait()
            log.info("model_evicted", model=entry.spec.id)
        except asyncio.CancelledError:
            self._fail(entry, Unavailable("The gateway is shutting down.", retry_after_s=1))
            raise
        except GatewayError as error:
            self._fail(entry, error)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._fail(entry, ModelLoadFailed(entry.spec.id, said), unforeseen=error)
        finally:
            self._entries.remove(entry)
            self.room.announce()

    @contextlib.contextmanager
    def _welcomed(self, entry: Entry[M], loaded: Loaded[M], seconds: float) -> Iterator[None]:
        """Give a model to those who wait for it, and count it."""
        model = entry.spec.id
        entry.last_used = metrics.now()
        entry.ready.set_result(loaded.model)
        entry.admission.begin()
        self._failures.forget(model)
        self._rest(entry)
        self.room.announce()  # a loaded model may have to give way
        metrics.of(metrics.MODEL_LOADS, model, "loaded").inc()
        log.info("model_loaded", model=model, seconds=round(seconds, 2), bytes=loaded.nbytes)
        metrics.MODELS_LOADED.inc()
        try:
            yield
        finally:
            metrics.MODELS_LOADED.dec()

    def _fail(
        self, entry: Entry[M], error: GatewayError, unforeseen: Exception | None = None
    ) -> None:
        """Tell those who wait; only what was not foreseen needs its traceback in the log."""
        model = entry.spec.id
        metrics.of(metrics.MODEL_LOADS, model, "failed").inc()
        log.error("model_failed", model=model, error=str(error), exc_info=unforeseen)
        if self._catalog().current(entry.spec):  # else it says nothing of the one in force
            self._failures.remember(model, error)
        if not entry.ready.done():
            entry.ready.set_exception(error)
            entry.ready.exception()  # nobody may be waiting any more, and that is fine

    async def __aenter__(self) -> "ModelCache[M]":
        return self

    async def __aexit__(self, *_: object) -> None:
        entries = list(self._entries)
        for entry in entries:
            entry.rest(None)
            entry.unwanted.set()
            if not entry.ready.done() and entry.keeper is not None:
                entry.keeper.cancel()
        if keepers := [entry.keeper for entry in entries if entry.keeper is not None]:
            await asyncio.wait(keepers)


def _state(entry: Entry[M]) -> str:
    return "loaded" if entry.is_loaded else "loading"
