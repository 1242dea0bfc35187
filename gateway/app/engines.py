"""Loads models with MLX, after finding or downloading their files.

This module imports mlx, so code that needs no model must not import it.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gateway import logs, metrics
from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.app.limits import budget_bytes
from gateway.app.loading import Size
from gateway.app.named import hub_of
from gateway.app.ranks import Ranks
from gateway.engine import device, sandbox_worker
from gateway.engine.compiled_code import FOLDER, fuse, name_failure, room
from gateway.engine.device import (
    Device,
    active_bytes,
    cached_bytes,
    confirm,
    give_back,
    memory_bytes,
    prepare_malloc,
    read_bounds,
)
from gateway.engine.device_faults import classify
from gateway.engine.embedding.cross_encoder import find_transformer, load_cross_encoder_in_steps
from gateway.engine.embedding.loading import load_embedding_in_steps
from gateway.engine.embedding.outputs import heads_bytes
from gateway.engine.embedding.pooling import weight_folders
from gateway.engine.hub import Hub, ask_hub, download, fetched_bytes, free_bytes, on_disk
from gateway.engine.hub_offer import look, require_public
from gateway.engine.inputs import read_inputs
from gateway.engine.models.checkpoint import Checkpoint, weights_bytes
from gateway.errors import Fault, ModelLoadFailed, ModelNotFound, ModelRefused, ModelUnavailable
from gateway.jobs.chat import Adapter
from gateway.registry import (
    Alias,
    ChatSpec,
    EmbeddingSpec,
    HubSource,
    Inputs,
    ModelSpec,
    RerankSpec,
    read_models,
    unlisted_entry,
)
from gateway.serving.budget import LEAST_PREFIXES
from gateway.serving.models.named import Candidate
from gateway.serving.models.pulls import Fetched
from gateway.serving.ports import EmbeddingEngine, GenerationEngine, RerankEngine
from gateway.serving.ranks.calls import Setup
from gateway.serving.sandbox import Sandbox
from gateway.settings import Settings, variables

if TYPE_CHECKING:
    from gateway.app.chat_engines import ChatEngines
    from gateway.engine.models.missing_kernels import WidenedWeights

T = TypeVar("T")
log = logs.get("engines")

LOOK_ANSWERS: Final = 3  # most hub timeouts of a lookup, which makes several requests
RENDER_S: Final = 5.0  # seconds to render a template, which usually takes 0.001
DECODE_S: Final = 5.0  # seconds to decode an image; 12 million pixels take 1 to 2
PROGRESS_S: Final = 5.0  # seconds between two log lines about a download
# The stack size of threads started later, which compile grammars or build matchers from them. The
# sandbox compiles each grammar first, on a quarter of this stack, so none overflows here.
STACK_BYTES: Final = 4 * sandbox_worker.STACK_BYTES


class MlxEngines:
    """The `Engines` that load models with MLX, on one device."""

    def __init__(self, settings: Settings, ranks: Ranks | None = None) -> None:
        self._settings = settings
        self._ranks = ranks
        self._grammars = _sandbox("grammar", settings.structured_compile_timeout_s)
        self._templates = _sandbox("template", RENDER_S, quick_s=RENDER_S / 10)
        self._images = _sandbox("image", DECODE_S, quick_s=DECODE_S)
        self._sandboxes = contextlib.ExitStack()
        threading.stack_size(STACK_BYTES)
        self._device = device.choose_device(settings.device)
        if self._device is Device.CPU:  # on a CPU, MLX allocates arrays with malloc
            prepare_malloc()
        self._bounds = read_bounds(self._device, device.device_info(self._device))
        self._budget_bytes = budget_bytes(settings, self.memory_bytes)
        self._hub = hub_of(settings, may_download=settings.auto_pull)
        # The total bytes of each running download, by the model's id.
        self._sizes: dict[str, int] = {}

    @property
    def device(self) -> str:
        return self._device.value

    @property
    def memory_bytes(self) -> int:
        return memory_bytes(self._device)

    @property
    def buffer_bytes(self) -> int | None:
        return self._bounds.buffer_bytes

    @property
    def active_bytes(self) -> int:
        return active_bytes()

    @property
    def cached_bytes(self) -> int:
        return cached_bytes()

    def classify(self, error: BaseException) -> Fault:
        return classify(error)

    def name(self, error: Exception) -> Exception:
        return name_failure(error)

    def tidy(self) -> None:
        give_back()

    def begin(self) -> None:
        self._sandboxes.enter_context(self._grammars)
        self._sandboxes.enter_context(self._templates)
        self._sandboxes.enter_context(self._images)
        limits = (self._settings.mlx_cache_limit_bytes, self._settings.mlx_wired_limit_bytes)
        device.configure(self._device, *limits)

    def end(self) -> None:
        self.close_sandboxes()
        device.leave()  # without this, half of all exits on a CPU abort

    def close_sandboxes(self) -> None:
        """End the sandboxes' processes, which another `begin` can start again."""
        self._sandboxes.close()

    async def import_for(self, specs: Iterable[ModelSpec]) -> None:
        for spec in specs:
            await run_in_daemon_thread(self._import_for, spec)

    def _import_for(self, spec: ModelSpec) -> None:
        if isinstance(spec, ChatSpec):
            self._grammars.warm()
            self._templates.warm()
        if isinstance(spec, ChatSpec) or _scores_labels(spec):
            with device.keep_file_limits():
                _ = self._chat

    async def find(self, spec: ModelSpec) -> Path | None:
        draft = self._draft_of(spec)
        if draft is not None and await self.find(draft) is None:
            return None
        return await run_in_daemon_thread(on_disk, spec, self._hub)

    async def files(self, spec: ModelSpec, *, is_pull: bool = False) -> Path:
        draft = self._draft_of(spec)
        if draft is not None:
            await self.files(draft, is_pull=is_pull)
        files = await run_in_daemon_thread(on_disk, spec, self._hub)
        if files is not None:
            return files
        hub = self._hub_for(is_pull)
        # The hub's client does not limit the time of a complete answer.
        async with _answered_within(hub.timeout_s, spec.id):
            self._sizes[spec.id] = await run_in_daemon_thread(ask_hub, spec, hub)
        log.info("model_download", model=spec.id, source=str(spec.source))
        telling = asyncio.create_task(self._tell_percents(spec))
        try:
            return await run_in_daemon_thread(download, spec, hub)
        finally:
            telling.cancel()
            # A download for an earlier spec with this id may have removed the entry.
            self._sizes.pop(spec.id, None)

    async def _tell_percents(self, spec: ModelSpec) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            completed, total = await run_in_daemon_thread(self.fetched, spec)
            if total:
                percent = min(99, 100 * completed // total)
                log.info("model_download", model=spec.id, percent=percent)

    async def digest(self, spec: ChatSpec, files: Path) -> str:
        """Return a digest of everything that a self-test and kept prompts depend on."""
        return await run_in_daemon_thread(
            lambda: self._chat.digest(spec, files, self._find_draft(spec))
        )

    def fetched(self, spec: ModelSpec) -> Fetched:
        draft = self._draft_of(spec)
        if draft is not None and draft.id in self._sizes:
            return self.fetched(draft)
        if not isinstance(spec.source, HubSource):
            return Fetched(0)
        return Fetched(fetched_bytes(spec, self._hub), self._sizes.get(spec.id))

    def _hub_for(self, is_pull: bool) -> Hub:
        return replace(self._hub, may_download=self._hub.may_download or is_pull)

    async def offer(self, repo: str, is_pull: bool) -> Candidate:
        async with _answered_within(LOOK_ANSWERS * self._hub.timeout_s, repo):
            return await run_in_daemon_thread(self._offer, repo, is_pull)

    def _offer(self, repo: str, is_pull: bool) -> Candidate:
        source, hub = HubSource(repo), self._hub_for(is_pull)
        if not is_pull:  # else callers could get private models by the operator's hub token
            require_public(source, hub, repo)
        offer = look(source, hub, repo)
        if offer.has_code:
            raise ModelRefused(repo, "its repository has Python code, which is never run.")
        pinned = str(replace(source, revision=offer.commit or None))
        entry = unlisted_entry(offer.kind, pinned, variables())
        reading = read_models(None, variables(), found={repo: entry})
        spec = reading.catalog.by_id(repo)
        if spec is None:
            raise ModelRefused(repo, f"{reading.left_out.get(repo)}.")
        spec = spec.model_copy(update={"aliases": (Alias(name=f"hub:{repo}"),)})
        whole = fetched_bytes(spec, hub) + offer.missing
        return Candidate(spec, offer.size, offer.missing, whole, free_bytes(hub))

    def tokenizer(self, spec: ChatSpec) -> Any:
        files = None
        with contextlib.suppress(ModelLoadFailed, ModelUnavailable):  # a folder or package is gone
            files = on_disk(spec, self._hub)
        if files is None:
            raise ModelNotFound(spec.id, why="Its files are not on this disk.")
        self._import_for(spec)
        from gateway.engine.generation.loading import read_tokenizer

        return read_tokenizer(files, name=spec.id, chat_template=spec.chat_template)

    async def inputs(self, specs: Sequence[ModelSpec]) -> Mapping[str, Inputs | None]:
        return await run_in_daemon_thread(
            lambda: {spec.id: read_inputs(spec, self._hub) for spec in specs}
        )

    async def size(self, spec: ModelSpec, files: Path) -> Size:
        return await run_in_daemon_thread(self._size, spec, files)

    def _size(self, spec: ModelSpec, files: Path) -> Size:
        self._import_for(spec)  # imports on this thread delay neither the loop nor the lane
        if isinstance(spec, ChatSpec):
            return self._chat.size(spec, files, self._find_draft(spec))
        checkpoint = Checkpoint(spec.id, files)
        parts, heads = [checkpoint], 0
        if isinstance(spec, EmbeddingSpec):
            parts = weight_folders(checkpoint, spec.pooling, spec.normalize)
            heads = heads_bytes(parts[0])
        elif not _scores_labels(spec):
            parts = [find_transformer(checkpoint)]
        weights = [weights_bytes(part, self._device, spec.weights_dtype) for part in parts]
        return Size(sum(weights) + heads)

    def _draft_of(self, spec: ModelSpec) -> ChatSpec | None:
        if not isinstance(spec, ChatSpec):
            return None
        return spec.draft_in_use(self._settings.speculate_rows)

    def _find_draft(self, spec: ChatSpec) -> tuple[ChatSpec, Path] | None:
        draft = self._draft_of(spec)
        if draft is None:
            return None
        files = on_disk(draft, self._hub)
        if files is None:
            reason = f"its files are not on this disk. It is the draft model of {spec.id}."
            raise ModelUnavailable(draft.id, reason)
        return draft, files

    def embedding(self, spec: EmbeddingSpec, files: Path) -> Generator[EmbeddingEngine | None]:
        steps = load_embedding_in_steps(
            files,
            name=spec.id,
            device=self._device,
            dtype=spec.weights_dtype,
            pooling=spec.pooling,
            normalize=spec.normalize,
            max_context=spec.max_context,
            prompts=spec.prompts,
            report=self._report,
        )
        return _fused(spec, steps)

    def cross_encoder(self, spec: RerankSpec, files: Path) -> Generator[RerankEngine | None]:
        if _scores_labels(spec):
            return _fused(spec, self._chat.label_scorer(spec, files))
        steps = load_cross_encoder_in_steps(
            files,
            name=spec.id,
            device=self._device,
            dtype=spec.weights_dtype,
            max_context=spec.max_context,
        )
        return _fused(spec, steps)

    async def generation(
        self, spec: ChatSpec, files: Path, led: Setup | None = None
    ) -> Generator[GenerationEngine | None]:
        draft = await run_in_daemon_thread(self._find_draft, spec)
        return _fused(spec, await self._chat.generation(spec, files, draft, led))

    async def adapter(
        self, spec: ChatSpec, files: Path, engine: GenerationEngine
    ) -> tuple[int, Generator[Adapter | None]]:
        return await run_in_daemon_thread(self._chat.adapter, spec, files, engine)

    @cached_property
    def _chat(self) -> "ChatEngines":
        # Importing mlx-lm takes a second or two.
        from gateway.app.chat_engines import ChatEngines
        from gateway.engine.kv.prefix_cache import PrefixPool

        return ChatEngines(
            device=self._device,
            bounds=self._bounds,
            settings=self._settings,
            budget_bytes=self._budget_bytes,
            grammars=self._grammars,
            templates=self._templates,
            images=metrics.time_decoding(self._images),
            ranks=self._ranks,
            prefixes=PrefixPool(LEAST_PREFIXES, self._bounds.kept),
            report=self._report,
        )

    def _report(self, widened: "WidenedWeights") -> None:
        log.warning("weights_become_floating", **asdict(widened))
        if widened.total_bytes > self._budget_bytes:
            needed, room = map(logs.human_bytes, (widened.total_bytes, self._budget_bytes))
            reason = f"without kernels for its quantized weights it needs {needed}"
            raise ModelLoadFailed(widened.model, f"{reason}, and models may hold {room}")


@contextlib.asynccontextmanager
async def _answered_within(seconds: float, model: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        reason = f"the hub did not answer within {seconds:g} seconds."
        raise ModelUnavailable(model, reason) from None


def _fused(spec: ModelSpec, steps: Generator[T]) -> Generator[T]:
    """Load a model in steps, with fused kernels if the disk has room for them.

    Each step waits for the device, and raises the device's errors.
    """
    if not fuse():
        log.warning("runs_unfused", model=spec.id, folder=str(FOLDER), free_bytes=room())
    with contextlib.closing(steps):
        for loaded in steps:
            confirm()
            yield loaded


def _scores_labels(spec: ModelSpec) -> bool:
    return isinstance(spec, RerankSpec) and spec.scoring == "labels"


def _sandbox(kind: str, timeout_s: float, quick_s: float = 1.0) -> Sandbox:
    command = (sys.executable, "-P", sandbox_worker.__file__, kind)
    return Sandbox(command, timeout_s=timeout_s, quick_s=quick_s)
