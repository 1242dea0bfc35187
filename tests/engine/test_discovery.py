"""Models that lie on this machine are found where others put them; nothing there stops the rest."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.engine.discovery import Found, discover
from gateway.engine.hub import Hub, download
from gateway.registry import HubSource
from gateway.registry.specs import ChatSpec
from tests.checkpoints import write_chat
from tests.fake_hub import COMMIT, FakeHub
from tests.gguf_files import write_model

NOWHERE = Hub()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("tiny"))


def found(*places: str, hub: Hub = NOWHERE) -> dict[str, Found]:
    return {each.model: each for each in discover(places, hub)}


def test_what_was_downloaded_is_found_at_its_commit_and_what_is_half_there_is_not_served(
    tiny: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with FakeHub({"org/tiny": tiny}).serving() as hub:
        spec = ChatSpec(id="t", kind="chat", source=HubSource("org/tiny"))
        download(spec, Hub(endpoint=hub.url, cache=cache))
    half = cache / "models--org--half" / "snapshots" / COMMIT
    half.mkdir(parents=True)
    shutil.copy(tiny / "config.json", half)
    (cache / "datasets--org--none" / "snapshots" / COMMIT).mkdir(parents=True)
    (cache / "models--org--empty").mkdir()
    models = found("huggingface", hub=Hub(cache=cache))
    assert models.keys() == {"org/tiny", "org/half"}
    assert models["org/tiny"] == Found("org/tiny", f"hub:org/tiny@{COMMIT}", "chat")
    assert models["org/half"].kind is None
    assert "not all of them" in models["org/half"].why


def test_of_several_commits_the_first_that_is_whole_is_served_and_main_before_it(
    tiny: Path, tmp_path: Path
) -> None:
    """A newer configuration alone, as tools fetch it to look, hides no model."""
    repo = tmp_path / "models--org--tiny"
    for commit in ("a", "b", "c"):
        (repo / "snapshots" / commit).parent.mkdir(parents=True, exist_ok=True)
        (repo / "snapshots" / commit).symlink_to(tiny)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("b")
    hub = Hub(cache=tmp_path)
    assert found("huggingface", hub=hub)["org/tiny"].source == "hub:org/tiny@b"
    (repo / "snapshots" / "b").unlink()
    (repo / "snapshots" / "b").mkdir()
    shutil.copy(tiny / "config.json", repo / "snapshots" / "b")
    assert found("huggingface", hub=hub)["org/tiny"].source == "hub:org/tiny@a"


def test_lm_studios_models_are_found_wherever_its_home_is(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{elsewhere}\n")
    shutil.copytree(tiny, elsewhere / "models" / "publisher" / "a model")
    older = tmp_path / ".cache" / "lm-studio" / "models" / "publisher" / "quants"
    older.mkdir(parents=True)
    write_model(older / "x.gguf", **{"tokenizer.chat_template": "{{ messages }}"})  # type: ignore[arg-type]
    (older / "y-00001-of-00002.gguf").write_bytes(b"GGUF")
    models = found("lmstudio")
    assert models["publisher/a-model"].kind == "chat"
    assert models["publisher/quants/x.gguf"].source == f"path:{older / 'x.gguf'}"
    assert models["publisher/quants/x.gguf"].kind == "chat"
    assert "split model" in models["publisher/quants/y-00001-of-00002.gguf"].why


def test_a_folder_may_be_a_model_or_hold_some(tiny: Path, tmp_path: Path) -> None:
    """A model's own folders, as of its modules, are none."""
    shutil.copytree(tiny, tmp_path / "one")
    (tmp_path / "one" / "1_Module").mkdir()
    (tmp_path / "one" / "1_Module" / "config.json").write_text("{}")
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "two").symlink_to(tiny)
    (tmp_path / "org" / "loop").symlink_to(tmp_path)
    (tmp_path / "org" / "itself").symlink_to("itself")
    assert found(str(tmp_path)).keys() == {"one", "org/two"}
    assert found(str(tmp_path / "one")).keys() == {"one"}
    assert found(str(tmp_path / "gone"), "/dev/null", "no\0name") == {}


def test_places_that_are_not_there_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert found("huggingface", "lmstudio") == {}


NAMES = st.sampled_from(
    [
        *("config.json", "model.safetensors", "model.safetensors.index.json", "x.gguf", "a b"),
        *("models--a--b", "models--", "snapshots", "refs", "main", "1_Pooling", "{}", "chat,x"),
    ]
)
CONTENTS = st.sampled_from(
    [b"", b"{}", b"\xff", b'{"weight_map": {"a": 3}}', b'{"weight_map": {"a": "../../b"}}', b"[["]
)
TREES = st.recursive(
    CONTENTS, lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)


def plant(at: Path, tree: bytes | dict[str, bytes]) -> None:
    if isinstance(tree, bytes):
        at.write_bytes(tree)
        return
    at.mkdir()
    for name, inner in tree.items():
        plant(at / name, inner)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(TREES)
def test_nothing_that_lies_there_is_an_error(
    tmp_path: Path, tree: bytes | dict[str, bytes]
) -> None:
    top = tmp_path / "top"
    if top.exists():
        (shutil.rmtree if top.is_dir() else Path.unlink)(top)
    plant(top, tree)
    for each in discover(["huggingface", str(top)], Hub(cache=top)):
        assert each.kind is None
        assert each.why
