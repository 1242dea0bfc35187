"""Lease a model by name: load once, keep while used, let the least recently used idle one go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from gateway import logs, metrics
from gateway.errors import GatewayError, ModelLoading, ModelUnavailable, Unavailable
from gateway.registry import ModelSpec

M = TypeVar("M")
K = TypeVar("K")
log = logs.get("cache")

FAILURE_REMEMBERED_S = 30.0


def pick_evicted(last_used: Mapping[K, float], leases: Mapping[K, int]) -> K | None:
    """Give the idle model that was used longest ago; None when every one is leased."""
    idle = [model for model in last_used if leases[model] == 0]
    return min(idle, key=lambda model: last_used[model], default=None)


class _Entry(Generic[M]):
    """A model from the moment its load begins to the moment its memory is back.

    A doomed one is in use while others wait for its room: it gets no new leases, and is unwanted
    when the last one ends.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_doomed = False
        self.ready: asyncio.Future[M] = asyncio.get_running_loop().create_future()
        self.unwanted = asyncio.Event()
        self.leases = 0
        self.last_used = 0.0
        self.keeper: asyncio.Task[None] | None = None

    @property
    def is_loaded(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and not self.ready.exception()


class ModelCache(Generic[M]):
    """At most `max_models` at once. `opened` loads a model on enter and frees it on exit.

    A context manager: leaving it lets every model go.
    """

    def __init__(
        self,
        opened: Callable[[ModelSpec], AbstractAsyncContextManager[M]],
        *,
        max_models: int,
        load_wait_s: float,
        fetched_percent: Callable[[ModelSpec], int | None] = lambda _: None,
    ) -> None:
        self._opened = opened
        self._max_models = max_models
        self._load_wait_s = load_wait_s
        self._fetched_percent = fetched_percent
        self._entries: list[_Entry[M]] = []  # in the order they are served
        self._failures: dict[str, tuple[float, GatewayError]] = {}
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lease(self, spec: ModelSpec) -> AsyncIterator[M]:
        """Give the loaded model, loading it first if need be. A leased model is never evicted.

        Raises what loading raised, or ModelLoading when it takes longer than `load_wait_s`.
        """
        entry = self._entry(spec)
        entry.leases += 1
        try:
            yield await self._loaded(spec, entry)
        finally:
            entry.leases -= 1
            entry.last_used = metrics.now()
            if entry.leases == 0:
                if entry.is_doomed:
                    entry.unwanted.set()
                self._announce()

    def loaded(self) -> list[M]:
        """List the models that are loaded now."""
        return [entry.ready.result() for entry in self._wanted() if entry.is_loaded]

    def states(self) -> dict[str, str]:
        """Tell, by id, which models are `loading`, `loaded` or recently `failed`."""
        states = dict.fromkeys(self._recent_failures(), "failed")
        for entry in self._wanted():
            states[entry.name] = "loaded" if entry.is_loaded else "loading"
        return states

    def _wanted(self) -> list[_Entry[M]]:
        return [entry for entry in self._entries if not entry.unwanted.is_set()]

    def _entry(self, spec: ModelSpec) -> _Entry[M]:
        for entry in self._wanted():
            if entry.name == spec.id and not entry.is_doomed:
                return entry
        if (failure := self._recent_failures().get(spec.id)) is not None:
            raise _fresh(failure) from None
        entry = _Entry(spec.id)
        self._entries.append(entry)
        entry.keeper = asyncio.create_task(self._keep(spec, entry), name=f"keep {spec.id}")
        return entry

    def _recent_failures(self) -> dict[str, GatewayError]:
        now = metrics.now()
        self._failures = {k: v for k, v in self._failures.items() if v[0] > now}
        return {name: error for name, (_, error) in self._failures.items()}

    async def _loaded(self, spec: ModelSpec, entry: _Entry[M]) -> M:
        if not entry.ready.done():
            await asyncio.wait([entry.ready], timeout=self._load_wait_s)
        if not entry.ready.done():
            percent = self._fetched_percent(spec)
            stage = "loading" if percent is None else f"being downloaded ({percent} %)"
            raise ModelLoading(
                f"The model `{spec.id}` is still {stage}. Try again shortly.", retry_after_s=5
            )
        if isinstance(error := entry.ready.exception(), GatewayError):
            raise _fresh(error) from None
        return entry.ready.result()

    async def _keep(self, spec: ModelSpec, entry: _Entry[M]) -> None:
        """Hold one model for its whole life here: room, load, use, free."""
        started = metrics.now()
        try:
            await self._make_room(entry)
            async with self._opened(spec) as model:
                entry.last_used = metrics.now()
                entry.ready.set_result(model)
                metrics.of(metrics.MODEL_LOADS, spec.id, "loaded").inc()
                metrics.MODELS_LOADED.inc()
                log.info(
                    "model_loaded",
                    model=spec.id,
                    seconds=round(metrics.now() - started, 2),
                )
                self._announce()
                try:
                    await entry.unwanted.wait()
                finally:
                    metrics.MODELS_LOADED.dec()
            log.info("model_evicted", model=spec.id)
        except asyncio.CancelledError:
            self._fail(
                spec,
                entry,
                Unavailable("The gateway is shutting down.", retry_after_s=1),
            )
            raise
        except Exception as error:
            self._fail(spec, entry, error)
        finally:
            self._entries.remove(entry)
            self._announce()

    def _fail(self, spec: ModelSpec, entry: _Entry[M], error: Exception) -> None:
        metrics.of(metrics.MODEL_LOADS, spec.id, "failed").inc()
        log.error(
            "model_failed",
            model=spec.id,
            error=str(error),
            exc_info=_unless_told(error),
        )
        if isinstance(error, ModelUnavailable):
            self._failures[spec.id] = (metrics.now() + FAILURE_REMEMBERED_S, error)
        if not entry.ready.done():
            entry.ready.set_exception(error)
            entry.ready.exception()  # nobody may be waiting any more, and that is fine

    async def _make_room(self, mine: _Entry[M]) -> None:
        """Wait until fewer than `max_models` of those before mine are left.

        Those are loaded, or will be sooner; they hold memory until their keepers end.
        """
        while len(before := self._before(mine)) >= self._max_models:
            self._send_away([entry for entry in before if not entry.unwanted.is_set()])
            await self._changed.wait()
        self._spare()

    def _before(self, mine: _Entry[M]) -> list[_Entry[M]]:
        return self._entries[: self._entries.index(mine)]

    def _send_away(self, staying: Sequence[_Entry[M]]) -> None:
        """Let go as many as are too many: the idle now, those in use when their leases end."""
        too_many = len(staying) - self._max_models + 1
        loaded = [entry for entry in staying if entry.is_loaded]
        while too_many > 0:
            victim = pick_evicted(
                {entry: entry.last_used for entry in loaded},
                {entry: entry.leases for entry in loaded},
            )
            if victim is None:
                break
            victim.unwanted.set()
            loaded.remove(victim)
            too_many -= 1
        loaded.sort(key=lambda entry: (not entry.is_doomed, entry.last_used))
        for entry in loaded[: max(0, too_many)]:
            entry.is_doomed = True

    def _spare(self) -> None:
        """Give doomed models back to new leases, for room was found; whoever still waits for
        some dooms them again. One that is being loaded afresh already has to go.
        """
        afresh = {entry.name for entry in self._entries if not entry.is_doomed}
        for entry in self._wanted():
            if entry.is_doomed and entry.name not in afresh:
                entry.is_doomed = False
        self._announce()

    def _announce(self) -> None:
        """Wake whoever waits for room; a fresh event serves the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "ModelCache[M]":
        return self

    async def __aexit__(self, *_: object) -> None:
        entries = list(self._entries)
        for entry in entries:
            entry.unwanted.set()
            if not entry.ready.done() and entry.keeper is not None:
                entry.keeper.cancel()
        if keepers := [entry.keeper for entry in entries if entry.keeper is not None]:
            await asyncio.wait(keepers)


def _fresh(error: GatewayError) -> GatewayError:
    """Copy an error that many are told: one object would gather the frames of every raise."""
    fresh = type(error).__new__(type(error), *error.args)
    vars(fresh).update(vars(error))
    return fresh


def _unless_told(error: Exception) -> bool:
    """Tell whether the log needs the traceback: our own errors say all in their message."""
    return not isinstance(error, GatewayError)
