"""Loads chat models, and rerank models that score by their next token: all that mlx-lm reads.

The one module that is imported late, as mlx-lm takes a second or two: once there is such a model.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from gateway import logs
from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.app.limits import dtype_of, settings_of
from gateway.app.loading import Size
from gateway.app.ranks import Ranks, describe
from gateway.engine.device import Device, DeviceBounds
from gateway.engine.embedding.label_scorer import label_recipe, load_label_scorer_in_steps
from gateway.engine.generation.engine import GenerationEngine as MlxGenerationEngine
from gateway.engine.generation.loading import (
    DraftSetup,
    load_generation_in_steps,
    read_chat_setup,
    read_draft_setup,
)
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.generation.self_test import self_test_digest
from gateway.engine.grammar.shaping import Shape
from gateway.engine.kv.prefix_cache import PrefixPool
from gateway.engine.models.adapters import read_adapter
from gateway.engine.models.checkpoint import (
    Checkpoint,
    Listing,
    kv_bytes,
    must_stay_packed,
    weights_bytes,
)
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, open_checkpoint
from gateway.engine.models.missing_kernels import Report
from gateway.engine.models.sharding import RankShare, SharedListing
from gateway.jobs import Adapter
from gateway.registry import ChatSpec, RerankSpec
from gateway.serving.budget import LEAST_PREFIXES
from gateway.serving.ports import GenerationEngine, RerankEngine
from gateway.serving.ranks.calls import Setup
from gateway.serving.ranks.leading import lead_in_steps
from gateway.serving.sandbox import Sandbox
from gateway.settings import Settings

log = logs.get("engines")

DraftFiles: TypeAlias = tuple[ChatSpec, Path]  # the model that drafts for another, on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEngines:
    """Reads and loads them on one device."""

    device: Device
    bounds: DeviceBounds
    settings: Settings
    budget_bytes: int  # that all models may hold
    grammars: Sandbox
    templates: Sandbox
    ranks: Ranks | None
    prefixes: PrefixPool  # of the models that share it
    report: Report  # called with weights that the device has no kernel for

    def digest(self, spec: ChatSpec, files: Path) -> str:
        """Return a digest of all that a self-test depends on; raises ModelLoadFailed."""
        checkpoint, dtype = open_checkpoint(spec.id, files), dtype_of(spec)
        digest = self_test_digest(
            checkpoint,
            self.device,
            dtype,
            is_packed=self._must_stay_packed(checkpoint, spec),
            is_fused=spec.fuse_projections,
            kv_bits=spec.kv_bits,
        )
        share = self._share(spec)
        if share is None:
            return digest
        # A share's numbers are other ones than the whole model's.
        return f"{digest}-{share.parallel}-{share.group.size()}"

    def size(self, spec: ChatSpec, files: Path, draft: DraftFiles | None) -> Size:
        """Read the size of a chat model with its draft; raises ModelLoadFailed."""
        size, _ = self._size(spec, files)
        if draft is None:
            return size
        extra, _ = self._size(*draft, beside=size.weights + size.kv)
        return Size(
            size.weights + extra.weights, size.kv + extra.kv, size.kv_token + extra.kv_token
        )

    def label_scorer(self, spec: RerankSpec, files: Path) -> Generator[RerankEngine | None]:
        """Load a rerank model without a head in steps; the last one yields the engine."""
        return load_label_scorer_in_steps(
            files,
            name=spec.id,
            device=self.device,
            dtype=dtype_of(spec),
            max_context=spec.max_context,
            recipe=label_recipe(spec.labels, spec.template, spec.instruction),
            report=self.report,
        )

    async def generation(
        self, spec: ChatSpec, files: Path, draft: DraftFiles | None
    ) -> Generator[GenerationEngine | None]:
        """Read a chat model's tokenizer, off the lane; return the steps that load the rest."""
        settings = settings_of(spec, self.settings)
        kept_bytes, rows, pool = settings.prefix_cache_bytes, settings.speculate_rows, None
        if kept_bytes == "auto":
            kept_bytes = LEAST_PREFIXES  # until the first step says more
            pool = self.prefixes if spec.parallel is None else None
        steps = await self.follow(spec, files, draft, kept_bytes, rows, pool)
        if spec.parallel is None:
            return steps
        if self.ranks is None or self.ranks.leader is None:
            log.warning("parallel_alone", model=spec.id, hint="start all ranks by mlx.launch")
            return steps
        digest = await run_in_daemon_thread(self.digest, spec, files)
        # Other ranks have parts of the model: this engine leads theirs.
        setup = Setup(describe(spec), digest, kept_bytes, rows)
        return lead_in_steps(self.ranks.leader, spec.id, setup, steps)

    async def follow(
        self,
        spec: ChatSpec,
        files: Path,
        draft: DraftFiles | None,
        prefix_cache_bytes: int,
        speculate_rows: int,
        prefixes: PrefixPool | None = None,
    ) -> Generator[GenerationEngine | None]:
        """Load as `generation` does, with these two settings, and tell no other rank of it."""
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
            sandbox=self.grammars,
            template_sandbox=self.templates,
            shape=Shape(
                max_string_chars=spec.structured.max_string_chars,
                max_array_items=spec.structured.max_array_items,
            ),
        )
        setup = await run_in_daemon_thread(read)
        if setup.chat.untried is not None:
            log.warning("template_untried", model=spec.id, why=setup.chat.untried)
        for field in setup.unread_formats:
            log.warning("format_unknown", model=spec.id, hint=f"set `{field}:`")
        if setup.reader is not None and setup.reader.problem is not None:
            log.warning("response_template_unused", model=spec.id, why=setup.reader.problem)
        is_packed = await run_in_daemon_thread(self._must_stay_packed, setup.checkpoint, spec)
        log_costs(setup.checkpoint, self.device, is_packed=is_packed)
        draft_setup = None
        if draft is not None:
            draft_setup = await run_in_daemon_thread(self._read_draft, spec, files, setup, draft)
        return load_generation_in_steps(
            setup,
            device=self.device,
            dtype=dtype_of(spec),
            is_packed=is_packed,
            is_fused=spec.fuse_projections,
            kv_bits=spec.kv_bits,
            prefix_cache_bytes=prefix_cache_bytes,
            prefixes=prefixes,
            speculate_rows=speculate_rows,
            draft=draft_setup,
            share=self._share(spec),
            bounds=self.bounds,
            report=self.report,
        )

    def adapter(
        self, spec: ChatSpec, files: Path, engine: GenerationEngine
    ) -> tuple[int, Generator[Adapter | None]]:
        """Read an adapter's headers; return its bytes and the steps that add it."""
        assert isinstance(engine, MlxGenerationEngine)
        adapter, adapters = read_adapter(spec.id, files), engine.adapters
        return adapter.weights * adapters.dtype.size, adapters.add_in_steps(adapter)

    def _read_draft(
        self, spec: ChatSpec, files: Path, setup: ChatSetup, draft: DraftFiles
    ) -> DraftSetup:
        draft_spec, draft_files = draft
        target, _ = self._size(spec, files)
        # The draft has the memory that its target leaves.
        _, is_packed = self._size(draft_spec, draft_files, beside=target.weights + target.kv)
        draft_setup = read_draft_setup(
            draft_files,
            name=draft_spec.id,
            target=setup,
            dtype=dtype_of(draft_spec),
            is_packed=is_packed,
            is_fused=draft_spec.fuse_projections,
            kv_bits=draft_spec.kv_bits,
        )
        log_costs(draft_setup.checkpoint, self.device, is_packed=is_packed)
        return draft_setup

    def _size(self, spec: ChatSpec, files: Path, beside: int = 0) -> tuple[Size, bool]:
        """Return a chat model's size without its draft, with so many bytes beside it, and whether
        its weights stay quantised.
        """
        checkpoint, dtype = self._listing(spec, files), dtype_of(spec)
        is_packed = self._must_stay_packed(checkpoint, spec, beside)
        size = Size(
            weights_bytes(checkpoint, self.device, dtype, is_packed=is_packed),
            self._first_kv_bytes(checkpoint, spec),
            kv_bytes(checkpoint, self.device, dtype, 1, spec.kv_bits),
        )
        return size, is_packed

    def _listing(self, spec: ChatSpec, files: Path) -> Listing:
        """Return what a chat model's files say of this process's share of it."""
        whole = open_checkpoint(spec.id, files)
        share = self._share(spec)
        return whole if share is None else SharedListing(whole, share)

    def _share(self, spec: ChatSpec) -> RankShare | None:
        """Return this process's share of a model; None if it has all of it."""
        return None if self.ranks is None else self.ranks.share(spec)

    def _first_kv_bytes(self, checkpoint: Listing, spec: ChatSpec) -> int:
        """Return the bytes of KV cache that a chat model always has room for."""
        # No answer is longer than the context.
        allowance = self.settings.kv_allowance_tokens
        tokens = min(allowance, spec.max_context or allowance)
        return kv_bytes(checkpoint, self.device, dtype_of(spec), tokens, spec.kv_bits)

    def _must_stay_packed(self, checkpoint: Listing, spec: ChatSpec, beside: int = 0) -> bool:
        """Return True if the memory budget has no room for the weights dequantized, with so many
        bytes beside them.
        """
        # On a CPU quantised weights are slower, and floating ones many times as large.
        room = self.budget_bytes - beside - self._first_kv_bytes(checkpoint, spec)
        return must_stay_packed(checkpoint, self.device, dtype_of(spec), room)


def log_costs(checkpoint: Checkpoint | GgufCheckpoint, device: Device, *, is_packed: bool) -> None:
    """Log what makes a chat model slower or larger than its files suggest."""
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
