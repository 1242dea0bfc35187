"""Where concrete parts meet: an engine and a batcher for every spec, and the life of them all.

Settings end here: what is built below is given plain arguments.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Protocol, TypeVar

from starlette.applications import Starlette
from starlette.types import ASGIApp

from gateway import __version__, logs
from gateway.api import ops, routes
from gateway.api.door import Door
from gateway.api.service import Rules, Service
from gateway.app.limits import embedding_limits, generation_limits
from gateway.errors import GatewayError, Unavailable
from gateway.registry import Catalog, ChatSpec, EmbeddingSpec, HubSource, ModelSpec
from gateway.serving.arrivals import Arrivals
from gateway.serving.cache import ModelCache
from gateway.serving.embedding_batcher import EmbeddingBatcher
from gateway.serving.generation_batcher import GenerationBatcher
from gateway.serving.grammars import GrammarCache
from gateway.serving.lane import Lane
from gateway.serving.ports import EmbeddingEngine, GenerationEngine
from gateway.serving.tokens import TokenPool
from gateway.settings import Settings

T = TypeVar("T")
log = logs.get("app")

LAST_WORDS_S = 2.0  # to tell those inside that it is over

Batcher = EmbeddingBatcher | GenerationBatcher


class Engines(Protocol):
    """Where engines come from: the real ones, or a test's scripted ones."""

    @property
    def device(self) -> str:
        """Name the device for `system_fingerprint`."""

    def begin(self) -> None:
        """Prepare the lane's thread, on it."""

    def end(self) -> None:
        """Leave the lane's thread, on it, as its last act."""

    async def folder(self, spec: ModelSpec) -> Path:
        """Find or fetch a model's files, off the lane."""

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        """Tell how much of a model's download is done; None when none is under way."""

    def embedding(
        self, spec: EmbeddingSpec, folder: Path
    ) -> Generator[EmbeddingEngine | None, None, None]:
        """Load, on the lane, a slice a step; the last step gives the engine."""

    def generation(
        self, spec: ChatSpec, folder: Path
    ) -> Generator[GenerationEngine | None, None, None]:
        """Load, on the lane, a slice a step; the last step gives the engine."""


class Gateway:
    """One catalog's models behind one lane. `asgi` is what a server serves."""

    def __init__(self, settings: Settings, catalog: Catalog, engines: Engines) -> None:
        self._settings = settings
        self._catalog = catalog
        self._engines = engines
        self._is_preloaded = False
        self._lane = Lane(
            farewell=engines.end,
            weights={
                "embedding": settings.lane_weight_embedding,
                "prefill": settings.lane_weight_prefill,
                "decode": settings.lane_weight_decode,
                "load": settings.lane_weight_load,
            },
        )
        self._arrivals = Arrivals()
        self._pool = TokenPool()
        self.door = Door()
        self._models: ModelCache[Batcher] = ModelCache(
            self._opened,
            max_models=settings.cache_max_models,
            load_wait_s=settings.load_wait_s,
            fetched_percent=engines.fetched_percent,
        )
        self.asgi: ASGIApp = routes.serve(
            self._service(),
            door=self.door,
            health=ops.Health(lambda: self._lane.is_alive),
            ready=ops.Ready(self._status, self._models.states),
            keys=[key.get_secret_value() for key in settings.api_keys],
            hosts=list(settings.allowed_hosts),
            origins=list(settings.cors_origins),
            lifespan=self._lifespan,
        )

    async def drain(self) -> None:
        """Let nobody in any more and wait for those inside, at most the drain time."""
        if not await self.door.drained(self._settings.drain_s):
            log.warning("drain_cut_short", seconds=self._settings.drain_s)
            for batcher in self._models.loaded():
                batcher.end(Unavailable("The gateway is shutting down.", retry_after_s=1))
            await self.door.drained(LAST_WORDS_S)

    def _service(self) -> Service:
        settings = self._settings
        return Service(
            catalog=lambda: self._catalog,
            models=self._models,
            arrivals=self._arrivals,
            rules=Rules(
                max_body_bytes=settings.max_body_bytes,
                body_timeout_s=settings.body_timeout_s,
                max_input_chars=settings.max_input_chars,
                strict_fields=settings.strict_fields,
                request_timeout_s=settings.request_timeout_s,
                stream_open_after_s=settings.stream_open_after_s,
                send_timeout_s=settings.send_timeout_s,
                queue_limit=settings.queue_limit,
            ),
            fingerprint=self._fingerprint,
            started=int(time.time()),
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        with self._pool:
            async with self._lane as lane:
                async with lane.turn("load") as run:
                    await run(self._engines.begin)
                async with self._models:
                    preloading = asyncio.create_task(self._preload(), name="preload")
                    try:
                        yield
                    finally:
                        preloading.cancel()
                        await asyncio.wait([preloading])

    async def _preload(self) -> None:
        """Load what the catalog wants at hand; one that fails is logged and does not stop us."""
        for spec in self._catalog.specs:
            if spec.preload:
                with contextlib.suppress(GatewayError):  # the cache has logged it
                    async with self._models.lease(spec):
                        pass
        self._is_preloaded = True
        log.info("ready", models=self._models.states())

    def _status(self) -> str:
        if self.door.is_closed:
            return "draining"
        if not self._lane.is_alive:
            return "dead"
        return "ready" if self._is_preloaded else "loading"

    @contextlib.asynccontextmanager
    async def _opened(self, spec: ModelSpec) -> AsyncIterator[Batcher]:
        """Hold one model: its files, its engine, its batcher; freed in reverse order."""
        folder = await self._engines.folder(spec)
        if isinstance(spec, EmbeddingSpec):
            async with self._embedder(spec, folder) as embedder:
                yield embedder
        else:
            async with self._writer(spec, folder) as writer:
                yield writer

    @contextlib.asynccontextmanager
    async def _embedder(self, spec: EmbeddingSpec, folder: Path) -> AsyncIterator[Batcher]:
        limits = embedding_limits(self._settings, spec)
        engine = await self._loaded(self._engines.embedding(spec, folder))
        try:
            batcher = EmbeddingBatcher(
                spec.id, engine, self._lane, self._pool, limits, self._arrivals
            )
            async with batcher.running():
                yield batcher
        finally:
            async with self._lane.turn("load") as run:
                await run(engine.close)

    @contextlib.asynccontextmanager
    async def _writer(self, spec: ChatSpec, folder: Path) -> AsyncIterator[Batcher]:
        settings = self._settings
        limits = generation_limits(settings, spec)
        engine = await self._loaded(self._engines.generation(spec, folder))
        grammars: GrammarCache[object] = GrammarCache(
            spec.id,
            engine.compile,
            self._pool.run,
            size=settings.structured_cache_size,
            timeout_s=settings.structured_compile_timeout_s,
        )
        try:
            batcher = GenerationBatcher(spec.id, engine, self._lane, self._pool, limits, grammars)
            async with batcher.running():
                yield batcher
        finally:
            async with self._lane.turn("load") as run:
                await run(engine.close)

    async def _loaded(self, steps: Generator[T | None, None, None]) -> T:
        """Load in turns of the lane, so that others have theirs between."""
        engine: T | None = None
        try:
            while engine is None:
                async with self._lane.turn("load") as run:
                    engine = await run(_next, steps)
        except BaseException:
            async with self._lane.turn("load") as run:
                await run(steps.close)  # there, so that a half-read model is freed there
            raise
        return engine

    def _fingerprint(self, spec: ModelSpec) -> str:
        """Name all that exact repeats depend on: gateway, revision, device."""
        source = spec.source
        revision = source.revision if isinstance(source, HubSource) else None
        return f"mlx-gateway-{__version__}-{(revision or 'local')[:8]}-{self._engines.device}"


def _next(steps: Generator[T | None, None, None]) -> T | None:
    """Take a step; after the last one nothing but the engine is left."""
    if (engine := next(steps)) is not None:
        steps.close()
    return engine
