"""The model cache: models are loaded once, leased to requests, and evicted when idle."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway import clock, logs, metrics
from gateway.errors import GatewayError, ModelLoadFailed, ModelLoading, NoRoom, ShuttingDown
from gateway.jobs import Caller
from gateway.registry import ChatSpec, ModelSpec, load_alike
from gateway.serving.admission import NO_BOUND, Admission, Noun, time_load
from gateway.serving.budget import Budget
from gateway.serving.models.entry import Entry, Failures, State
from gateway.serving.models.eviction import Abandoned, Room
from gateway.serving.models.served import Served

M = TypeVar("M")
LOAD_RETRY_S = 5.0
log = logs.get("cache")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """A model in memory."""

    model: M
    nbytes: int
    # Applies a newer spec, whose changed keys do not need a reload.
    adopt: Callable[[ModelSpec], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Prepared(Generic[M]):
    """A model whose files are on disk."""

    nbytes: int
    open: Callable[[], AbstractAsyncContextManager[Loaded[M]]]  # loads the model until exit


class Loader(Protocol[M]):
    """The interface for loading models."""

    async def prepare(self, spec: ModelSpec, base: M | None = None) -> Prepared[M]:
        """Find or download the files of a model, or of an adapter of the loaded `base`."""

    def fetched_percent(self, spec: ModelSpec) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Status:
    """A model's state, as the API shows it."""

    state: str  # "unloaded", "loading", "loaded", or "failed" if the last load failed
    nbytes: int | None = None
    last_used: int | None = None  # Unix time
    failure: str | None = None


class ModelCache(Generic[M]):
    """A cache of at most `max_models` models, within the memory budget.

    A model that is no longer served, or whose spec needs a reload, is freed after its last lease.
    """

    def __init__(
        self,
        loader: Loader[M],
        served: Served,
        budget: Budget,
        *,
        max_models: int,
        load_wait_s: float,
        ttl_s: float | None = None,
        queue_limit: int = NO_BOUND,
    ) -> None:
        self._loader = loader
        self._served = served
        self._load_wait_s = load_wait_s
        self._ttl_s = ttl_s
        self._queue_limit = queue_limit
        self._entries: list[Entry[M]] = []
        self._admissions: dict[str, Admission] = {}
        self._failures = Failures()
        self._pins: dict[str, bool] = {}  # set by `pin`
        self._is_closed = False
        self._room: Room[M] = Room(budget, max_models=max_models, is_pinned=self._is_pinned)

    @contextlib.asynccontextmanager
    async def lease(self, spec: ModelSpec, caller: Caller | None = None) -> AsyncIterator[M]:
        """Yield the model, loading it first if necessary, and hold a place in its queue.

        Raises a failed load's error, ModelLoading, NoRoom, Overloaded, and DeadlineExceeded.
        """
        with self._admit(spec, caller):
            lease_base: AbstractAsyncContextManager[Entry[M] | None] = contextlib.nullcontext()
            if isinstance(spec, ChatSpec) and spec.base_spec is not None:
                self._failures.check(spec.id)  # else the base may be loaded in vain
                lease_base = self._use(spec.base_spec, None, caller)
            async with lease_base as base, self._use(spec, base, caller) as entry:
                assert entry.model is not None
                yield entry.model

    async def load(self, spec: ModelSpec) -> None:
        """Load a model, even if its last load has just failed."""
        self._failures.forget(spec.id)
        async with self.lease(spec):
            pass

    async def unload(self, spec: ModelSpec) -> bool:
        """Free a model after its last lease. Return False if that takes over `load_wait_s`."""
        self._failures.forget(spec.id)
        leaving = [entry for entry in self._entries if entry.spec.id == spec.id]
        for entry in leaving:
            if entry.may_move_to(State.RETIRING):
                entry.move_to(State.RETIRING)
            self._retire_if_unused(entry)
        tasks = [entry.task for entry in leaving if entry.task is not None]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=self._load_wait_s)
            return not pending
        return True

    def pin(self, spec: ModelSpec, *, is_pinned: bool) -> None:
        """Pin or unpin a model until models.yaml is reloaded."""
        self._pins[spec.id] = is_pinned
        self._failures.clear()
        for entry in self._entries:
            self._retire_if_unused(entry)
        self._room.notify()

    def is_pinned(self, spec: ModelSpec) -> bool:
        return self._pins.get(spec.id, spec.pinned)

    def reconsider(self) -> None:
        """Apply a new catalog, free idle models that it lacks, and forget failures and pins."""
        self.forget()
        self._failures.clear()
        self._pins.clear()
        for entry in self._entries:
            current = self._served.catalog.current(entry.spec)
            if current is not None:
                # `load_alike` is fast for identical objects.
                entry.spec = current
                if entry.is_loaded:
                    entry.adopt(current)
                self._admission(current)
            self._retire_if_unused(entry)

    def forget(self) -> None:
        """Forget metrics and failures of models that are neither in the catalog nor in memory."""
        known = {spec.id for spec in self._served.catalog.specs}
        known.update(entry.spec.id for entry in self._entries)
        for model in self._admissions.keys() - known:
            del self._admissions[model]
            self._failures.forget(model)
            metrics.forget(model)

    @property
    def entries(self) -> Sequence[Entry[M]]:
        return tuple(self._entries)

    def loaded(self) -> list[M]:
        return [entry.model for entry in self._entries if entry.model is not None]

    def states(self) -> dict[str, str]:
        failed = dict.fromkeys(self._failures.models(), "failed")
        loading = {entry.spec.id: "loading" for entry in self._staying()}
        loaded = {entry.spec.id: "loaded" for entry in self._staying() if entry.is_loaded}
        return failed | loading | loaded

    def has_failed(self, spec: ModelSpec) -> bool:
        return self._failures.of(spec.id) is not None

    def model(self, spec: ModelSpec) -> M | None:
        entries = [entry for entry in self._staying() if entry.spec.id == spec.id]
        if not entries:
            return None
        return entries[-1].model

    def status(self, spec: ModelSpec) -> Status:
        entries = [entry for entry in self._staying() if entry.spec.id == spec.id]
        failure = self._failures.of(spec.id)
        if not entries and failure:
            return Status("failed", failure=str(failure))
        if not entries:
            return Status("unloaded")
        entry = entries[-1]
        if not entry.is_loaded:
            return Status("loading")
        last_used = time.time()
        if not entry.leases:
            last_used -= clock.now() - entry.last_used
        return Status("loaded", entry.nbytes, int(last_used))

    def _staying(self) -> list[Entry[M]]:
        return [entry for entry in self._entries if entry.state is not State.LEAVING]

    def _is_pinned(self, entry: Entry[M]) -> bool:
        current = self._served.catalog.current(entry.spec)
        is_pinned = current is not None and self.is_pinned(current) and entry.is_open
        return is_pinned or any(self._is_pinned(adapter) for adapter in self._adapters(entry))

    def _adapters(self, base: Entry[M]) -> list[Entry[M]]:
        return [entry for entry in self._entries if entry.base is base]

    def _admission(self, spec: ModelSpec) -> Admission:
        current = self._served.catalog.by_id(spec.id) or spec
        limit = current.queue_limit or self._queue_limit
        admission = self._admissions.get(spec.id)
        if admission is None:
            admission = self._admissions[spec.id] = Admission(spec.id, Noun.REQUESTS, limit)
        admission.limit = limit
        return admission

    def _admit(self, spec: ModelSpec, caller: Caller | None) -> AbstractContextManager[None]:
        if caller is None:
            return contextlib.nullcontext()
        caller.timings.model = spec.id
        is_loaded = self.states().get(spec.id) == "loaded"
        return self._admission(spec).admit(retry_after_s=None if is_loaded else LOAD_RETRY_S)

    @contextlib.asynccontextmanager
    async def _use(
        self, spec: ModelSpec, base: Entry[M] | None, caller: Caller | None
    ) -> AsyncIterator[Entry[M]]:
        entry = self._entry(spec, base)
        entry.enter()
        try:
            if not entry.is_settled.is_set():
                async with time_load(caller) if caller else contextlib.nullcontext():
                    await self._wait(entry)
            if entry.failure is not None:
                raise entry.failure.copy()
            yield entry
        finally:
            entry.leave()
            self._retire_if_unused(entry)

    def _entry(self, spec: ModelSpec, base: Entry[M] | None) -> Entry[M]:
        """Return a model's open entry, or a new one, whose load begins."""
        if self._is_closed:
            raise ShuttingDown
        for entry in self._entries:
            if entry.is_open and entry.base is base and load_alike(entry.spec, spec):
                return entry
        self._failures.check(spec.id)
        for counter in (metrics.REJECTED, metrics.EVICTIONS):
            metrics.of(counter, spec.id)  # creates the series, so that rates see the first event
        entry = Entry[M](spec, base)
        if base is not None:
            base.enter()
        self._entries.append(entry)
        entry.task = asyncio.create_task(self._run(entry), name=f"model {spec.id}")
        return entry

    async def _wait(self, entry: Entry[M]) -> None:
        try:
            async with asyncio.timeout(self._load_wait_s):
                await entry.is_settled.wait()
        except TimeoutError:
            if entry.waits_for_room:
                raise NoRoom(entry.spec.id, self._room.users()) from None
            raise ModelLoading(
                f"The model `{entry.spec.id}` is still {self._stage(entry)}. Try again shortly.",
                retry_after_s=LOAD_RETRY_S,
            ) from None

    def _retire_if_unused(self, entry: Entry[M]) -> None:
        """Free a model without callers if it was unloaded or removed, or else start its TTL."""
        if entry.leases:
            return
        if entry.may_move_to(State.LEAVING):
            current = self._served.catalog.current(entry.spec)
            if entry.state is State.RETIRING or current is None:
                entry.move_to(State.LEAVING)
            elif entry.is_loaded:
                ttl_s = self._ttl_s if current.ttl_s is None else current.ttl_s
                entry.start_ttl(None if self._is_pinned(entry) else ttl_s)
        self._room.notify()

    def _stage(self, entry: Entry[M]) -> str:
        percent = self._loader.fetched_percent(entry.spec)
        if percent is None:
            return "loading"
        return f"being downloaded ({percent} %)"

    async def _run(self, entry: Entry[M]) -> None:
        started, spec, base = clock.now(), entry.spec, entry.base
        holding_base = contextlib.ExitStack()
        if base is not None:
            holding_base.callback(self._retire_if_unused, base)
            holding_base.callback(base.leave)
        try:
            prepared = await self._loader.prepare(spec, base.model if base is not None else None)
            if entry.state is State.LEAVING:
                return
            log.info("model_loading", model=spec.id)
            async with (
                self._room.hold(entry, prepared.nbytes) as share,
                prepared.open() as loaded,
            ):
                share.resize(loaded.nbytes)
                if entry.spec is not spec:
                    loaded.adopt(entry.spec)
                holding_base.close()
                with self._serve(entry, loaded, clock.now() - started):
                    await entry.leaving.wait()
                await self._free_adapters(entry)
            log.info("model_evicted", model=spec.id)
        except Abandoned:
            log.info("model_load_abandoned", model=spec.id)
        except asyncio.CancelledError:
            self._fail(entry, ShuttingDown())
            raise
        except GatewayError as error:
            self._fail(entry, error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._fail(entry, ModelLoadFailed(spec.id, reason), unforeseen=error)
        finally:
            holding_base.close()
            entry.move_to(State.GONE)
            self._entries.remove(entry)
            self._room.notify()

    async def _free_adapters(self, base: Entry[M]) -> None:
        # The adapters have no callers, since these would lease the base too.
        for entry in self._adapters(base):
            if entry.may_move_to(State.LEAVING):
                entry.move_to(State.LEAVING)
        tasks = [entry.task for entry in self._adapters(base) if entry.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    @contextlib.contextmanager
    def _serve(self, entry: Entry[M], loaded: Loaded[M], seconds: float) -> Iterator[None]:
        model = entry.spec.id
        entry.last_used = clock.now()
        entry.model, entry.adopt = loaded.model, loaded.adopt
        if entry.state is State.LOADING:
            entry.move_to(State.READY)
        entry.settle()
        self._admission(entry.spec).begin()
        self._failures.forget(model)
        self._retire_if_unused(entry)
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
        model = entry.spec.id
        metrics.of(metrics.MODEL_LOADS, model, "failed").inc()
        if isinstance(error, ShuttingDown):
            log.info("model_load_abandoned", model=model)
        else:
            log.error("model_failed", model=model, error=str(error), exc_info=unforeseen)
        if self._served.catalog.current(entry.spec):
            self._failures.remember(model, error)
        entry.settle(error)

    async def __aenter__(self) -> "ModelCache[M]":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        entries = list(self._entries)
        for entry in entries:
            if entry.model is None and entry.task is not None:
                entry.task.cancel()
                entry.settle(ShuttingDown())  # a task cancelled before it begins doesn't settle
            elif entry.may_move_to(State.LEAVING):
                entry.move_to(State.LEAVING)
        tasks = [entry.task for entry in entries if entry.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        self._entries.clear()
