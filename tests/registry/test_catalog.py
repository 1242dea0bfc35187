"""The catalog: models by their names, and what differs between two readings of the file."""

from pathlib import Path

import pytest

from gateway.errors import ModelNotFound
from gateway.registry import Alias, Catalog, ChatSpec, EmbeddingSpec, HubSource, load_alike


def chat(model: str, *aliases: str) -> ChatSpec:
    return ChatSpec(
        id=model,
        kind="chat",
        source=HubSource("org/name"),
        aliases=tuple(Alias(name=alias) for alias in aliases),
    )


def test_names_resolve_to_their_model() -> None:
    catalog = Catalog([chat("a", "x", "y"), chat("b")])
    assert catalog.resolve("a").alias is None
    assert catalog.resolve("y").spec.id == "a"
    assert catalog.resolve("y").alias == Alias(name="y")
    assert catalog.names() == ("a", "x", "y", "b")
    assert [resolved.name for resolved in catalog] == ["a", "x", "y", "b"]
    assert len(catalog) == 2


def test_an_unknown_name_is_told_the_nearest() -> None:
    catalog = Catalog([chat("Qwen3-0.6B", "gpt-4o-mini")])
    with pytest.raises(ModelNotFound, match=r"`gpt-4o-min` does not exist.*`gpt-4o-mini`\?"):
        catalog.resolve("gpt-4o-min")
    with pytest.raises(ModelNotFound, match=r"Did you mean `Qwen3-0\.6B`"):
        catalog.resolve("qwen3-0.6b")
    with pytest.raises(ModelNotFound) as caught:
        catalog.resolve("zzz")
    assert "Did you mean" not in caught.value.message


def test_a_loaded_model_outlives_a_change_of_names_and_keeping() -> None:
    """What it was loaded with decides: the rest is read from the file in force."""
    old = chat("a", "x")
    kept = old.model_copy(update={"aliases": (), "pinned": True, "ttl_s": 9, "preload": True})
    assert Catalog([chat("b"), kept]).current(old) is kept
    assert Catalog([old.model_copy(update={"max_context": 9})]).current(old) is None
    assert Catalog([chat("b")]).current(old) is None


def test_a_model_of_another_kind_is_another_model() -> None:
    folder = {"folder": Path()}
    given = {"id": "a", "kind": "embedding", "source": "path:."}
    embedder = EmbeddingSpec.model_validate(given, context=folder)
    written = ChatSpec.model_validate({**given, "kind": "chat"}, context=folder)
    assert not load_alike(embedder, written)
    assert not load_alike(written, embedder)
    assert load_alike(written, written.model_copy(update={"preload": True}))


def test_two_readings_of_the_file_are_compared() -> None:
    changed = chat("c").model_copy(update={"dtype": "float16"})
    changes = Catalog([chat("a", "new"), changed, chat("d")]).changes_since(
        Catalog([chat("a"), chat("b"), chat("c")])
    )
    assert changes.by_kind() == {"added": ["d"], "changed": ["c"], "removed": ["b"]}
