"""The catalog: models by their names, and the differences of two readings of the file."""

from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ModelNotFound
from gateway.registry import (
    Alias,
    Catalog,
    ChatSpec,
    EmbeddingSpec,
    HubSource,
    RerankSpec,
    load_alike,
)
from gateway.registry.names import MAX_COMPARED


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


def suggested(catalog: Catalog, name: str, *kinds: Any) -> str:
    """Return the error's text after its first sentence."""
    with pytest.raises(ModelNotFound) as caught:
        catalog.resolve(name, *kinds)
    return caught.value.message.partition(" have access to it.")[2].strip()


def test_an_unknown_name_is_told_up_to_three_of_a_kind() -> None:
    """The nearest ones; where none is near, the first ones without their aliases."""
    embedder = EmbeddingSpec(id="text-embedding", kind="embedding", source=HubSource("a/b"))
    catalog = Catalog([chat("o/a1", "text-em"), embedder, *map(chat, ("o/a2", "o/a3", "o/a4"))])
    assert suggested(catalog, "O/A", ChatSpec) == "Did you mean `o/a1` or `o/a2` or `o/a3`?"
    assert suggested(catalog, "text-embed") == "Did you mean `text-embedding` or `text-em`?"
    assert suggested(catalog, "text-embed", ChatSpec) == "Did you mean `text-em`?"
    assert suggested(catalog, "text-embed", EmbeddingSpec) == "Did you mean `text-embedding`?"
    assert suggested(catalog, "zzz", ChatSpec) == "Served here: `o/a1`, `o/a2`, `o/a3` and 1 more."
    assert suggested(catalog, "zzz", EmbeddingSpec) == "Served here: `text-embedding`."
    assert suggested(catalog, "zzz", RerankSpec) == suggested(Catalog([]), "zzz") == ""


def test_a_long_name_is_cut_and_compared_with_none() -> None:
    asked = "text" * 30_000
    with pytest.raises(ModelNotFound) as caught:
        Catalog([chat("text")]).resolve(asked)
    assert len(caught.value.message) < 400
    assert caught.value.message.endswith("Served here: `text`.")


def test_few_of_many_names_are_compared_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller chooses the name, and nothing else is answered while it is compared."""
    compared = []
    ratio = SequenceMatcher.ratio

    def counted(matcher: SequenceMatcher[str]) -> float:
        compared.append(matcher)
        return ratio(matcher)

    monkeypatch.setattr(SequenceMatcher, "ratio", counted)
    catalog = Catalog([chat(f"org/model-{number:03}") for number in range(1000)])
    assert suggested(catalog, "org/model-77").startswith("Did you mean `org/model-")
    assert 3 <= len(compared) <= 2 * MAX_COMPARED  # difflib asks twice for those that are similar


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
    """The settings that it was loaded with decide; the rest is read from the file in force."""
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
