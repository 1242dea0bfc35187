"""The registry: sources, specs and the catalog; and the models.yaml that is shipped."""

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from pydantic import BaseModel, ValidationError

from gateway.errors import ModelNotFound
from gateway.registry import (
    Alias,
    Catalog,
    ChatSpec,
    EmbeddingSpec,
    HubSource,
    PackageSource,
    PathSource,
    json_schema,
    load_alike,
    load_catalog,
    package_folder,
    parse_source,
    read_models,
)
from gateway.registry.names import nearest
from gateway.registry.specs import SPECS

SHIPPED = Path(__file__).parents[1] / "models.yaml"


def chat(model: str, *aliases: str) -> ChatSpec:
    return ChatSpec(
        id=model,
        kind="chat",
        source=HubSource("org/name"),
        aliases=tuple(Alias(name=alias) for alias in aliases),
    )


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hub:org/name", HubSource("org/name")),
        ("hub:org/na.me-1@abc123", HubSource("org/na.me-1", "abc123")),
        ("hub:org/name@refs/pr/1", HubSource("org/name", "refs/pr/1")),
        ("path:/weights", PathSource(Path("/weights"))),
        ("path:../x", PathSource(Path("/models/x"))),
        ("package:module/a/b", PackageSource("module", "a/b")),
        ("package:module", PackageSource("module", "")),
        ("hub:org/name/x.gguf", HubSource("org/name", None, "x.gguf")),
        ("hub:org/name/a b/x-Q4_K_M.GGUF@v1", HubSource("org/name", "v1", "a b/x-Q4_K_M.GGUF")),
        ("hub:org/name.gguf", HubSource("org/name.gguf")),
        ("path:../x.gguf", PathSource(Path("/models/x.gguf"))),
        ("package:module/x.gguf", PackageSource("module", "x.gguf")),
    ],
)
def test_sources_are_read(text: str, source: object) -> None:
    """Each scheme has its type; a path is relative to the file's folder."""
    assert parse_source(text, Path("/models/here")) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "org/name",
        "hub:",
        "hub:name",
        "hub:a/b/c",
        "hub:../x",
        "hub:a/b@",
        "hub:a/b/../x.gguf",
        "hub:a/b//x.gguf",
        "hub:a/b/.gguf/",
        "path:",
        "package:",
        "package:a.b/c",
        "package:m/../x",
        "package:m//x",
        "https://example/x",
    ],
)
def test_bad_sources_are_refused(text: str) -> None:
    """The message shows how a source is written."""
    with pytest.raises(ValueError, match=r"hub:org/name|path: names no folder|package:module"):
        parse_source(text, Path("/"))


def test_a_source_is_written_as_it_was_read() -> None:
    """`str` gives back the text of models.yaml."""
    for text in (
        "hub:a/b@c",
        "hub:a/b",
        "hub:a/b/c.gguf@d",
        "hub:a/b/c/d.gguf",
        "path:/x",
        "package:m/f",
        "package:m",
    ):
        assert str(parse_source(text, Path("/"))) == text


@pytest.mark.parametrize(
    ("text", "is_file"),
    [
        ("hub:a/b", False),
        ("hub:a/b.gguf", False),
        ("hub:a/b/c.gguf", True),
        ("path:a.gguf", True),
        ("path:a", False),
        ("package:m", False),
        ("package:m/a.gguf", True),
    ],
)
def test_a_source_says_whether_it_is_one_file(text: str, is_file: bool) -> None:
    """By its name, before anything is there."""
    assert parse_source(text, Path("/")).is_gguf is is_file


def test_a_piece_of_a_model_is_refused() -> None:
    """Before gigabytes of it are fetched; a model may call its only file the first of one."""
    for scheme in ("hub:a/b", "path:b", "package:b"):
        with pytest.raises(ValueError, match="one piece of a model"):
            parse_source(f"{scheme}/x-00001-of-00003.gguf", Path("/"))
        parse_source(f"{scheme}/x-00001-of-00001.gguf", Path("/"))


def test_a_link_to_a_file_keeps_its_own_name(tmp_path: Path) -> None:
    """The hub's cache keeps files by their hashes, which say nothing of what they are."""
    (tmp_path / "0123abcd").write_bytes(b"GGUF")
    (tmp_path / "x.gguf").symlink_to(tmp_path / "0123abcd")
    assert parse_source("path:./x.gguf", tmp_path) == PathSource(tmp_path / "x.gguf")


def test_a_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose import would fail still has a folder."""
    package = tmp_path / "explosive_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("explosive_weights") == package
    assert package_folder("no_such_package_here") is None
    assert package_folder("__main__") is None


def test_names_resolve_to_their_model() -> None:
    """An id resolves to its spec, an alias to its spec and itself."""
    catalog = Catalog([chat("a", "x", "y"), chat("b")])
    assert catalog.resolve("a").alias is None
    assert catalog.resolve("y").spec.id == "a"
    assert catalog.resolve("y").alias == Alias(name="y")
    assert catalog.names() == ("a", "x", "y", "b")
    assert [resolved.name for resolved in catalog] == ["a", "x", "y", "b"]
    assert len(catalog) == 2


def test_an_unknown_name_is_told_the_nearest() -> None:
    """The error is OpenAI's, with a hint; case doesn't hide the likeness."""
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
    """Though it has the same id."""
    folder = {"folder": Path()}
    given = {"id": "a", "kind": "embedding", "source": "path:."}
    embedder = EmbeddingSpec.model_validate(given, context=folder)
    written = ChatSpec.model_validate({**given, "kind": "chat"}, context=folder)
    assert not load_alike(embedder, written)
    assert not load_alike(written, embedder)
    assert load_alike(written, written.model_copy(update={"preload": True}))


def test_two_readings_of_the_file_are_compared() -> None:
    """Models that load as before are in none of the lists."""
    changed = chat("c").model_copy(update={"dtype": "float16"})
    changes = Catalog([chat("a", "new"), changed, chat("d")]).changes_since(
        Catalog([chat("a"), chat("b"), chat("c")])
    )
    assert changes.by_kind() == {"added": ["d"], "changed": ["c"], "removed": ["b"]}


def test_nearest_gives_nothing_when_nothing_is_near() -> None:
    """A hint that is no likeness would mislead."""
    assert nearest("pooling", ["dtype", "source"]) is None
    assert nearest("pooling", []) is None


def test_specs_cannot_be_changed() -> None:
    """A catalog is a snapshot, so what it holds is frozen."""
    with pytest.raises(ValidationError, match="frozen"):
        chat("a").preload = True


def test_the_shipped_file_is_valid(tmp_path: Path) -> None:
    """Ids, aliases and kinds are as documented (weights elsewhere, so none are needed)."""
    here = f"path:{tmp_path}"
    variables = {"GATEWAY_SMOLLM2_135M_SOURCE": here, "GATEWAY_ALL_MINILM_L6_V2_SOURCE": here}
    catalog = load_catalog(SHIPPED, variables)
    for name in ("text-embedding-3-small", "qwen3-embedding-0.6b", "qwen3-embedding-4b-query"):
        assert isinstance(catalog.resolve(name).spec, EmbeddingSpec)
    for name in ("gpt-4.1-mini", "gpt-6-luna", "qwen3-4b-instruct", "qwen3-0.6b-no-think"):
        assert isinstance(catalog.resolve(name).spec, ChatSpec)
    preloaded = [spec.id for spec in catalog.specs if spec.preload]
    assert preloaded == ["all-minilm-l6-v2", "smollm2-135m"]
    minilm = catalog.resolve("all-minilm-l6-v2").spec
    assert isinstance(minilm, EmbeddingSpec)
    assert (minilm.overflow, minilm.matryoshka, minilm.token_ids) == ("truncate", False, "reject")


def test_shipped_hub_models_are_pinned_and_not_preloaded() -> None:
    """What is downloaded is what was meant, and only when asked for."""
    hub = [
        entry
        for entry in yaml.safe_load(SHIPPED.read_text())["models"].values()
        if entry["source"].startswith("hub:")
    ]
    assert len(hub) == 4
    for entry in hub:
        assert len(entry["source"].rpartition("@")[2]) == 40
        assert not entry.get("preload", False)


def test_every_shipped_knob_has_its_variable() -> None:
    """A key's variable is GATEWAY_, the id and the key, and so is a section's."""
    reading = read_models(SHIPPED, {})
    wanted = set()
    for name, entry in yaml.safe_load(SHIPPED.read_text())["models"].items():
        stem = "GATEWAY_" + "".join(c if c.isalnum() else "_" for c in name).upper()
        wanted |= {f"{stem}_{path}".upper() for path in _paths(SPECS[entry["kind"]])}
    assert reading.overrides == wanted
    assert reading.asked == set()


def _paths(model: type[BaseModel]) -> list[str]:
    paths = []
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        if name != "id":
            paths.append(name)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            paths += [f"{name}_{inner}" for inner in _paths(annotation)]
    return paths


def test_the_shipped_file_fits_on_a_page() -> None:
    """It is the first that a user opens: variables need no line in it."""
    assert len(SHIPPED.read_text().splitlines()) < 80
    assert "${" not in SHIPPED.read_text()


def test_the_environment_steers_the_shipped_file(tmp_path: Path) -> None:
    """Numbers, booleans, lists and texts all arrive with their types."""
    here = f"path:{tmp_path}"
    catalog = load_catalog(
        SHIPPED,
        {
            "GATEWAY_ALL_MINILM_L6_V2_SOURCE": here,
            "GATEWAY_SMOLLM2_135M_SOURCE": here,
            "GATEWAY_QWEN3_4B_INSTRUCT_ALIASES": "gpt-4.1-mini,gpt-4o-mini",
            "GATEWAY_QWEN3_0_6B_SAMPLING_TEMPERATURE": "0.25",
            "GATEWAY_QWEN3_0_6B_THINKING": "false",
            "GATEWAY_QWEN3_EMBEDDING_4B_MATRYOSHKA": "256, 512",
            "GATEWAY_QWEN3_EMBEDDING_4B_PROMPTS_QUERY": "123",
        },
    )
    assert catalog.resolve("gpt-4.1-mini").spec.id == "qwen3-4b-instruct"
    assert catalog.resolve("gpt-6-luna").spec.id == "smollm2-135m"
    small = catalog.resolve("qwen3-0.6b").spec
    assert isinstance(small, ChatSpec)
    assert (small.sampling.temperature, small.thinking) == (0.25, False)
    large = catalog.resolve("qwen3-embedding-4b").spec
    assert isinstance(large, EmbeddingSpec)
    assert large.matryoshka == (256, 512)
    assert large.prompts == {"query": "123"}


def test_the_schema_accepts_the_shipped_file() -> None:
    """Editors see no error in the file as it is written, variables and all."""
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(SHIPPED.read_text()), schema)


@pytest.mark.parametrize(
    "wrong",
    [
        {"poolng": "mean"},
        {"pooling": "men"},
        {"preload": "yes"},
        {"max_context": 1},
        {"batching": "${X:-}"},
        {"source": "org/name"},
        {"matryoshka": [0]},
    ],
)
def test_the_schema_refuses_what_check_refuses(wrong: dict[str, object]) -> None:
    """A misspelt key or value is marked while it is typed; a variable is not."""
    entry = {"kind": "embedding", "source": "hub:a/b", "max_context": "${X}", "aliases": None}
    schema = json_schema()
    jsonschema.validate({"version": 1, "models": {"m": entry}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 1, "models": {"m": {**entry, **wrong}}}, schema)


def test_every_key_of_the_schema_is_described() -> None:
    """What an editor shows on hover is there."""
    for name, definition in json_schema()["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            assert "description" in value or "$ref" in str(value), f"{name}.{key}"
