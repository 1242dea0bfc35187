"""A repository's offer on the hub is known before its weights are fetched; its lies do no harm."""

import errno
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.discovery import MOST_BYTES
from gateway.engine.hub import Hub
from gateway.engine.hub_offer import look
from gateway.errors import GatewayError, ModelRefused, ModelUnavailable
from gateway.registry import HubSource
from tests import fake_hub
from tests.checkpoints import write_chat
from tests.fake_hub import COMMIT, FakeHub, sha256

SOURCE = HubSource("org/tiny")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return write_chat(tmp_path / "repo")


@pytest.fixture
def hub(repo: Path) -> Iterator[FakeHub]:
    with FakeHub({"org/tiny": repo}).serving() as hub:
        yield hub


def at(hub: FakeHub, tmp_path: Path) -> Hub:
    return Hub(endpoint=hub.url, cache=tmp_path / "cache", timeout_s=60)


def test_a_name_is_sized_and_its_kind_read_with_no_weights_fetched(
    hub: FakeHub, repo: Path, tmp_path: Path
) -> None:
    offer = look(SOURCE, at(hub, tmp_path), "org/tiny")
    stored = sum(file.stat().st_size for file in repo.iterdir())
    assert (offer.commit, offer.size, offer.missing) == (COMMIT, stored, stored)
    assert (offer.kind, offer.has_code) == ("chat", False)
    assert hub.ranges == []
    assert not (tmp_path / "cache").exists()


def test_weights_that_are_here_in_part_are_missing_in_part(
    hub: FakeHub, repo: Path, tmp_path: Path
) -> None:
    blobs = tmp_path / "cache" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(repo / 'model.safetensors')}.part").write_bytes(b"x" * 1000)
    offer = look(SOURCE, at(hub, tmp_path), "org/tiny")
    assert offer.missing == offer.size - 1000


@pytest.mark.parametrize("key", ["auto_map", "model_file", None])
def test_code_in_a_repository_is_said(
    hub: FakeHub, repo: Path, tmp_path: Path, key: str | None
) -> None:
    config = json.loads((repo / "config.json").read_text())
    if key is None:
        (repo / "modeling.py").write_text("raise SystemExit")
    else:
        (repo / "config.json").write_text(json.dumps({**config, key: "x.py"}))
    if key == "model_file":  # mlx-lm would run it by this key
        with pytest.raises(ModelRefused, match="code of its own"):
            look(SOURCE, at(hub, tmp_path), "org/tiny")
        return
    assert look(SOURCE, at(hub, tmp_path), "org/tiny").has_code


def test_a_gguf_file_is_sized_alone_and_its_name_must_be_plain(
    hub: FakeHub, repo: Path, tmp_path: Path
) -> None:
    (repo / "x.gguf").write_bytes(b"GGUF" * 100)
    offer = look(HubSource("org/tiny", file="x.gguf"), at(hub, tmp_path), "org/tiny/x.gguf")
    assert (offer.size, offer.kind) == (400, "chat")
    with pytest.raises(ModelRefused, match="embeds"):
        look(HubSource("org/tiny", file="x.gguf"), at(hub, tmp_path), "org/embed/x.gguf")


LIES = [
    {"rfilename": "../../outside.json", "size": 1},
    {"rfilename": "/etc/passwd", "size": 1},
    {"rfilename": "a\\..\\b.json", "size": 1},
    {"rfilename": "config.json", "size": -1},
    {"rfilename": "config.json", "size": 1 << 30},
    {"rfilename": "config.json", "size": "many"},
    {"rfilename": "more.safetensors", "size": None},
    {"rfilename": 3, "size": 3},
    {"rfilename": "x.safetensors", "size": 9, "lfs": {"size": 9, "sha256": "../../../x"}},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_listing_that_lies_is_refused(
    hub: FakeHub, tmp_path: Path, lie: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = fake_hub._info

    def lying(repo: str, folder: Path, commit: str) -> dict[str, object]:
        info = honest(repo, folder, commit)
        siblings: Any = info["siblings"]
        others = [file for file in siblings if file["rfilename"] != lie["rfilename"]]
        return {**info, "siblings": [*others, lie]}

    monkeypatch.setattr(fake_hub, "_info", lying)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ModelUnavailable, match="org/tiny"):
        look(SOURCE, at(hub, tmp_path), "org/tiny")
    assert set(tmp_path.rglob("*")) == before


def test_a_file_longer_than_listed_is_not_read_to_its_end(
    hub: FakeHub, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = fake_hub._info("org/tiny", repo)
    monkeypatch.setattr(fake_hub, "_info", lambda *_: info)
    (repo / "config.json").write_bytes(b" " * (MOST_BYTES + 1))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(ModelUnavailable, match="config is longer than the hub says"):
        look(SOURCE, at(hub, tmp_path), "org/tiny")
    assert not any((tmp_path / "temporary").iterdir())


def test_a_full_temporary_folder_is_named(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small files that tell a kind are put there."""

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(io, "FileIO", full)
    with pytest.raises(ModelUnavailable, match="could not be stored: No space left on device"):
        look(SOURCE, at(hub, tmp_path), "org/tiny")


@pytest.mark.parametrize(
    ("status", "says"), [(401, "HTTP|HF_TOKEN|no public"), (403, "HF_TOKEN"), (500, "500")]
)
def test_a_hub_that_gives_nothing_is_unavailable_by_name(
    hub: FakeHub, tmp_path: Path, status: int, says: str
) -> None:
    hub.status, hub.status_only = status, "/api/models"
    with pytest.raises(GatewayError, match=says) as refused:
        look(SOURCE, at(hub, tmp_path), "org/tiny")
    assert refused.value.code == "model_unavailable"
