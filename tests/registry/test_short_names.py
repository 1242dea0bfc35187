"""The catalogue: every entry is one of models.yaml, and says where and when it was read."""

import re
from datetime import date
from pathlib import Path

import pytest
import yaml

from gateway.engine.embedding.cross_encoder import HEADS
from gateway.engine.embedding.engine import ENCODERS
from gateway.engine.models.context import GEMMA2
from gateway.engine.models.decoders import is_known
from gateway.errors import RegistryInvalid
from gateway.registry import (
    Facts,
    HubSource,
    load_catalog,
    read_facts,
    read_short_names,
    short_names,
)
from gateway.registry.short_names import FACTS

ROOT = Path(__file__).parents[2]
FILE = ROOT / "catalogue.yaml"
FACTS_OF = {name: facts for name, _, facts in read_facts()}
MULTIMODAL = {"qwen3_5", "qwen3_5_moe", "gemma3", "gemma4"}  # a conversion may lack the tower
HEADED = {"qwen3_5", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite"}  # a conversion may lack the head
PAGE = re.compile(r"https://[\w.-]+/\S+|models\.yaml")


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HubSource]:
    """The sources of the entries, as the reader of models.yaml reads them."""
    file = tmp_path_factory.mktemp("catalogue") / "models.yaml"
    models = {name: dict(entry) for name, entry in read_short_names().items()}
    file.write_text(yaml.safe_dump({"version": 1, "models": models}))
    found = {spec.id: spec.source for spec in load_catalog(file, {}).specs}
    assert all(isinstance(source, HubSource) for source in found.values())
    return found  # type: ignore[return-value]


def test_every_entry_is_one_that_models_yaml_may_have(specs: dict[str, HubSource]) -> None:
    assert {*specs} == {*read_short_names()} == {*FACTS_OF}
    assert "qwen3.5-9b" in specs
    assert FACTS not in str(read_short_names())


@pytest.mark.parametrize("name", FACTS_OF)
def test_an_entry_says_where_and_when_it_was_read(name: str) -> None:
    facts = FACTS_OF[name]
    assert all(PAGE.fullmatch(page) for page in facts.read_from)
    assert date(2026, 11, 1) <= date.fromisoformat(facts.read_on) <= date.today()


@pytest.mark.parametrize("name", FACTS_OF)
def test_what_is_not_said_is_named_as_unread(name: str, specs: dict[str, HubSource]) -> None:
    """Nothing else is named so, and a pinned revision is a commit."""
    facts, entry = FACTS_OF[name], read_short_names()[name]
    revision = specs[name].revision
    assert revision is None or re.fullmatch(r"[0-9a-f]{40}", revision)
    is_said = {
        "revision": revision,
        "size": facts.weights_bytes,
        "context": facts.context,
        "sampling": entry.get("sampling") if entry["kind"] == "chat" else True,
        "images": facts.images if facts.architecture in MULTIMODAL else True,
        "mtp_head": facts.mtp_head if facts.architecture in HEADED else True,
    }
    # A fact from the id's own page has no address.
    unread = {*facts.unread} - {"page"}
    assert unread == {key for key, value in is_said.items() if value is None}


@pytest.mark.parametrize("name", FACTS_OF)
def test_an_architecture_is_one_that_is_opened_here(name: str) -> None:
    architecture, entry = FACTS_OF[name].architecture, read_short_names()[name]
    if entry["kind"] == "embedding":
        assert architecture in (*ENCODERS, *GEMMA2) or is_known(architecture)
    elif entry["kind"] == "rerank" and entry.get("scoring") != "labels":
        assert architecture in HEADS
    else:
        assert is_known(architecture)


@pytest.mark.parametrize("name", FACTS_OF)
def test_a_chat_model_has_all_that_its_kv_is_counted_by(name: str) -> None:
    facts, kind = FACTS_OF[name], read_short_names()[name]["kind"]
    assert bool(facts.kv) == (kind == "chat")
    for group in facts.kv:
        forms = group.latent_dim, group.kv_heads, group.value_heads
        assert sum(map(bool, forms)) == 1
        assert bool(group.head_dim) != bool(group.latent_dim)
        assert bool(group.key_heads) == bool(group.value_heads)
    # Either both, as the name of a mixture of experts has them, or neither.
    assert (facts.active_b is None) == (facts.parameters_b is None)
    assert not facts.active_b or facts.active_b < (facts.parameters_b or 0)


def test_models_yaml_has_the_same_of_the_models_that_are_in_both() -> None:
    """A short name then means one thing, and a pin is renewed in both."""
    shipped = yaml.safe_load((ROOT / "models.yaml").read_text())["models"]
    both = {*shipped} & {*read_short_names()}
    assert len(both) == 4
    for name in both:
        assert read_short_names()[name] == shipped[name]


def test_every_chat_model_has_a_row_that_says_whether_it_thinks_and_who_said_so() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    section = text.partition("\n## Which models think\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    thinking = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    [others] = [line for line in section.splitlines() if line.endswith("do not think at all.")]
    said = [*thinking, *re.findall(r"`([^`]+)`", others)]
    chat = {name: entry for name, entry in read_short_names().items() if entry["kind"] == "chat"}
    assert sorted(said) == sorted(chat)
    for row in rows:
        assert PAGE.search(row), row
        assert date.fromisoformat(re.findall(r"read (\S+) \|", row)[0]) <= date.today()
    # A model that has a name without thinking can think.
    assert {name for name, entry in chat.items() if "no-think" in str(entry)} <= {*thinking}
    assert not [name for name, entry in chat.items() if "thinking" in entry]


def test_a_fact_that_nobody_knows_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="weight_bytes"):
        Facts.model_validate({"read_from": ["x"], "read_on": "2026-11-26", "weight_bytes": 1})


def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "catalogue.yaml").write_text("models:\n  a: {kind: chat\n")
    monkeypatch.setattr(short_names, "__file__", str(tmp_path / "gateway/registry/short_names.py"))
    short_names._entries.cache_clear()
    with pytest.raises(RegistryInvalid, match=r"catalogue.yaml:\d+: not YAML"):
        read_short_names()
    short_names._entries.cache_clear()
