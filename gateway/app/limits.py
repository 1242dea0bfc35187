"""The limits of each model: the settings, overridden by the model's keys in models.yaml.

This module doesn't import mlx, because commands that only list models use it.
"""

from dataclasses import fields
from typing import Any

from gateway.registry import ChatSpec, EmbeddingSpec, ModelSpec, RerankSpec
from gateway.serving.budget import LEAST_PREFIXES, Budget, PrefixShare
from gateway.serving.embedding.policy import EmbeddingLimits, Windows
from gateway.serving.generation.policy import GenerationLimits
from gateway.settings import Settings

CACHE_SHARE = 0.75  # fraction of the device's memory for models and KV; passes need the rest
PREFIX_SHARE = 0.25  # fraction of the device's memory for all prefix caches


def budget_bytes(settings: Settings, memory_bytes: int) -> int:
    """Return the memory budget: the bytes that models and their KV may hold."""
    return settings.cache_max_bytes or int(CACHE_SHARE * memory_bytes)


def sized_prefixes(budget: Budget, memory_bytes: int) -> PrefixShare:
    """Return the share of the budget for a prefix pool that is sized by the machine's memory."""
    return PrefixShare(budget, prefix_share(memory_bytes), leaves_room=True)


def prefix_share(memory_bytes: int) -> int:
    """Return the most bytes that all prefix caches may hold, even if models leave more free."""
    return max(int(PREFIX_SHARE * memory_bytes), LEAST_PREFIXES)


def settings_of(spec: ModelSpec, settings: Settings) -> Settings:
    """Return the settings for one model: the gateway's, overridden by the model's keys."""
    return settings.model_copy(update=spec.overrides())


def fields_from(settings: Settings, kind: type[Any]) -> dict[str, Any]:
    """Return the values of those fields of a dataclass that have a setting of the same name."""
    names = {field.name for field in fields(kind)} & Settings.model_fields.keys()
    return {name: getattr(settings, name) for name in names}


def embedding_limits(settings: Settings, spec: EmbeddingSpec | RerankSpec) -> EmbeddingLimits:
    """Return the limits of an embedding or rerank model's batches and queue."""
    settings = settings_of(spec, settings)
    # The settings are in milliseconds, and the limits in seconds.
    windows = Windows(
        low_s=settings.embedding_window_low_ms / 1000,
        medium_s=settings.embedding_window_medium_ms / 1000,
        high_s=settings.embedding_window_high_ms / 1000,
    )
    return EmbeddingLimits(
        max_batch_size=settings.embedding_max_batch_size,
        max_batch_tokens=settings.embedding_max_batch_tokens,
        batch_window_s=settings.embedding_batch_window_ms / 1000,
        windows=windows if settings.embedding_adaptive_window else None,
        min_batch_size=settings.embedding_min_batch_size,
        batch_deadline_s=settings.embedding_batch_deadline_ms / 1000,
        cache_size=settings.embedding_cache_size,
        **fields_from(settings, EmbeddingLimits),
    )


def generation_limits(settings: Settings, spec: ChatSpec) -> GenerationLimits:
    """Return the limits of a chat model's batch and queue."""
    settings = settings_of(spec, settings)
    return GenerationLimits(
        max_batch_size=settings.generation_max_batch_size,
        memory_wait_s=settings.load_wait_s,
        **fields_from(settings, GenerationLimits),
    )
