"""Lease a model by name: load once, keep while used, let go of what is idle, unwanted or old."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway import logs, metrics
from gateway.errors import GatewayError, ModelLoadFailed, ModelLoading, Unavailable
from gateway.jobs import Caller
from gateway.registry import Catalog, ModelSpec, load_alike
from gateway.serving.admission import NO_BOUND, Admission, Noun, waiting_for_load
from gateway.serving.budget import Budget
from gateway.serving.models.entry import MOVES, Entry, Failures, State
from gateway.serving.models.memory import Abandoned, Room

M = TypeVar("M")
LEAST_LOOK_S = 0.05
LOAD_RETRY_S = 5.0  # while it loads, nobody knows how fast its queue will drain
log = logs.get("cache")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """A model in memory, and the bytes it holds there.

    `adopt` has it take over what another spec says, of the kind that no load depends on.
    """

    model: M
    nbytes: int
    adopt: Callable[[ModelSpec], None] = lambda _: None


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
        self._admissions: dict[str, Admission] = {}  # a model's, whichever copies of it there are
        self._failures = Failures()
        self._is_closed = False
        self.room: Room[M] = Room(
            budget,
            max_models=max_models,
            wait_s=load_wait_s,
            is_pinned=self._is_pinned,
            is_current=self._is_current,
        )

    @contextlib.asynccontextmanager
    async def lease(self, spec: ModelSpec, caller: Caller | None = None) -> AsyncIterator[M]:
        """Enter with the model, loaded if need be. A model with leases is never evicted.

        Raises what loading raised, ModelLoading when it takes longer than `load_wait_s`, NoRoom,
        Overloaded when its queue is full, and DeadlineExceeded when the caller will not wait so
        long. The caller has a place in the queue as long as the lease lasts.
        """
        with self._place(spec, caller):
            entry = await self._entered(spec, caller)
            try:
                assert entry.model is not None
                yield entry.model
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
            if State.RETIRING in MOVES[entry.state]:
                entry.move(State.RETIRING)
            self._rest(entry)
        keepers = [entry.keeper for entry in leaving if entry.keeper is not None]
        if keepers:
            _, keepers_left = await asyncio.wait(keepers, timeout=self._load_wait_s)
            return not keepers_left
        return True

    def reconsider(self) -> None:
        """See what a new catalog changes: idle models may have to go, failures may be mended.

        What a model need not be loaded anew for, it takes over as it runs.
        """
        self._failures.clear()
        for entry in self._entries:
            if (current := self._catalog().current(entry.spec)) is not None:
                # The catalog's own object: they compare at a glance.
                entry.spec = current
                if entry.is_loaded:
                    entry.adopt(current)
                self._admission(current)
            self._rest(entry)

    @property
    def entries(self) -> Sequence[Entry[M]]:
        """List the models there are, from when they are asked for to when they are freed."""
        return tuple(self._entries)

    def loaded(self) -> list[M]:
        """List the models that are loaded now."""
        return [entry.model for entry in self._entries if entry.model is not None]

    def states(self) -> dict[str, str]:
        """Tell, by id, which models are `loading`, `loaded` or `failed` when last loaded."""
        failed = dict.fromkeys(self._failures.models(), "failed")
        return failed | {entry.spec.id: _state(entry) for entry in self._wanted()}

    def model(self, spec: ModelSpec) -> M | None:
        """Return a model, if it is loaded now."""
        entries = [entry for entry in self._wanted() if entry.spec.id == spec.id]
        return entries[-1].model if entries else None

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
        return [entry for entry in self._entries if entry.state is not State.LEAVING]

    def _is_pinned(self, entry: Entry[M]) -> bool:
        current = self._catalog().current(entry.spec)
        is_kept = entry.state in (State.LOADING, State.READY, State.YIELDING)
        return current is not None and current.pinned and is_kept

    def _is_current(self, entry: Entry[M]) -> bool:
        return self._catalog().current(entry.spec) is not None

    def _admission(self, spec: ModelSpec) -> Admission:
        current = self._catalog().by_id(spec.id) or spec
        limit = current.queue_limit or self._queue_limit
        admission = self._admissions.get(spec.id)
        if admission is None:
            admission = self._admissions[spec.id] = Admission(spec.id, Noun.REQUESTS, limit)
        admission.limit = limit
        return admission

    def _place(self, spec: ModelSpec, caller: Caller | None) -> AbstractContextManager[None]:
        """Hold a place in the model's queue while entered; who only loads it needs none.

        Raises Overloaded where there is none.
        """
        if caller is None:
            return contextlib.nullcontext()
        caller.timings.model = spec.id
        is_loaded = self.states().get(spec.id) == "loaded"
        return self._admission(spec).admitted(retry_after_s=None if is_loaded else LOAD_RETRY_S)

    def _entry(self, spec: ModelSpec) -> Entry[M]:
        """Find the one copy of the model that newcomers wait for or use, or begin to load it."""
        if self._is_closed:
            raise _shutting_down()
        for entry in self._entries:
            takes = entry.state in (State.LOADING, State.READY, State.YIELDING)
            if takes and load_alike(entry.spec, spec):
                return entry
        self._failures.check(spec.id)
        entry = Entry[M](spec)
        entry.is_successor = any(each.spec.id == spec.id for each in self._entries)
        self._entries.append(entry)
        entry.keeper = asyncio.create_task(self._keep(entry), name=f"keep {spec.id}")
        return entry

    async def _entered(self, spec: ModelSpec, caller: Caller | None) -> Entry[M]:
        """Begin a lease, as soon as there is a model to lease."""
        while True:
            began = metrics.now()
            entry = self._entry(spec)
            if entry.state is State.READY:
                entry.enter()
                return entry
            waiting = entry.wait()
            try:
                async with waiting_for_load(caller) if caller else contextlib.nullcontext():
                    is_in = await self._let_in(entry, waiting, began)
            except BaseException:
                entry.give_up(waiting)
                self._rest(entry)
                raise
            if is_in:
                return entry
            # It left for another's sake, or by hand. Its successor may be of a newer catalog.
            spec = self._catalog().by_id(spec.id) or spec
            self._entry(spec).is_successor = True

    async def _let_in(self, entry: Entry[M], waiting: asyncio.Future[bool], began: float) -> bool:
        """Wait for a load at most `load_wait_s`; what it waits for others does not count."""
        while not waiting.done():
            left_s = max(began, entry.resumed) + self._load_wait_s - metrics.now()
            if entry.waits_for_others:
                left_s = max(self._load_wait_s, LEAST_LOOK_S)
            if left_s <= 0:
                raise ModelLoading(
                    f"The model `{entry.spec.id}` is still {self._stage(entry)}. "
                    "Try again shortly.",
                    retry_after_s=LOAD_RETRY_S,
                )
            await asyncio.wait([waiting], timeout=left_s)
        return waiting.result()

    def _rest(self, entry: Entry[M]) -> None:
        """Decide what becomes of a model that nobody uses: it goes, or stays for its time."""
        if entry.leases:
            return
        if not entry.asked and State.LEAVING in MOVES[entry.state]:
            current = self._catalog().current(entry.spec)
            if entry.state is State.RETIRING or current is None:
                entry.move(State.LEAVING)
            elif entry.is_loaded:
                ttl_s = self._ttl_s if current.ttl_s is None else current.ttl_s
                entry.rest(None if current.pinned else ttl_s)
        self.room.announce()

    def _stage(self, entry: Entry[M]) -> str:
        percent = self._loader.fetched_percent(entry.spec)
        return "loading" if percent is None else f"being downloaded ({percent} %)"

    async def _keep(self, entry: Entry[M]) -> None:
        """Hold one model for its whole life here: files, room, load, use, free."""
        started, spec = metrics.now(), entry.spec
        try:
            prepared = await self._loader.prepared(spec)
            if entry.state is State.LEAVING:
                return  # it was let go of while it was fetched
            log.info("model_loading", model=spec.id)
            async with (
                self.room.taken(entry, prepared.nbytes) as share,
                prepared.opened() as loaded,
            ):
                share.state(loaded.nbytes)
                if entry.spec is not spec:  # the catalog was read again meanwhile
                    loaded.adopt(entry.spec)
                with self._welcomed(entry, loaded, metrics.now() - started):
                    await entry.left.wait()
            log.info("model_evicted", model=spec.id)
        except Abandoned:
            log.info("model_not_wanted", model=spec.id)
        except asyncio.CancelledError:
            self._fail(entry, _shutting_down())
            raise
        except GatewayError as error:
            self._fail(entry, error)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._fail(entry, ModelLoadFailed(spec.id, said), unforeseen=error)
        finally:
            entry.move(State.GONE)
            self._entries.remove(entry)
            self.room.announce()

    @contextlib.contextmanager
    def _welcomed(self, entry: Entry[M], loaded: Loaded[M], seconds: float) -> Iterator[None]:
        """Let in those who wait for a model, and count it."""
        model = entry.spec.id
        entry.last_used = metrics.now()
        entry.model, entry.adopt = loaded.model, loaded.adopt
        if entry.state is State.LOADING:
            entry.move(State.READY)
        else:
            entry.let_in()
        self._admission(entry.spec).begin()
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
        entry.refuse(error)

    async def __aenter__(self) -> "ModelCache[M]":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        entries = list(self._entries)
        for entry in entries:
            is_loading = entry.model is None
            entry.refuse(_shutting_down())
            if entry.state is not State.LEAVING:
                entry.move(State.LEAVING)
            if is_loading and entry.keeper is not None:
                entry.keeper.cancel()
        if keepers := [entry.keeper for entry in entries if entry.keeper is not None]:
            await asyncio.wait(keepers)


def _shutting_down() -> Unavailable:
    return Unavailable("The gateway is shutting down.", retry_after_s=1)


def _state(entry: Entry[M]) -> str:
    return "loaded" if entry.is_loaded else "loading"
