"""A model's own limits, else the settings'."""

from typing import TypeVar

from gateway.registry import ChatSpec, EmbeddingSpec
from gateway.serving.embedding.policy import EmbeddingLimits, Windows
from gateway.serving.generation.policy import GenerationLimits
from gateway.settings import Settings

T = TypeVar("T")
CACHE_SHARE = 0.75  # of the memory there is; the rest is for passes and everybody else


def budget_bytes(settings: Settings, offered: int) -> int:
    """Give what models and their rows may hold of the bytes that the device offers."""
    return settings.cache_max_bytes or int(CACHE_SHARE * offered)


def embedding_limits(settings: Settings, spec: EmbeddingSpec) -> EmbeddingLimits:
    """Give what bounds an embedding model's batches and queue."""
    own = spec.batching
    windows = Windows(
        low_s=settings.embedding_window_low_ms / 1000,
        medium_s=settings.embedding_window_medium_ms / 1000,
        high_s=settings.embedding_window_high_ms / 1000,
    )
    is_adaptive = _first(own.adaptive_window, settings.embedding_adaptive_window)
    return EmbeddingLimits(
        max_batch_size=_first(own.max_batch_size, settings.embedding_max_batch_size),
        max_batch_tokens=_first(own.max_batch_tokens, settings.embedding_max_batch_tokens),
        batch_window_s=_first(own.batch_window_ms, settings.embedding_batch_window_ms) / 1000,
        windows=windows if is_adaptive else None,
        min_batch_size=_first(own.min_batch_size, settings.embedding_min_batch_size),
        batch_deadline_s=_first(own.batch_deadline_ms, settings.embedding_batch_deadline_ms) / 1000,
        queue_max_tokens=_first(spec.queue_max_tokens, settings.queue_max_tokens),
        pass_limit_s=settings.pass_limit_s,
        cache_size=_first(own.cache_size, settings.embedding_cache_size),
    )


def generation_limits(settings: Settings, spec: ChatSpec) -> GenerationLimits:
    """Give what bounds a chat model's rows and queue."""
    own = spec.batching
    return GenerationLimits(
        max_batch_size=_first(own.max_batch_size, settings.generation_max_batch_size),
        structured_rows=_first(spec.structured.rows, settings.structured_rows),
        prefill_chunk_tokens=_first(own.prefill_chunk_tokens, settings.prefill_chunk_tokens),
        queue_limit=_first(spec.queue_limit, settings.queue_limit),
        queue_max_tokens=_first(spec.queue_max_tokens, settings.queue_max_tokens),
        pass_limit_s=settings.pass_limit_s,
        tier_head_start_s=settings.tier_head_start_s,
        memory_wait_s=settings.load_wait_s,
    )


def _first(own: T | None, general: T) -> T:
    return general if own is None else own
