"""The served models: named ones come first and alone, from folders, the hub or any catalog."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.app import named
from gateway.app.named import load_served, parse_name, read_served
from gateway.errors import RegistryInvalid
from gateway.registry import HubSource, PackageSource, PathSource
from gateway.settings import Settings, load_settings
from tests.checkpoints import write_adapter, write_chat
from tests.fake_hub import COMMIT, FakeHub

FILE = """version: 1
models:
  other: {kind: chat, source: "path:tiny"}
  mine: {kind: chat, source: "path:tiny", aliases: [ours]}
  tuned: {kind: chat, base: mine, adapter: "path:adapter"}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder with a model, an adapter and a models.yaml."""
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "adapter", write_chat(tmp_path / "tiny"))
    (tmp_path / "models.yaml").write_text(FILE)
    return tmp_path


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("GATEWAY_HUB_TIMEOUT_S", "60")
    monkeypatch.setenv("GATEWAY_HUB_CACHE", str(folder / "cache"))
    with FakeHub({"org/tiny": folder / "tiny"}).serving() as hub:
        monkeypatch.setenv("GATEWAY_HUB_ENDPOINT", hub.url)
        yield hub


def named_as(*names: str, **others: object) -> Settings:
    return load_settings({"serve": names, **others})


def ids(settings: Settings) -> list[str]:
    return [spec.id for spec in load_served(settings).specs]


def test_named_models_are_served_alone_and_loaded_at_start(hub: FakeHub) -> None:
    catalog = load_served(named_as("./tiny", "hub:org/tiny", "ours", "org/tiny", "tiny", "mine"))
    assert [spec.id for spec in catalog.specs] == ["tiny", "org/tiny", "mine"]
    assert catalog.preloaded() == ("tiny", "org/tiny", "mine")
    assert catalog.resolve("tiny").spec.id == "tiny"


def test_a_file_that_is_set_is_served_after_what_is_named(folder: Path) -> None:
    assert ids(named_as("mine", models=Path("models.yaml"))) == ["mine", "other", "tuned"]
    assert ids(named_as()) == ["other", "mine", "tuned"]


def test_a_named_adapter_brings_its_base(folder: Path) -> None:
    assert ids(named_as("tuned")) == ["tuned", "mine"]


def test_a_broken_file_is_no_matter_where_none_of_its_ids_is_named(folder: Path) -> None:
    (folder / "models.yaml").write_text("version: 2")
    assert ids(named_as("tiny")) == ["tiny"]
    assert "models.yaml:1" in read_served(named_as("mine")).problems[0]


def test_the_hub_is_asked_only_for_what_nothing_else_says(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable may say the kind, and so may an entry of the repository under a short name."""
    entry = {"kind": "embedding", "source": f"hub:org/tiny@{COMMIT}", "pooling": "last"}
    monkeypatch.setattr(named, "read_short_names", lambda: {"short": entry})
    for name, source in (("short", COMMIT), ("org/tiny", COMMIT), ("org/tiny@other", "other")):
        [spec] = load_served(named_as(name)).specs
        assert (spec.kind, str(spec.source)) == ("embedding", f"hub:org/tiny@{source}")
    monkeypatch.setenv("GATEWAY_ORG_NAME_KIND", "rerank")
    [spec] = load_served(named_as("org/name")).specs
    assert spec.kind == "rerank"
    assert hub.asked == []


def test_a_name_that_the_file_has_is_not_the_catalogues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"kind": "embedding", "source": "hub:org/none"}
    monkeypatch.setattr(named, "read_short_names", lambda: dict.fromkeys(("ours", "short"), entry))
    assert ids(named_as("ours", "short")) == ["mine", "short"]
    write_chat(folder / "elsewhere" / "mine")
    assert ids(named_as("./elsewhere/mine", "mine")) == ["mine"]
    write_chat(folder / "elsewhere" / "short")
    [problem] = read_served(named_as("./elsewhere/short", "short")).problems
    assert problem == "short: another named model already has the id short"


def test_two_folders_of_one_name_are_not_mistaken_for_each_other(folder: Path) -> None:
    write_chat(folder / "elsewhere" / "tiny")
    [problem] = read_served(named_as("tiny", "./elsewhere/tiny")).problems
    assert problem == "./elsewhere/tiny: another named model already has the id tiny"


def test_each_name_that_cannot_be_had_is_a_line(hub: FakeHub) -> None:
    names = ("hub:org/gone", "./nowhere", "hub:a/b/c", "minee", "tiny")
    with pytest.raises(RegistryInvalid) as refused:
        load_served(named_as(*names))
    says = ("no public repository org/gone", "no folder", "hub:a/b/c", "Nearest: mine")
    assert len(refused.value.problems) == len(says)
    for line, said in zip(refused.value.problems, says, strict=True):
        assert said in line
        assert "or you do not have access" not in line  # words of the API, not of a shell


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MINE", "Nearest: mine. Run `mlx-gateway serve mine`."),
        (
            "qwen3.5:9b",
            "Nearest: qwen3.5-9b, qwen3.5-4b, qwen3.5-27b. Run `mlx-gateway serve qwen3.5-9b`.",
        ),
        (
            "phi4",
            "Run `mlx-gateway models recommend`.",
        ),
    ],
)
def test_an_unknown_name_ends_in_a_command_and_is_never_another_models(
    folder: Path, name: str, said: str
) -> None:
    """The nearest is of the file or of the catalogue, and may differ in nothing but its case."""
    [problem] = read_served(named_as(name, "tiny")).problems
    what = "not in models.yaml or the catalogue, and the hub's are org/name."
    assert problem == f"{name}: {what} {said}"


def test_without_a_hub_what_is_here_is_served_and_the_rest_says_so(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_AUTO_PULL", "false")
    assert "GATEWAY_AUTO_PULL is off" in read_served(named_as("org/tiny")).problems[0]
    hub.status = 503
    monkeypatch.setenv("GATEWAY_AUTO_PULL", "true")
    assert "could not be fetched" in read_served(named_as("org/tiny")).problems[0]
    assert ids(named_as("./tiny")) == ["tiny"]


def test_found_models_come_last_and_are_not_loaded_at_start(folder: Path, hub: FakeHub) -> None:
    """One with an id that is taken, and one that cannot be served, are left out with a reason."""
    (folder / "adapter" / "config.json").write_text("{}")
    settings = load_settings({"serve": ("./tiny",), "discover": (str(folder),)})
    (folder / "second").symlink_to(folder / "tiny")
    reading = read_served(settings)
    assert [spec.id for spec in reading.catalog.specs] == ["tiny", "second"]
    assert reading.catalog.preloaded() == ("tiny",)
    assert hub.asked == []
    assert reading.left_out.keys() == {"adapter"}
    (folder / "org").mkdir()
    (folder / "org" / "tiny").symlink_to(folder / "tiny")
    reading = read_served(load_settings({"serve": ("hub:org/tiny",), "discover": (str(folder),)}))
    assert reading.problems == ()
    assert reading.left_out[f"path:{folder}/org/tiny"] == "another model is served as org/tiny"
    half = folder / "half" / "org" / "tiny"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    reading = read_served(load_settings({"discover": (str(folder / "half"), str(folder))}))
    assert "org/tiny" in reading.catalog.names()
    assert "org/tiny" not in reading.left_out


def test_a_name_is_a_folder_that_is_there_or_the_hubs_or_an_id(folder: Path) -> None:
    expected: Mapping[str, Any] = {
        "tiny": PathSource(folder / "tiny"),
        "./x.gguf": PathSource(folder / "x.gguf"),
        "org/name": HubSource("org/name"),
        "org/name/x.gguf@main": HubSource("org/name", "main", "x.gguf"),
        "package:module/inside": PackageSource("module", "inside"),
        "qwen3-0.6b": None,
    }
    assert {name: parse_name(name) for name in expected} == expected


@pytest.mark.generator
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), max_size=12)
        | st.sampled_from(["..", "/", "~", "path:", "hub:../..", "a/../../b", "\0", "tiny", "."]),
        max_size=4,
    )
)
def test_no_name_does_more_than_be_refused(folder: Path, names: list[str]) -> None:
    """The hub is off: only local models are looked at."""
    loaded = Settings(_env_file=None, serve=tuple(names), auto_pull=False)  # type: ignore[call-arg]
    with suppress(RegistryInvalid):
        load_served(loaded)
