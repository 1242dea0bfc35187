"""The real engines: loads a spec's model with MLX, after finding or downloading its files.

It imports mlx, so code that needs no model must not import it. What loads and runs a model is
imported when there is one: mlx-lm takes a second, in which the gateway answers already.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Generator, Iterable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway import logs
from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.app.hub import hub_of
from gateway.app.limits import budget_bytes
from gateway.app.loading import Size
from gateway.engine import device, sandboxed
from gateway.engine.bounds import read_bounds
from gateway.engine.device import (
    Device,
    active_bytes,
    cached_bytes,
    give_back,
    memory_bytes,
    prepare_malloc,
)
from gateway.engine.device_faults import classify
from gateway.engine.hub import Hub, ask_hub, download, fetched_bytes, on_disk
from gateway.errors import Fault, ModelLoadFailed, ModelUnavailable
from gateway.jobs import Adapter
from gateway.registry import ChatSpec, EmbeddingSpec, ModelSpec, RerankSpec
from gateway.serving.ports import EmbeddingEngine, GenerationEngine, RerankEngine
from gateway.serving.sandbox import Sandbox
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.app.ranks import Ranks
    from gateway.engine.generation.loading import ChatSetup, DraftSetup
    from gateway.engine.models.checkpoint import Checkpoint, Listing
    from gateway.engine.models.gguf.checkpoint import GgufCheckpoint
    from gateway.engine.models.missing_kernels import WidenedWeights
    from gateway.engine.models.sharding import Share

log = logs.get("engines")

RENDER_S: Final = 5.0  # an ordinary conversation takes a millisecond
# The stack of all threads started later, such as those that compile grammars, and the lane, which
# builds matchers again. The sandbox has a quarter of it, so a grammar that does not overflow its
# stack does not overflow these either.
STACK_BYTES: Final = 4 * sandboxed.STACK_BYTES


class MlxEngines:
    """Loads engines with MLX on one device."""

    def __init__(
        self,
        requested: str,
        cache_limit_bytes: int | None,
        hub: Hub,
        *,
        wired_limit_bytes: int | None = None,
        kv_allowance_tokens: int = 4096,
        compile_timeout_s: float = 10.0,
        prefix_cache_bytes: int = 0,
        speculate_rows: int = 0,
        budget_bytes: int | None = None,
        ranks: "Ranks | None" = None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._ranks = ranks
        self._grammars = _sandbox("grammar", compile_timeout_s)
        self._templates = _sandbox("template", RENDER_S, quick_s=RENDER_S / 10)
        self._sandboxes = contextlib.ExitStack()
        threading.stack_size(STACK_BYTES)
        self._prefix_cache_bytes = prefix_cache_bytes
        self._speculate_rows = speculate_rows
        self._device = device.choose_device(requested)
        if self._device is Device.CPU:
            prepare_malloc()
        self._cache_limit_bytes = cache_limit_bytes
        self._wired_limit_bytes = wired_limit_bytes
        self._kv_allowance_tokens = kv_allowance_tokens
        info = device.device_info(self._device)
        self._bounds = read_bounds(self._device, info)
        self._hub = hub
        self._sizes: dict[str, int] = {}

    @property
    def device(self) -> str:
        """Return the name of the device."""
        return self._device.value

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory that the device offers this process."""
        return memory_bytes(self._device)

    @property
    def buffer_bytes(self) -> int | None:
        """Return the bytes of the largest buffer that the device can have; None for no bound."""
        return self._bounds.buffer_bytes

    @property
    def active_bytes(self) -> int:
        """Return the bytes of all live arrays."""
        return active_bytes()

    @property
    def cached_bytes(self) -> int:
        """Return the bytes that MLX has freed and keeps for reuse."""
        return cached_bytes()

    def classify(self, error: BaseException) -> Fault:
        """Return what an error that the device has raised says of it."""
        return classify(error)

    def tidy(self) -> None:
        """Return freed memory to the system; runs on the lane's thread."""
        give_back()

    def begin(self) -> None:
        """Set the device and memory limits, which MLX keeps per thread, and open the sandboxes."""
        self._sandboxes.enter_context(self._grammars)
        self._sandboxes.enter_context(self._templates)
        device.configure(self._device, self._cache_limit_bytes, self._wired_limit_bytes)

    def end(self) -> None:
        """Close the sandboxes and the thread's streams; else half of all exits abort on CPU."""
        self.close_sandboxes()
        device.leave()

    def close_sandboxes(self) -> None:
        """End the sandboxes' processes; after `begin` they may start again."""
        self._sandboxes.close()

    async def import_for(self, specs: Iterable[ModelSpec]) -> None:
        """Import what loads and runs these models."""
        for spec in specs:
            await run_in_daemon_thread(self._import_for, spec)

    def _import_for(self, spec: ModelSpec) -> None:
        """Import what loads and runs a model. A chat model's sandboxes start meanwhile."""
        if isinstance(spec, ChatSpec):
            self._grammars.warm()
            self._templates.warm()
        with device.keep_file_limits():
            import_module(_engine_module(spec))

    async def files(self, spec: ModelSpec) -> Path:
        """Find or download a model's files, and its draft's. Raises ModelUnavailable if the hub
        does not answer.
        """
        if (draft := self._draft_of(spec)) is not None:
            await self.files(draft)
        if (files := await run_in_daemon_thread(on_disk, spec, self._hub)) is not None:
            return files
        try:
            async with asyncio.timeout(self._hub.timeout_s):
                self._sizes[spec.id] = await run_in_daemon_thread(ask_hub, spec, self._hub)
        except TimeoutError:
            raise ModelUnavailable(
                spec.id,
                f"the hub did not answer within {self._hub.timeout_s:g} seconds.",
            ) from None
        log.info("model_download", model=spec.id, source=str(spec.source))
        try:
            return await run_in_daemon_thread(download, spec, self._hub)
        finally:
            # A download for an earlier spec of this id may have removed it.
            self._sizes.pop(spec.id, None)

    async def digest(self, spec: ChatSpec, files: Path) -> str:
        """Return a digest of all that a self-test depends on; raises ModelLoadFailed."""
        return await run_in_daemon_thread(self._digest, spec, files)

    def _digest(self, spec: ChatSpec, files: Path) -> str:
        from gateway.engine.generation.self_test import self_test_digest
        from gateway.engine.models.gguf.checkpoint import open_checkpoint

        checkpoint, dtype = open_checkpoint(spec.id, files), _dtype(spec)
        is_packed = self._must_stay_packed(checkpoint, spec)
        digest = self_test_digest(
            checkpoint,
            self._device,
            dtype,
            is_packed=is_packed,
            is_fused=spec.fuse_projections,
            kv_bits=spec.kv_bits,
        )
        if (share := self._share(spec)) is None:
            return digest
        return f"{digest}-{share.parallel}-{share.group.size()}"

    def fetched_percent(self, spec: ModelSpec) -> int | None:
        """Return how much of a download is done, of the model or its draft; None if none is under
        way.
        """
        for each in (self._draft_of(spec), spec):
            if each is not None and (size := self._sizes.get(each.id)):
                return min(99, 100 * fetched_bytes(each, self._hub) // size)
        return None

    async def size(self, spec: ModelSpec, files: Path) -> Size:
        """Read a model's size from its files' headers; raises ModelLoadFailed if they are wrong."""
        return await run_in_daemon_thread(self._size, spec, files)

    def _size(self, spec: ModelSpec, files: Path) -> Size:
        self._import_for(spec)  # here, and not while the loop or the lane waits
        from gateway.engine.models.checkpoint import Checkpoint, weights_bytes

        dtype = _dtype(spec)
        if isinstance(spec, EmbeddingSpec):
            from gateway.engine.embedding.pooling import read_recipe

            folder = Checkpoint(spec.id, files)
            inner = read_recipe(folder, spec.pooling, spec.normalize).transformer
            return Size(weights_bytes(folder.inside(inner), self._device, dtype))
        if isinstance(spec, RerankSpec):
            transformer = Checkpoint(spec.id, files)
            if spec.scoring == "head":
                from gateway.engine.embedding.cross_encoder import find_transformer

                transformer = find_transformer(transformer)
            return Size(weights_bytes(transformer, self._device, dtype))
        size, _ = self._chat_size(spec, files)
        if (found := self._find_draft(spec)) is not None:
            own, _ = self._chat_size(*found, beside=size.weights + size.kv)
            size = Size(size.weights + own.weights, size.kv + own.kv, size.kv_token + own.kv_token)
        return size

    def _chat_size(self, spec: ChatSpec, files: Path, beside: int = 0) -> tuple[Size, bool]:
        """Return a chat model's size without its draft, with so many bytes beside it, and whether
        its weights stay quantised.
        """
        from gateway.engine.models.checkpoint import kv_bytes, weights_bytes

        checkpoint, dtype = self._listing(spec, files), _dtype(spec)
        is_packed = self._must_stay_packed(checkpoint, spec, beside)
        size = Size(
            weights_bytes(checkpoint, self._device, dtype, is_packed=is_packed),
            self._first_kv_bytes(checkpoint, spec),
            kv_bytes(checkpoint, self._device, dtype, 1, spec.kv_bits),
        )
        return size, is_packed

    def _share(self, spec: ChatSpec) -> "Share | None":
        """Return this process's share of a model; None if it has all of it."""
        return None if self._ranks is None else self._ranks.share(spec)

    def _listing(self, spec: ChatSpec, files: Path) -> "Listing":
        """Return what a chat model's files say of this process's share of it."""
        from gateway.engine.models.gguf.checkpoint import open_checkpoint
        from gateway.engine.models.sharding import SharedListing

        whole = open_checkpoint(spec.id, files)
        share = self._share(spec)
        return whole if share is None else SharedListing(whole, share)

    def _draft_of(self, spec: ModelSpec) -> ChatSpec | None:
        """Return the model that drafts for a chat model, if it has one and tokens are drafted."""
        return spec.draft_in_use(self._speculate_rows) if isinstance(spec, ChatSpec) else None

    def _find_draft(self, spec: ChatSpec) -> tuple[ChatSpec, Path] | None:
        """Return a chat model's draft and its files, which are on disk by now."""
        if (draft := self._draft_of(spec)) is None:
            return None
        if (files := on_disk(draft, self._hub)) is None:
            reason = f"its files, which {spec.id} drafts with, are not on this disk."
            raise ModelUnavailable(draft.id, reason)
        return draft, files

    def _first_kv_bytes(self, checkpoint: "Listing", spec: ChatSpec) -> int:
        """Return the bytes of KV cache that a chat model always has room for."""
        from gateway.engine.models.checkpoint import kv_bytes

        tokens = min(self._kv_allowance_tokens, spec.max_context or self._kv_allowance_tokens)
        return kv_bytes(checkpoint, self._device, _dtype(spec), tokens, spec.kv_bits)

    def _must_stay_packed(self, checkpoint: "Listing", spec: ChatSpec, beside: int = 0) -> bool:
        """Return True if the memory budget has no room for the weights dequantized, with so many
        bytes beside them.
        """
        from gateway.engine.models.checkpoint import must_stay_packed

        if self._budget_bytes is None:
            return False
        left = self._budget_bytes - beside - self._first_kv_bytes(checkpoint, spec)
        return must_stay_packed(checkpoint, self._device, _dtype(spec), left)

    def embedding(
        self, spec: EmbeddingSpec, files: Path
    ) -> Generator[EmbeddingEngine | None, None, None]:
        """Load an embedding model in steps; the last one yields the engine."""
        from gateway.engine.embedding.engine import load_embedding_in_steps

        return load_embedding_in_steps(
            files,
            name=spec.id,
            device=self._device,
            dtype=_dtype(spec),
            pooling=spec.pooling,
            normalize=spec.normalize,
            max_context=spec.max_context,
            prompts=spec.prompts,
            report=self._report,
        )

    def cross_encoder(
        self, spec: RerankSpec, files: Path
    ) -> Generator[RerankEngine | None, None, None]:
        """Load a rerank model in steps; the last one yields the engine."""
        if spec.scoring == "labels":
            from gateway.engine.embedding.label_scorer import (
                label_recipe,
                load_label_scorer_in_steps,
            )

            return load_label_scorer_in_steps(
                files,
                name=spec.id,
                device=self._device,
                dtype=_dtype(spec),
                max_context=spec.max_context,
                recipe=label_recipe(spec.labels, spec.template, spec.instruction),
                report=self._report,
            )
        from gateway.engine.embedding.cross_encoder import load_cross_encoder_in_steps

        return load_cross_encoder_in_steps(
            files,
            name=spec.id,
            device=self._device,
            dtype=_dtype(spec),
            max_context=spec.max_context,
        )

    async def generation(
        self, spec: ChatSpec, files: Path
    ) -> Generator[GenerationEngine | None, None, None]:
        """Read a chat model's tokenizer, off the lane; return the steps that load the rest."""
        own_bytes, own_rows = spec.batching.prefix_cache_bytes, spec.batching.speculate_rows
        prefix_cache_bytes = self._prefix_cache_bytes if own_bytes is None else own_bytes
        rows = self._speculate_rows if own_rows is None else own_rows
        steps = await self.follow(spec, files, prefix_cache_bytes=prefix_cache_bytes, rows=rows)
        if spec.parallel is None:
            return steps
        if self._ranks is None or self._ranks.leader is None:
            log.warning("parallel_alone", model=spec.id, hint="start all ranks by mlx.launch")
            return steps
        from gateway.app.ranks import Setup, describe
        from gateway.serving.ranks.leading import lead_in_steps

        digest = await self.digest(spec, files)
        setup = Setup(describe(spec), digest, prefix_cache_bytes, rows)
        return lead_in_steps(self._ranks.leader, spec.id, setup.arguments, steps)

    async def follow(
        self, spec: ChatSpec, files: Path, *, prefix_cache_bytes: int, rows: int
    ) -> Generator[GenerationEngine | None, None, None]:
        """Load as `generation` does, with these settings, and tell no other rank of it."""
        from gateway.engine.generation.loading import load_generation_in_steps, read_chat_setup
        from gateway.engine.grammar.shaping import Shape

        read = partial(
            read_chat_setup,
            files,
            name=spec.id,
            max_context=spec.max_context,
            chat_template=spec.chat_template,
            template_args=spec.chat_template_kwargs,
            tool_parser=spec.tool_parser,
            reasoning_parser=spec.reasoning_parser,
            split_special_tokens=spec.split_special_tokens,
            sandbox=self._grammars,
            template_sandbox=self._templates,
            shape=Shape(
                max_string_chars=spec.structured.max_string_chars,
                max_array_items=spec.structured.max_array_items,
            ),
        )
        setup = await run_in_daemon_thread(read)
        is_packed = await run_in_daemon_thread(self._must_stay_packed, setup.checkpoint, spec)
        log_costs(setup.checkpoint, self._device, is_packed=is_packed)
        draft = await run_in_daemon_thread(self._read_draft, spec, files, setup)
        return load_generation_in_steps(
            setup,
            device=self._device,
            dtype=_dtype(spec),
            is_packed=is_packed,
            is_fused=spec.fuse_projections,
            kv_bits=spec.kv_bits,
            prefix_cache_bytes=prefix_cache_bytes,
            speculate_rows=rows,
            draft=draft,
            share=self._share(spec),
            bounds=self._bounds,
            report=self._report,
        )

    async def adapter(
        self, spec: ChatSpec, files: Path, engine: GenerationEngine
    ) -> tuple[int, Generator[Adapter | None, None, None]]:
        """Read an adapter's headers, off the lane; return its bytes and the steps that add it."""
        from gateway.engine.generation.engine import GenerationEngine as MlxEngine
        from gateway.engine.models.adapter_files import read_adapter

        assert isinstance(engine, MlxEngine)
        read = await run_in_daemon_thread(read_adapter, spec.id, files)
        adapters = engine.adapters
        return read.weights * adapters.dtype.size, adapters.add_in_steps(read)

    def _report(self, widened: "WidenedWeights") -> None:
        """Log weights that the device has no kernel for, and refuse more than models may hold."""
        log.warning("weights_become_floating", **asdict(widened))
        if (most := self._budget_bytes) is not None and widened.total_bytes > most:
            needed, room = map(logs.human_bytes, (widened.total_bytes, most))
            reason = f"without kernels for its quantised weights it needs {needed}"
            raise ModelLoadFailed(widened.model, f"{reason}, and models may hold {room}")

    def _read_draft(self, spec: ChatSpec, files: Path, setup: "ChatSetup") -> "DraftSetup | None":
        from gateway.engine.generation.loading import read_draft_setup

        if (found := self._find_draft(spec)) is None:
            return None
        draft, draft_files = found
        target, _ = self._chat_size(spec, files)
        _, is_packed = self._chat_size(draft, draft_files, beside=target.weights + target.kv)
        read = read_draft_setup(
            draft_files,
            name=draft.id,
            target=setup,
            dtype=_dtype(draft),
            is_packed=is_packed,
            is_fused=draft.fuse_projections,
            kv_bits=draft.kv_bits,
        )
        log_costs(read.checkpoint, self._device, is_packed=is_packed)
        return read


def log_costs(
    checkpoint: "Checkpoint | GgufCheckpoint", device: Device, *, is_packed: bool
) -> None:
    """Log what makes a chat model slower or larger than its files suggest."""
    from gateway.engine.models.gguf.checkpoint import GgufCheckpoint

    if device is Device.CPU:
        if is_packed:
            log.warning("weights_stay_quantized", model=checkpoint.name, why="memory budget")
    elif isinstance(checkpoint, GgufCheckpoint) and (cost := checkpoint.widen_types()) is not None:
        log.warning(
            "weights_become_floating",
            model=checkpoint.name,
            types=", ".join(cost.types),
            stored_bytes=cost.stored_bytes,
            bytes=cost.bytes,
        )


def mlx_engines(settings: Settings, ranks: "Ranks | None" = None) -> MlxEngines:
    """Return the engines for these settings, of one rank if there are several."""
    return MlxEngines(
        settings.device,
        settings.mlx_cache_limit_bytes,
        hub_of(settings, may_download=settings.auto_pull),
        wired_limit_bytes=settings.mlx_wired_limit_bytes,
        kv_allowance_tokens=settings.kv_allowance_tokens,
        compile_timeout_s=settings.structured_compile_timeout_s,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        speculate_rows=settings.speculate_rows,
        budget_bytes=budget_bytes(settings, memory_bytes(device.choose_device(settings.device))),
        ranks=ranks,
    )


def _engine_module(spec: ModelSpec) -> str:
    """Name the module that loads a model, with what it needs."""
    if isinstance(spec, EmbeddingSpec):
        return "gateway.engine.embedding.engine"
    if isinstance(spec, RerankSpec):
        scorer = "label_scorer" if spec.scoring == "labels" else "cross_encoder"
        return f"gateway.engine.embedding.{scorer}"
    return "gateway.engine.generation.loading"


def _sandbox(kind: str, timeout_s: float, quick_s: float = 1.0) -> Sandbox:
    command = (sys.executable, "-P", sandboxed.__file__, kind)
    return Sandbox(command, timeout_s=timeout_s, quick_s=quick_s)


def _dtype(spec: ModelSpec) -> str | None:
    return None if spec.dtype == "auto" else spec.dtype
