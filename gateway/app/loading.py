"""Loads models with their engines and batchers, and preloads those marked `preload`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gateway import logs
from gateway.app.limits import embedding_limits, generation_limits, settings_of, sized_prefixes
from gateway.app.prefix_files import PrefixFiles
from gateway.app.self_tests import SelfTest, verdict_store
from gateway.errors import EngineFailed, Fault, GatewayError, ModelLoadFailed, ModelLoading
from gateway.jobs import Progress
from gateway.jobs.chat import Adapter, Compiled, Sampling
from gateway.jobs.steps import ImageCost, KvCost, SequenceParams, StepPlan
from gateway.registry import ChatSpec, EmbeddingSpec, Inputs, ModelSpec, RerankSpec
from gateway.serving.admission import Arrivals
from gateway.serving.budget import Budget, PrefixShare
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.embedding.reranker import RerankBatcher
from gateway.serving.faults import DeviceHealth
from gateway.serving.generation.batcher import AdaptedBatcher, ChatBatcher, GenerationBatcher
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.memory import RowCosts, RowMemory, longest_chunk
from gateway.serving.lane import Lane
from gateway.serving.models.cache import Loaded, ModelCache, Prepared
from gateway.serving.models.named import Offers
from gateway.serving.models.pulls import Pulls, Store
from gateway.serving.models.served import Served
from gateway.serving.ports import EmbeddingEngine, GenerationEngine, RerankEngine
from gateway.serving.tokenize import ThreadPools
from gateway.settings import Settings

log = logs.get("loading")
app_log = logs.get("app")

RETRY_S = 30.0  # seconds until a failed preload is retried
LOAD_POLL_S = 0.5  # seconds between two tries to lease a model that is loading
_WARM_UP = SequenceParams(prompt=[0], max_tokens=2, sampling=Sampling(temperature=0), is_bare=True)


def warm_encoder(name: str, engine: Any) -> None:
    """Embed a word or score a pair. Raises ModelLoadFailed."""
    try:
        if hasattr(engine, "embed_outputs"):
            engine.embed_outputs(engine.encode(["Hello"]), engine.outputs)
        else:
            engine.score(engine.encode_pairs("Hello", ["Hello"]))
    except EngineFailed as error:
        raise ModelLoadFailed(name, error.reason) from error


def warm_chat(name: str, health: DeviceHealth, engine: GenerationEngine) -> None:
    """Prefill one token and generate two. Raises ModelLoadFailed, or DeviceLost."""
    results = [engine.step(StepPlan(joining=[(1, _WARM_UP)]))]
    while results[-1].reading or results[-1].decoding:  # after a fault, prefill starts again
        plan = StepPlan(kind="prefill", token_budget=16)
        if not results[-1].reading:
            plan = StepPlan(kind="decode", token_budget=16)
        results.append(engine.step(plan))
    for fault in [fault for result in results for fault in result.faults]:
        log.warning("batch_fault", model=name, fault=fault.fault.value, error=fault.message)
        health.note(fault.fault, fault.message, engine.probe)
    for delta in [delta for result in results for delta in result.deltas]:
        if delta.error is not None:
            raise ModelLoadFailed(name, delta.error)


Batcher = EmbeddingBatcher | RerankBatcher | ChatBatcher
E = TypeVar("E", EmbeddingEngine, RerankEngine, GenerationEngine)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Size:
    """The bytes that a model will hold."""

    # The weights in memory, where they may be wider than on disk.
    weights: int
    # The KV of `kv_allowance_tokens` tokens, which is always reserved.
    kv: int = 0
    # The KV of one token.
    kv_token: int = 0


class Engines(Store, Offers, Protocol):
    """The interface of MlxEngines, which tests replace.

    The steps of a load must run on the lane, and the last step yields the result.
    """

    @property
    def device(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def buffer_bytes(self) -> int | None:
        """Return the bytes of the device's largest possible buffer; None for no bound."""

    @property
    def active_bytes(self) -> int: ...

    @property
    def cached_bytes(self) -> int:
        """Return the freed bytes that are kept for reuse."""

    def classify(self, error: BaseException) -> Fault:
        """Return the kind of fault that an error of the device shows. Safe on any thread."""

    def name(self, error: Exception) -> Exception:
        """Return the error, or one that explains it better. Must run on the lane."""

    def tidy(self) -> None:
        """Return freed memory to the system. Must run on the lane."""

    def begin(self) -> None:
        """Prepare the lane's thread. Must be its first call."""

    def end(self) -> None:
        """Clean up the lane's thread. Must be its last call."""

    async def import_for(self, specs: Iterable[ModelSpec]) -> None:
        """Import the code that runs these models. Call it off the event loop and the lane."""

    def tokenizer(self, spec: ChatSpec) -> Any:
        """Read a chat model's transformers tokenizer. Call it off the event loop and the lane.

        Raises ModelNotFound if the files are not on this disk, and ModelLoadFailed.
        """

    async def inputs(self, specs: Sequence[ModelSpec]) -> Mapping[str, Inputs | None]:
        """Return the Inputs of models by id; None for a model that is not on disk."""

    async def size(self, spec: ModelSpec, files: Path) -> Size:
        """Return a model's size, read from its files' headers. Raises ModelLoadFailed."""

    async def digest(self, spec: ChatSpec, files: Path) -> str:
        """Return a digest of everything that a self-test depends on. Raises ModelLoadFailed."""

    def embedding(self, spec: EmbeddingSpec, files: Path) -> Generator[EmbeddingEngine | None]: ...

    def cross_encoder(self, spec: RerankSpec, files: Path) -> Generator[RerankEngine | None]: ...

    async def generation(self, spec: ChatSpec, files: Path) -> Generator[GenerationEngine | None]:
        """Read a chat model's tokenizer, and return the steps that load the rest."""

    async def adapter(
        self, spec: ChatSpec, files: Path, engine: GenerationEngine
    ) -> tuple[int, Generator[Adapter | None]]:
        """Return the bytes that an adapter will hold, and the steps that add it to its base."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A loader of models and their batchers, for the model cache."""

    settings: Settings
    engines: Engines
    lane: Lane
    pool: ThreadPools
    arrivals: Arrivals
    budget: Budget
    prefixes: PrefixShare
    pulls: Pulls
    kept: PrefixFiles
    # The memory in use before each model's last load began, and the bytes of its weights.
    _begun: dict[str, tuple[int, int]] = field(default_factory=dict)

    async def prepare(self, spec: ModelSpec, base: Batcher | None = None) -> Prepared[Batcher]:
        """Find or download a model's files, and read its size.

        For an adapter, `base` is the loaded base model.
        """
        files = await self.pulls.begin(spec).wait()
        if base is not None:
            assert isinstance(spec, ChatSpec)
            assert isinstance(base, GenerationBatcher)
            nbytes, steps = await self.engines.adapter(spec, files, base.engine)
            return Prepared(nbytes, partial(self._open_adapter, spec.id, files, base, steps))
        size = await self.engines.size(spec, files)
        return Prepared(size.weights + size.kv, partial(self._open, spec, files, size))

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        return self.pulls.percent(spec)

    def progress(self, spec: ModelSpec) -> Progress:
        """Return the progress of a model that is being downloaded or loaded. May read the disk."""
        for pull in self.pulls.under_way:
            if pull.spec.id == spec.id and pull.status == "downloading":
                return Progress("model_download", spec.id, *self.pulls.fetched(pull))
        before, weights = self._begun.get(spec.id, (self.engines.active_bytes, None))
        loaded = max(0, self.engines.active_bytes - before)
        return Progress("model_loading", spec.id, loaded, weights)

    @contextlib.asynccontextmanager
    async def _open(
        self, spec: ModelSpec, files: Path, size: Size
    ) -> AsyncIterator[Loaded[Batcher]]:
        self._begun[spec.id] = (self.engines.active_bytes, size.weights)
        model: AbstractAsyncContextManager[tuple[Batcher, int]]
        if isinstance(spec, EmbeddingSpec):
            steps = self.engines.embedding(spec, files)
            model = self._open_encoder(EmbeddingBatcher, spec, steps)
        elif isinstance(spec, RerankSpec):
            pair_steps = self.engines.cross_encoder(spec, files)
            model = self._open_encoder(RerankBatcher, spec, pair_steps)
        else:
            model = self._open_chat(spec, files, size)
        async with model as (batcher, nbytes):
            yield Loaded(batcher, nbytes, partial(self._adopt, batcher))

    def _adopt(self, batcher: Batcher, spec: ModelSpec) -> None:
        # An adapter has the limits of its base.
        if isinstance(batcher, EmbeddingBatcher | RerankBatcher):
            assert isinstance(spec, EmbeddingSpec | RerankSpec)
            batcher.adopt(embedding_limits(self.settings, spec))
        elif isinstance(batcher, GenerationBatcher):
            assert isinstance(spec, ChatSpec)
            batcher.adopt(generation_limits(self.settings, spec))

    @contextlib.asynccontextmanager
    async def _open_encoder(
        self,
        kind: Callable[..., EmbeddingBatcher | RerankBatcher],
        spec: EmbeddingSpec | RerankSpec,
        steps: Generator[E | None],
    ) -> AsyncIterator[tuple[Batcher, int]]:
        limits = embedding_limits(self.settings, spec)
        warm = partial(warm_encoder, spec.id)
        async with self._open_engine(steps, warm) as (engine, nbytes):
            with ThreadPools(self.pool) as pool:
                batcher = kind(spec.id, engine, self.lane, pool, limits, self.arrivals)
                async with batcher.running():
                    yield batcher, nbytes

    @contextlib.asynccontextmanager
    async def _open_chat(
        self, spec: ChatSpec, files: Path, size: Size
    ) -> AsyncIterator[tuple[Batcher, int]]:
        settings, budget = self.settings, self.budget
        limits = generation_limits(settings, spec)
        digest = partial(self.engines.digest, spec, files)
        key = await self.kept.key(spec.id, files, digest)
        steps = await self.engines.generation(spec, files)
        async with self._open_engine(steps, partial(warm_chat, spec.id, self.lane.health)) as (
            engine,
            nbytes,
        ):
            grammars: GrammarCache[Compiled] = GrammarCache(
                spec.id,
                engine.compile,
                self.pool.compile,
                size=settings.structured_cache_size,
                timeout_s=settings.structured_compile_timeout_s,
            )
            for note in engine.facts.notes:
                log.warning("files_not_followed", model=spec.id, what=note)
            kv = engine.facts.kv_cost or KvCost(size.kv_token)
            if kv.states:
                log.debug("prefix_states", model=spec.id, bytes=kv.states)
            # `size.kv` is an estimate from the config, and may be many times too large.
            allowance = settings.kv_allowance_tokens
            included = min(size.kv, kv.of(allowance) + kv.draft.token * allowance)
            images = engine.facts.images or ImageCost()
            costs = RowCosts(
                kv,
                included,
                most=lambda: budget.limit_bytes - nbytes - budget.pinned_bytes(without=spec.id),
                largest=self.engines.buffer_bytes,
                answer_tokens=settings.kv_answer_tokens,
                chunk_tokens=longest_chunk(limits.prefill_chunk_tokens),
                max_context=engine.facts.max_context,
                image_token=images.token,
                image_chunk=images.whole,
                image_window=images.window,
            )
            memory = RowMemory(budget, costs, self._prefixes_of(spec))
            test = SelfTest(
                spec,
                engine,
                self.lane,
                budget,
                verdict_store(settings),
                digest,
                limits,
                kv=kv,
                is_on=settings.self_test,
            )
            await test.begin()
            clear = partial(engine.step, StepPlan(clear_prefixes=True))
            with self.lane.health.shedding(clear), ThreadPools(self.pool) as pool:
                batcher = GenerationBatcher(
                    spec.id, engine, self.lane, pool, limits, grammars, memory
                )
                async with (
                    batcher.running(),
                    test.run_when_idle(batcher),
                    self.kept.of(spec.id, batcher, key),
                ):
                    yield batcher, nbytes + included + images.kept

    def _prefixes_of(self, spec: ChatSpec) -> PrefixShare:
        kept = settings_of(spec, self.settings).prefix_cache_bytes
        if kept != "auto":
            return PrefixShare(self.budget, kept)
        if spec.parallel is not None:  # other ranks don't load the models that share the pool
            return sized_prefixes(self.budget, self.engines.memory_bytes)
        return self.prefixes

    @contextlib.asynccontextmanager
    async def _open_adapter(
        self,
        model: str,
        files: Path,
        base: GenerationBatcher,
        steps: Generator[Adapter | None],
    ) -> AsyncIterator[Loaded[Batcher]]:
        key = await self.kept.key(model, files, partial(self.kept.key_of, base))
        adapter = await self._load(steps)
        try:
            async with self.kept.of(model, base, key, adapter.number):
                yield Loaded(AdaptedBatcher(base, adapter), adapter.nbytes)
        finally:
            async with self.lane.turn("load") as run:
                await run(base.engine.drop_adapter, adapter.number)

    @contextlib.asynccontextmanager
    async def _open_engine(
        self, steps: Generator[E | None], warm: Callable[[E], None]
    ) -> AsyncIterator[tuple[E, int]]:
        engine = await self._load(steps)
        try:
            async with self.lane.turn("load") as run:
                nbytes = await run(engine.nbytes)
                if self.settings.warm_up:
                    await run(warm, engine)
            yield engine, nbytes
        finally:
            # The engine must be closed on the lane, where its arrays were created.
            async with self.lane.turn("load") as run:
                await run(engine.close)

    async def _load(self, steps: Generator[T | None]) -> T:
        engine: T | None = None
        try:
            while engine is None:  # other work may have turns between two steps
                async with self.lane.turn("load") as run:
                    engine = await run(_next, steps)
        except BaseException:
            async with self.lane.turn("load") as run:
                await run(steps.close)  # frees the half-loaded model on the lane
            raise
        return engine


def _next(steps: Generator[T | None]) -> T | None:
    engine = next(steps)
    if engine is not None:
        steps.close()  # frees everything except the engine
    return engine


@dataclass(slots=True)
class Preload:
    """Loads the models marked `preload`, at the start and after each reload."""

    _settings: Settings
    _served: Served
    _models: ModelCache[Batcher]
    _engines: Engines
    has_reloaded: asyncio.Event = field(default_factory=asyncio.Event)
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    has_tried: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> str:
        """Return "loading", "failed" or "ready"."""
        if not self.has_tried.is_set():
            return "loading"
        # `ready_in_part` means that one loaded model is enough.
        failed = len(self._failed())
        if failed and (failed == len(self._preloaded()) or not self._settings.ready_in_part):
            return "failed"
        return "ready"

    async def run(self, is_ready: Callable[[], bool]) -> None:
        specs = self._preloaded()
        while True:
            # Clear the event before reading the catalog, so that no later reload is missed.
            self.has_reloaded.clear()
            names, limit = self._served.catalog.preloaded(), self._settings.cache_max_models
            if len(names) > limit:
                app_log.warning("preload_beyond_limit", models=list(names), cache_max_models=limit)
            for spec in reversed(specs):  # models loaded last are evicted last
                await self._load(spec)
            try:
                # Import now, so that the first request does not wait for it.
                await self._engines.import_for(self._served.catalog.specs)
            except Exception:  # callers get the error when they load the model
                app_log.exception("import_failed")
            self.has_tried.set()
            failed = self._failed()
            if is_ready():
                self.is_done.set()
                app_log.info("ready", models=self._models.states())
            elif failed:
                app_log.error("not_ready", failed=[spec.id for spec in failed], retry_s=RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if failed else None):
                    await self.has_reloaded.wait()
            specs = self._preloaded() if self.has_reloaded.is_set() else self._failed()

    def _preloaded(self) -> list[ModelSpec]:
        return [spec for spec in self._served.catalog.specs if spec.preload]

    def _failed(self) -> list[ModelSpec]:
        return [spec for spec in self._preloaded() if self._models.has_failed(spec)]

    async def _load(self, spec: ModelSpec) -> None:
        # A reload may remove the spec meanwhile.
        while self._served.catalog.current(spec) is not None:
            try:
                async with self._models.lease(spec):
                    return
            except ModelLoading:
                await asyncio.sleep(LOAD_POLL_S)
            except GatewayError:  # the cache has logged it
                return
