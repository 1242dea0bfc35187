"""The limits of each model: the settings, overridden by the model's keys in models.yaml.

Commands that only list models use this module, so it must not import mlx.
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
    """Return the bytes that all models and their KV may hold."""
    return settings.cache_max_bytes or int(CACHE_SHARE * memory_bytes)


def sized_prefixes(budget: Budget, memory_bytes: int) -> PrefixShare:
    """Return a prefix pool's share of the budget, sized by the device's memory."""
    return PrefixShare(budget, prefix_share(memory_bytes), leaves_room=True)


def prefix_share(memory_bytes: int) -> int:
    return max(int(PREFIX_SHARE * memory_bytes), LEAST_PREFIXES)


def settings_of(spec: ModelSpec, settings: Settings) -> Settings:
    return settings.model_copy(update=spec.overrides())


def fields_from(settings: Settings, kind: type[Any]) -> dict[str, Any]:
    """Return the settings that a dataclass has fields for, by name."""
    names = {field.name for field in fields(kind)} & Settings.model_fields.keys()
    return {name: getattr(settings, name) for name in names}


def embedding_limits(settings: Settings, spec: EmbeddingSpec | RerankSpec) -> EmbeddingLimits:
    settings = settings_of(spec, settings)
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
    settings = settings_of(spec, settings)
    return GenerationLimits(
        max_batch_size=settings.generation_max_batch_size,
        memory_wait_s=settings.load_wait_s,
        **fields_from(settings, GenerationLimits),
    )
