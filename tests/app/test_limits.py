"""A model's limits in models.yaml stand in the place of the settings, for that model."""

from dataclasses import astuple, fields
from pathlib import Path

from gateway.app.limits import generation_limits, settings_of
from gateway.registry import ChatSpec, EmbeddingSpec
from gateway.serving.generation.policy import GenerationLimits
from gateway.settings import Settings

EMBEDDING = {
    "max_batch_size": 7,
    "max_batch_tokens": 77,
    "batch_window_ms": 0.0,
    "adaptive_window": True,
    "min_batch_size": 2,
    "batch_deadline_ms": 7.0,
    "cache_size": 7,
}
BOTH = {"ttl_s": 7.0, "queue_limit": 7, "queue_max_tokens": 77}
FOLDER = {"folder": Path()}


def settings() -> Settings:
    return Settings(_env_file=None)  # type: ignore[call-arg]


def test_what_an_embedding_model_overrides_holds_for_it() -> None:
    """Zero and false count too; the gateway's values hold for the fields it leaves out."""
    given = {"id": "m", "kind": "embedding", "source": "hub:a/b", "batching": EMBEDDING, **BOTH}
    spec = EmbeddingSpec.model_validate(given, context=FOLDER)
    own = settings_of(spec, settings())
    assert {key: getattr(own, f"embedding_{key}") for key in EMBEDDING} == EMBEDDING
    assert (own.model_ttl_s, own.queue_limit, own.queue_max_tokens) == (7.0, 7, 77)
    spec = EmbeddingSpec.model_validate({**given, "batching": {}, "ttl_s": None}, context=FOLDER)
    assert (
        settings_of(spec, settings()).model_copy(
            update={"queue_limit": 256, "queue_max_tokens": 2_000_000}
        )
        == settings()
    )


def test_every_limit_of_a_chat_model_is_the_setting_of_its_name() -> None:
    """Two have other names. A default of the limits themselves is for tests alone."""
    changed = settings().model_copy(
        update={
            field.name: 777 for field in fields(GenerationLimits) if hasattr(settings(), field.name)
        }
        | {"generation_max_batch_size": 777, "load_wait_s": 777}
    )
    given = {"id": "m", "kind": "chat", "source": "hub:a/b"}
    limits = generation_limits(changed, ChatSpec.model_validate(given, context=FOLDER))
    assert {*astuple(limits)} == {777}
