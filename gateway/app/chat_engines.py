"""Loads chat models and label-scoring rerank models, which need mlx-lm."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from gateway import logs
from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.app.limits import budget_bytes, prefix_share, settings_of
from gateway.app.loading import Size
from gateway.app.prefix_files import folder_secret
from gateway.app.ranks import Ranks, describe
from gateway.engine import sandbox_worker
from gateway.engine.device import Device, DeviceBounds, choose_device, memory_bytes
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
from gateway.engine.grammar.schema_bounds import Shape
from gateway.engine.kv.prefix_cache import PrefixPool
from gateway.engine.models.adapters import read_adapter
from gateway.engine.models.checkpoint import (
    Checkpoint,
    Listing,
    kv_bytes,
    must_stay_packed,
    reads_target,
    weights_bytes,
)
from gateway.engine.models.context import full_attention_share
from gateway.engine.models.counts import text_config
from gateway.engine.models.decoders import Numbers
from gateway.engine.models.folder import Tensor
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, open_checkpoint
from gateway.engine.models.head_names import head_tensors
from gateway.engine.models.missing_kernels import Report
from gateway.engine.models.sharding import RankShare, SharedListing
from gateway.engine.prompting.chat_tokenizer import ChatFormats
from gateway.engine.vision.towers import tower_tensors
from gateway.jobs.chat import Adapter
from gateway.registry import ChatSpec, RerankSpec
from gateway.serving.budget import LEAST_PREFIXES, bound_prefixes
from gateway.serving.generation.memory import PREFIX_ROW
from gateway.serving.ports import GenerationEngine, RerankEngine
from gateway.serving.ranks.calls import Setup
from gateway.serving.ranks.leading import lead_in_steps
from gateway.serving.sandbox import Sandbox
from gateway.settings import Settings

log = logs.get("engines")

DraftFiles: TypeAlias = tuple[ChatSpec, Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEngines:
    """A loader of chat models and label-scoring rerank models on one device."""

    device: Device
    bounds: DeviceBounds
    settings: Settings
    budget_bytes: int
    grammars: Sandbox
    templates: Sandbox
    images: sandbox_worker.Sandbox
    ranks: Ranks | None
    prefixes: PrefixPool  # the prefix pool of models that have no separate one
    report: Report  # called for weights without a kernel on the device

    def digest(self, spec: ChatSpec, files: Path, draft: DraftFiles | None = None) -> str:
        checkpoint = open_checkpoint(spec.id, files)
        digest = self_test_digest(checkpoint, self.device, self._numbers(checkpoint, spec))
        if self._head(spec, checkpoint):
            digest = f"{digest}-head"  # its KV is kept with the model's
        if draft is not None and reads_target(self._listing(*draft)):
            digest = f"{digest}-states"  # the model keeps its hidden states for it
        share = self._share(spec)
        if share is None:
            return digest
        # A rank's arrays differ in shape from a whole model's, so it has a self-test of its own.
        return f"{digest}-{share.parallel}-{share.group.size()}"

    def size(self, spec: ChatSpec, files: Path, draft: DraftFiles | None) -> Size:
        size, _ = self._size(spec, files)
        if draft is None:
            return size
        extra, _ = self._size(*draft, beside=size.weights + size.kv)
        return Size(
            size.weights + extra.weights, size.kv + extra.kv, size.kv_token + extra.kv_token
        )

    def label_scorer(self, spec: RerankSpec, files: Path) -> Generator[RerankEngine | None]:
        return load_label_scorer_in_steps(
            files,
            name=spec.id,
            device=self.device,
            dtype=spec.weights_dtype,
            max_context=spec.max_context,
            recipe=label_recipe(spec.labels, spec.template, spec.instruction),
            report=self.report,
        )

    async def generation(
        self, spec: ChatSpec, files: Path, draft: DraftFiles | None, led: Setup | None
    ) -> Generator[GenerationEngine | None]:
        """Read a chat model's tokenizer, and return the steps that load the rest.

        `led` is rank 0's setup, which only the other ranks get.
        """
        settings = led or settings_of(spec, self.settings)
        kept_bytes, rows, pool = settings.prefix_cache_bytes, settings.speculate_rows, None
        if kept_bytes == "auto":
            kept_bytes = LEAST_PREFIXES  # until the first pass, whose plan has the limit
            pool = self.prefixes if spec.parallel is None else None
        steps = await self._load(spec, files, draft, kept_bytes, rows, pool)
        if led is not None or spec.parallel is None:
            return steps
        if self.ranks is None or self.ranks.leader is None:
            log.warning("parallel_alone", model=spec.id, hint="start all ranks with mlx.launch")
            return steps
        digest = await run_in_daemon_thread(self.digest, spec, files)
        setup = Setup(describe(spec), digest, kept_bytes, rows)
        return lead_in_steps(self.ranks.leader, spec.id, setup, steps)

    async def _load(
        self,
        spec: ChatSpec,
        files: Path,
        draft: DraftFiles | None,
        prefix_cache_bytes: int,
        speculate_rows: int,
        prefixes: PrefixPool | None,
    ) -> Generator[GenerationEngine | None]:
        read = partial(
            read_chat_setup,
            files,
            name=spec.id,
            max_context=spec.max_context,
            formats=ChatFormats.of(spec, self.templates),
            shape=Shape.of(spec),
            sandbox=self.grammars,
            image_sandbox=self.images if spec.images else None,
            image_secret=folder_secret(self.settings),
        )
        setup = await run_in_daemon_thread(read)
        if setup.chat.trial_error is not None:
            log.warning("template_untried", model=spec.id, why=setup.chat.trial_error)
        for field in setup.unread_formats:
            log.warning("format_unknown", model=spec.id, hint=f"set `{field}:`")
        if setup.reader is not None and setup.reader.problem is not None:
            log.warning("response_template_unused", model=spec.id, why=setup.reader.problem)
        numbers = await run_in_daemon_thread(self._numbers, setup.checkpoint, spec)
        log_costs(setup.checkpoint, self.device, is_packed=numbers.is_packed)
        draft_setup = None
        if draft is not None:
            draft_setup = await run_in_daemon_thread(self._read_draft, spec, files, setup, draft)
        return load_generation_in_steps(
            setup,
            device=self.device,
            numbers=numbers,
            prefix_cache_bytes=prefix_cache_bytes,
            prefixes=prefixes,
            speculate_rows=speculate_rows,
            draft=draft_setup,
            has_head=spec.head_in_use(speculate_rows),
            share=self._share(spec),
            bounds=self.bounds,
            report=self.report,
        )

    def adapter(
        self, spec: ChatSpec, files: Path, engine: GenerationEngine
    ) -> tuple[int, Generator[Adapter | None]]:
        assert isinstance(engine, MlxGenerationEngine)
        adapter, adapters = read_adapter(spec.id, files), engine.adapters
        return adapter.weights * adapters.dtype.size, adapters.add_in_steps(adapter)

    def _read_draft(
        self, spec: ChatSpec, files: Path, setup: ChatSetup, draft: DraftFiles
    ) -> DraftSetup:
        draft_spec, draft_files = draft
        target, _ = self._size(spec, files)
        # The draft model gets the memory that its target leaves.
        _, numbers = self._size(draft_spec, draft_files, beside=target.weights + target.kv)
        draft_setup = read_draft_setup(
            draft_files, name=draft_spec.id, target=setup, numbers=numbers
        )
        log_costs(draft_setup.checkpoint, self.device, is_packed=numbers.is_packed)
        return draft_setup

    def _size(self, spec: ChatSpec, files: Path, beside: int = 0) -> tuple[Size, Numbers]:
        checkpoint, dtype = self._listing(spec, files), spec.weights_dtype
        numbers = self._numbers(checkpoint, spec, beside)
        weights = weights_bytes(checkpoint, self.device, dtype, is_packed=numbers.is_packed)
        if spec.images and isinstance(checkpoint, Checkpoint):
            tower = tower_tensors(checkpoint)
            weights += weights_bytes(
                checkpoint, self.device, dtype, is_packed=numbers.is_packed, tensors=tower
            )
        head = self._head(spec, checkpoint)
        if head and not beside:  # a draft model's own head isn't loaded
            weights += weights_bytes(
                checkpoint, self.device, dtype, is_packed=numbers.is_packed, tensors=head
            )
        size = Size(
            weights,
            self._first_kv_bytes(checkpoint, spec),
            kv_bytes(checkpoint, self.device, dtype, 1, spec.kv_bits),
        )
        return size, numbers

    def _head(self, spec: ChatSpec, checkpoint: Listing) -> Mapping[str, Tensor]:
        """List the arrays of the model's own MTP head, if it is in use."""
        is_used = spec.head_in_use(self.settings.speculate_rows)
        return head_tensors(checkpoint) if is_used and isinstance(checkpoint, Checkpoint) else {}

    def _listing(self, spec: ChatSpec, files: Path) -> Listing:
        whole = open_checkpoint(spec.id, files)
        share = self._share(spec)
        return whole if share is None else SharedListing(whole, share)

    def _share(self, spec: ChatSpec) -> RankShare | None:
        return None if self.ranks is None else self.ranks.share(spec)

    def _first_kv_bytes(self, checkpoint: Listing, spec: ChatSpec) -> int:
        allowance = self.settings.kv_allowance_tokens
        tokens = min(allowance, spec.max_context or allowance)
        return kv_bytes(checkpoint, self.device, spec.weights_dtype, tokens, spec.kv_bits)

    def _numbers(self, checkpoint: Listing, spec: ChatSpec, beside: int = 0) -> Numbers:
        """Return a chat model's number formats. `beside` is the bytes of another model."""
        # On a CPU, dequantized weights are faster, but many times as large.
        room = self.budget_bytes - beside - self._first_kv_bytes(checkpoint, spec)
        is_packed = must_stay_packed(checkpoint, self.device, spec.weights_dtype, room)
        return Numbers.of(spec, is_packed=is_packed)


def count_kept(spec: ChatSpec, files: Path, settings: Settings) -> int | None:
    """Estimate the tokens in a chat model's prefix cache; None if the KV's size is unknown.

    Raises ModelLoadFailed, and ValueError for a missing device.
    """
    used, dtype = choose_device(settings.device), spec.weights_dtype
    checkpoint, memory = open_checkpoint(spec.id, files), memory_bytes(used)
    token = kv_bytes(checkpoint, used, dtype, 1, spec.kv_bits)
    # Sliding windows and states have a fixed size, so only full attention counts.
    token = int(token * full_attention_share(text_config(checkpoint.config())))
    if not token:
        return None
    kept = settings_of(spec, settings).prefix_cache_bytes
    if kept == "auto":
        limit = budget_bytes(settings, memory)
        is_packed = must_stay_packed(checkpoint, used, dtype, limit)
        room = limit - weights_bytes(checkpoint, used, dtype, is_packed=is_packed)
        kept = bound_prefixes(prefix_share(memory), room, token * PREFIX_ROW)
    return kept // token


def log_costs(checkpoint: Checkpoint | GgufCheckpoint, device: Device, *, is_packed: bool) -> None:
    """Warn if a chat model will be slower or larger than its files suggest."""
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
