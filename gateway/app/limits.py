"""The limits of each model: the settings, overridden by its keys in models.yaml.

No mlx is needed: some commands only list models.
"""

from dataclasses import fields
from typing import Any

from gateway.registry import ChatSpec, EmbeddingSpec, ModelSpec, RerankSpec
from gateway.serving.budget import LEAST_PREFIXES, Budget, PrefixShare
from gateway.serving.embedding.policy import EmbeddingLimits, Windows
from gateway.serving.generation.policy import GenerationLimits
from gateway.settings import Settings

CACHE_SHARE = 0.75  # part of the device's memory; the rest is for passes and everything else
PREFIX_SHARE = 0.25  # part of the device's memory for all kept prompts


def budget_bytes(settings: Settings, memory_bytes: int) -> int:
    """Return the bytes that models and their KV may hold of the device's memory."""
    return settings.cache_max_bytes or int(CACHE_SHARE * memory_bytes)


def sized_prefixes(budget: Budget, memory_bytes: int) -> PrefixShare:
    """Return the share for kept prompts, by the size of the machine and its models."""
    return PrefixShare(budget, prefix_share(memory_bytes), leaves_room=True)


def prefix_share(memory_bytes: int) -> int:
    """Return the most bytes of kept prompts, however small models are."""
    return max(int(PREFIX_SHARE * memory_bytes), LEAST_PREFIXES)


def settings_of(spec: ModelSpec, settings: Settings) -> Settings:
    """Return the settings of one model: its own keys, else the gateway's."""
    return settings.model_copy(update=spec.overrides())


def fields_from(settings: Settings, kind: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass that are settings of the same names."""
    names = {field.name for field in fields(kind)} & Settings.model_fields.keys()
    return {name: getattr(settings, name) for name in names}


def embedding_limits(settings: Settings, spec: EmbeddingSpec | RerankSpec) -> EmbeddingLimits:
    """Return the limits of an embedding or rerank model's batches and queue."""
    settings = settings_of(spec, settings)
    # Settings are in milliseconds, serving's limits in seconds.
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
