"""Builds a gateway's application from the settings, and manages the lifetimes of its parts."""

import asyncio
import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from gateway import __version__, clock, logs, metrics
from gateway.api import app, paths
from gateway.api.access import AccessRules
from gateway.api.bodies import Bodies
from gateway.api.in_flight import InFlight, Watchers
from gateway.api.requests import Exposure, Rules, Service
from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.app.limits import budget_bytes, fields_from, sized_prefixes
from gateway.app.loading import Batcher, Engines, ModelLoader, Preload
from gateway.app.named import load_served
from gateway.app.prefix_files import DRAIN_S, PrefixFiles
from gateway.errors import (
    GatewayError,
    ModelsFileInvalid,
    RegistryInvalid,
    ShuttingDown,
    Unavailable,
)
from gateway.jobs import Progress
from gateway.registry import Catalog, Changes, HubSource, ModelSpec
from gateway.serving.admission import Arrivals
from gateway.serving.budget import Budget
from gateway.serving.faults import DeviceHealth, run_forever
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.lane import Lane
from gateway.serving.models.cache import ModelCache
from gateway.serving.models.named import NamedModels
from gateway.serving.models.pulls import Pulls
from gateway.serving.models.served import KnownInputs, Served
from gateway.serving.rate_limit import Allowance
from gateway.serving.response_store import ResponseStore
from gateway.serving.tokenize import ThreadPools
from gateway.serving.watch import StallLimits, Watch
from gateway.settings import Settings, exports_traces, is_local
from gateway.wire.bounds import Bounds

if TYPE_CHECKING:
    from gateway.api.traces import Tracer

log = logs.get("app")

READING_S = 10.0  # most seconds to read models.yaml, since its disk may hang
FLUSH_S = 3.0
GRACE_S = 1.0  # seconds for ended requests to send their errors
STALLED = "The engine has stopped, and is being started again."


class Gateway:
    """A gateway for one catalog. `asgi` is the application to serve."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        engines: Engines,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._settings = settings
        # A key for the commands of this user, if no key opens /admin and only this machine can ask.
        is_needed = settings.admin_key is None and all(map(is_local, settings.binds))
        self.local_key = secrets.token_urlsafe() if is_needed else None
        self._served = Served(catalog)
        self._engines = engines
        self._lane = _make_lane(settings, engines)
        self._watch = Watch(
            self._lane,
            StallLimits(settings.stall_limit_s, settings.load_stall_limit_s),
            on_stall=lambda: self._end_all(Unavailable(STALLED, retry_after_s=1)),
            exit_process=os._exit if settings.exit_on_stall else None,
            lost=lost,
        )
        self._arrivals = Arrivals()
        self._pool = ThreadPools()
        self.in_flight = InFlight()
        self._bodies = Bodies(settings.max_bodies_bytes)
        self._budget = Budget(budget_bytes(settings, engines.memory_bytes))
        self._pulls = Pulls(engines)
        self._kept = PrefixFiles(settings, self._lane)
        self._loader = ModelLoader(
            settings,
            engines,
            self._lane,
            self._pool,
            self._arrivals,
            self._budget,
            sized_prefixes(self._budget, engines.memory_bytes),
            self._pulls,
            self._kept,
        )
        self.models: ModelCache[Batcher] = ModelCache(
            self._loader,
            self._served,
            self._budget,
            max_models=settings.cache_max_models,
            queue_limit=settings.queue_limit,
            load_wait_s=settings.load_wait_s,
            ttl_s=settings.model_ttl_s,
        )
        self._named = NamedModels(
            served=self._served,
            models=self.models,
            hub=engines,
            pulls=self._pulls,
            patterns=settings.any_model,
            memory_bytes=self._budget.limit_bytes,
            reserve_bytes=settings.disk_reserve_bytes,
        )
        self._responses = _make_response_store(settings)
        self._tracer = _make_tracer()
        self._preload = Preload(settings, self._served, self.models, engines)
        self.has_tried, self.is_preloaded = self._preload.has_tried, self._preload.is_done
        self._reloading = asyncio.Lock()
        self.asgi = self._make_app()

    async def reload(self) -> Changes:
        """Read models.yaml again, and return the changes.

        Raises ModelsFileInvalid, and changes nothing, if the file is invalid.
        """
        async with self._reloading:  # one at a time, so that the last call reads the newest file
            if self.in_flight.is_draining:
                raise ShuttingDown
            try:
                async with asyncio.timeout(READING_S):
                    catalog = await run_in_daemon_thread(load_served, self._settings)
            except TimeoutError:
                message = f"{self._settings.models} was not read within {READING_S:g} seconds."
                raise _invalid([message]) from None
            except RegistryInvalid as error:
                raise _invalid(error.problems) from None
            changes = self._served.replace(catalog)
        self.models.reconsider()
        self._preload.has_reloaded.set()
        log.info("reloaded", **changes.by_kind())
        return changes

    async def drain(self) -> None:
        """Refuse new requests, wait for running ones, and save the prefix caches."""
        until = clock.now() + self._settings.drain_s
        loading = [spec.id for spec in self._loading()]
        if loading or self.in_flight.requests:
            log.info("waiting_for", requests=len(self.in_flight.requests), loading=loading)
        if not await self.in_flight.drain(self._settings.drain_s):
            log.warning("drain_cut_short", seconds=self._settings.drain_s)
            self._end_all(ShuttingDown())
            await self.in_flight.drain(GRACE_S)
            self.in_flight.cancel()  # ends requests that wait for a model or a slow body
            await self.in_flight.drain(GRACE_S)
        with contextlib.suppress(Unavailable):  # `save` has logged it
            await self._kept.save(max(DRAIN_S, until - clock.now()))

    def _end_all(self, error: GatewayError) -> None:
        for batcher in self.models.loaded():
            batcher.end(error.copy())

    def _make_app(self) -> ASGIApp:
        return app.create_app(
            self._service(),
            replace(access_rules(self._settings), local_key=self.local_key),
            in_flight=self.in_flight,
            bodies=self._bodies,
            tracer=self._tracer,
            lifespan=self._lifespan,
        )

    def _service(self) -> Service:
        settings = self._settings
        return Service(
            served=self._served,
            models=self.models,
            named=self._named,
            inputs=KnownInputs(self._served, self._engines.inputs),
            arrivals=self._arrivals,
            pool=self._pool,
            rules=Rules(
                bounds=Bounds(
                    max_depth=settings.max_json_depth,
                    max_messages=settings.max_messages,
                    max_schema_bytes=settings.max_schema_bytes,
                    max_regex_chars=settings.max_regex_chars,
                ),
                **fields_from(settings, Rules),
            ),
            responses=self._responses,
            fingerprint=self._fingerprint,
            tokenizer=self._engines.tokenizer,
            started=int(time.time()),
            health=lambda: self.health,
            readiness=self._status,
            reload=self.reload,
            save_prefixes=self._kept.save,
            in_flight=self.in_flight,
            watchers=Watchers(),
            exposure=Exposure(
                has_keys=bool(settings.api_keys),
                has_admin=settings.admin_key is not None,
                has_dashboard=settings.has_dashboard,
            ),
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        gauges = metrics.register(lambda: self._read_gauges(loop))
        shedding = self._lane.health.shedding(self._engines.tidy)
        with contextlib.closing(self._kept), self._pool, self._watch, gauges, shedding:
            async with _exporting(self._tracer), self._lane as lane:
                async with lane.turn("load") as run:
                    await run(self._engines.begin)
                log.debug("memory_budget", bytes=self._budget.limit_bytes)
                async with self._pulls, self.models:
                    preload = partial(self._preload.run, lambda: self._status() == "ready")
                    background = [
                        asyncio.create_task(run_forever(name, work), name=name)
                        for name, work in (("preload", preload), ("tidy", self._tidy))
                    ]
                    try:
                        yield
                    finally:
                        for task in background:
                            task.cancel()
                        await asyncio.wait(background)

    def _read_gauges(self, loop: asyncio.AbstractEventLoop) -> Iterator[metrics.Reading]:
        rows, tickets, leases = Counter[str](), Counter[str](), Counter[str]()
        for entry in self.models.entries:  # a model may have two entries: an old and a new copy
            model, batcher = entry.spec.id, entry.model
            leases[model] += entry.leases
            if batcher is not None:
                tickets[model] += batcher.tickets
                if isinstance(batcher, GenerationBatcher):
                    rows[model] += batcher.rows
        yield metrics.READY.read(self._status() == "ready")
        yield metrics.HEARTBEAT_AGE.read(self._watch.beat_age_s)
        yield metrics.LOG_LINES_LOST.read(logs.lost_lines)
        yield metrics.ROWS.read_by_model(rows)
        yield metrics.TICKETS.read_by_model(tickets)
        yield metrics.LEASES.read_by_model(leases)
        yield metrics.TASKS.read(len(asyncio.all_tasks(loop)))
        yield metrics.BUDGET_HELD.read(self._budget.limit_bytes - self._budget.free_bytes)
        yield metrics.BUDGET_LIMIT.read(self._budget.limit_bytes)
        yield metrics.DEVICE_ACTIVE.read(self._engines.active_bytes)
        yield metrics.RESPONSES_KEPT.read(len(self._responses))
        yield metrics.RESPONSES_BYTES.read(self._responses.nbytes)
        yield metrics.BODY_BYTES.read(self._bodies.nbytes)
        yield metrics.DEVICE_CACHED.read(self._engines.cached_bytes)

    async def _tidy(self) -> None:
        """Every `give_back_s`, drop expired responses and return freed memory to the system."""
        while True:
            await asyncio.sleep(self._settings.give_back_s)
            self._responses.expire()
            with contextlib.suppress(Unavailable):  # the watch reports a lane that has died
                async with self._lane.turn("tidy") as run:
                    await run(self._engines.tidy)

    @property
    def health(self) -> str:
        """Return "ok", "stalled" or "dead"."""
        return self._watch.status

    def loaded(self) -> list[ModelSpec]:
        states = self.models.states()
        return [spec for spec in self._served.catalog.specs if states.get(spec.id) == "loaded"]

    def specs(self) -> Sequence[ModelSpec]:
        return self._served.catalog.specs

    def progress(self) -> Progress | None:
        """Return the progress of a model that is loading, if any. Call it off the event loop."""
        return next(map(self._loader.progress, self._loading()), None)

    def _loading(self) -> list[ModelSpec]:
        return [entry.spec for entry in self.models.entries if not entry.is_settled.is_set()]

    def _status(self) -> str:
        if self.in_flight.is_draining:
            return "draining"
        if self._watch.status != "ok":
            return self._watch.status
        return self._preload.status

    def _fingerprint(self, spec: ModelSpec) -> str:
        source = spec.source
        # Only the hub has revisions that identify a model's files.
        revision = source.revision if isinstance(source, HubSource) else None
        return f"mlx-gateway-{__version__}-{(revision or 'local')[:8]}-{self._engines.device}"


def _make_lane(settings: Settings, engines: Engines) -> Lane:
    weights = {
        "embedding": settings.lane_weight_embedding,
        "rerank": settings.lane_weight_embedding,
        "prefill": settings.lane_weight_prefill,
        "decode": settings.lane_weight_decode,
        "load": settings.lane_weight_load,
    }
    health = DeviceHealth(engines.classify, engines.name)
    return Lane(on_close=engines.end, weights=weights, health=health)


def access_rules(settings: Settings) -> AccessRules:
    admin_key = None
    if settings.admin_key is not None:
        admin_key = settings.admin_key.get_secret_value()
    return AccessRules(
        admin_key=admin_key,
        keys=[key.get_secret_value() for key in settings.api_keys],
        shares_prefixes=settings.shared_prefixes,
        hosts=settings.allowed_hosts,
        origins=settings.cors_origins,
        allowance=Allowance(
            requests=settings.requests_per_minute, tokens=settings.tokens_per_minute
        ),
        max_header_bytes=settings.max_header_bytes,
        send_timeout_s=settings.send_timeout_s,
    )


def _make_response_store(settings: Settings) -> ResponseStore:
    """Return a response store whose limits are divided evenly among the API keys."""
    owners = max(1, len(settings.api_keys))
    return ResponseStore(
        max_responses=-(-settings.responses_kept // owners),
        max_bytes=settings.responses_max_bytes // owners,
        ttl_s=settings.responses_ttl_s,
    )


def _make_tracer() -> "Tracer | None":
    if not exports_traces():
        return None
    try:
        from gateway.api.traces import Tracer
    except ImportError as error:
        log.warning("traces_unavailable", error=str(error), hint="pip install 'mlx-gateway[otel]'")
        return None
    return Tracer(paths.OPERATIONS, paths.UNTRACED_PATHS)


@contextlib.asynccontextmanager
async def _exporting(tracer: "Tracer | None") -> AsyncIterator[None]:
    if tracer is None:
        yield
        return
    tracer.open()
    try:
        yield
    finally:
        try:  # the collector may not answer
            async with asyncio.timeout(FLUSH_S):
                await run_in_daemon_thread(tracer.close)
        except TimeoutError:
            log.warning("traces_cut_short", seconds=FLUSH_S)


def _invalid(problems: list[str]) -> ModelsFileInvalid:
    log.error("reload_refused", problems=problems)
    return ModelsFileInvalid("\n".join(problems))
