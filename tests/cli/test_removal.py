"""rm: what it removes of the hub's cache, what it asks, and all that it refuses."""

import os
import pty
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from anyio.from_thread import BlockingPortal
from huggingface_hub import snapshot_download
from structlog.testing import capture_logs

from gateway.cli.local_key import keep_key
from tests.cli.conftest import Inside
from tests.engine.test_downloads import write_weights
from tests.fake_hub import COMMIT, FakeHub
from tests.fakes import ScriptedEngines
from tests.processes import command, environment
from tests.serving_app import catalog, served

NOBODY = "1"  # a port at which nothing answers
OTHER = "f" * 40
MODELS: dict[str, dict[str, Any]] = {
    "mine": {"kind": "chat", "source": f"hub:org/big@{COMMIT}", "aliases": ["ours"]},
    "same": {"kind": "chat", "source": "hub:org/big", "draft": "mine"},
    "own": {"kind": "chat", "source": "path:repo"},
    "aboard": {"kind": "chat", "source": "package:not_here_weights"},
}
REPOS = {"big": "repo", "ggufs": "ggufs"}
Ran: TypeAlias = "subprocess.CompletedProcess[str]"
Run: TypeAlias = Callable[..., Ran]
Served: TypeAlias = Callable[[], AbstractContextManager[str]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of weights, and one of two GGUF files."""
    folder = tmp_path_factory.mktemp("weights")
    for repo in ("repo", "ggufs"):
        (folder / repo).mkdir()
    (folder / "repo" / "config.json").write_text("{}")
    write_weights(folder / "repo" / "model.safetensors")
    for name in ("a", "b"):
        (folder / "ggufs" / f"{name}.gguf").write_bytes(name.encode() * 1000)
    return folder


@pytest.fixture
def hub(weights: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """Serve the two folders."""
    shutil.copytree(weights, tmp_path, dirs_exist_ok=True)
    catalog(tmp_path, MODELS)
    with hub_of(tmp_path) as hub:
        yield hub


def hub_of(folder: Path) -> AbstractContextManager[FakeHub]:
    return FakeHub({f"org/{name}": folder / of for name, of in REPOS.items()}).serving()


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder for the keys of gateways, so that the user's own are not asked."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path, home: Path, inside: Inside) -> Run:
    def ran(*arguments: str, **given: str) -> Ran:
        own = {"GATEWAY_HUB_ENDPOINT": hub.url, "GATEWAY_HUB_CACHE": "cache"}
        own["XDG_CACHE_HOME"] = str(home)
        return inside(tmp_path, *arguments, **{**own, "GATEWAY_PORT": NOBODY, **given})

    return ran


@pytest.fixture(scope="module")
def downloaded(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Download a model once, and give its folder of a cache."""
    cache = tmp_path_factory.mktemp("cache")
    with hub_of(weights) as hub:
        fetch("org/big", COMMIT, hub, cache)
    return cache / "models--org--big"


@pytest.fixture
def repo(tmp_path: Path, downloaded: Path) -> Path:
    """Give the folder of a model that was downloaded."""
    folder = tmp_path / "cache" / downloaded.name
    shutil.copytree(downloaded, folder, symlinks=True)
    return folder


@pytest.fixture
def gateway(tmp_path: Path, portal: BlockingPortal) -> Served:
    """Give a context that serves the same models, and gives the port."""

    @contextmanager
    def serving() -> Iterator[str]:
        models = served(catalog(tmp_path, MODELS), ScriptedEngines(), admin_key="sesame")
        with capture_logs(), portal.wrap_async_context_manager(models) as client:
            yield str(client.base_url).rstrip("/").rpartition(":")[2]

    return serving


def fetch(name: str, commit: str, hub: FakeHub, cache: Path) -> None:
    snapshot_download(name, revision=commit, cache_dir=cache, endpoint=hub.url)


def steps(outcome: Ran) -> list[list[str]]:
    """Return the commands that a refusal ends with."""
    lines = re.findall(r"^  mlx-gateway (.+)$", outcome.stderr, re.MULTILINE)
    return [line.split() for line in lines]


@pytest.mark.parametrize("name", ["mine", "ours", "org/big", "hub:org/big", f"org/big@{COMMIT}"])
def test_a_model_is_removed_by_any_name_that_is_the_hubs(repo: Path, run: Run, name: str) -> None:
    outcome = run("rm", name, "--yes")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout == (
        "Models of models.yaml with this repository: mine, same\n"
        f"{repo}\n24 MiB in all\n{name} is removed.\n"
    )
    assert not repo.exists()
    assert run("rm", name, "--yes").stderr.endswith(" is not on this disk.\n")


def test_a_short_name_of_the_catalogue_is_taken(run: Run) -> None:
    outcome = run("rm", "qwen3.5-9b", "--yes")
    assert outcome.returncode == 1
    assert re.fullmatch(r"hub:\S+ is not on this disk\.\n", outcome.stderr)


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/", "", ".", "~", "repo", "./repo", "path:repo", "path:cache", "own", "aboard"),
        *("hub:a/b/../../c", "hub:a/b/../../c.gguf", "hub:..", "hub:../..", "hub:a/..", "hub:/"),
        *("package:not_here_weights", "org/big/../..", "org/big@../..", "cache/models--org--big"),
    ],
)
def test_no_path_is_ever_removed(repo: Path, run: Run, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    outcome = run("rm", "--yes", "--", name)
    assert outcome.returncode in (1, 2)
    assert outcome.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_comes_as_a_package_is_not_removed(run: Run, tmp_path: Path) -> None:
    source = "package:gateway/cli, hub:org/big"
    catalog(tmp_path, {**MODELS, "aboard": {"kind": "chat", "source": source}})
    outcome = run("rm", "aboard", "--yes")
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("aboard comes as a package, so there is nothing to remove.")
    assert steps(outcome) == [["rm", "hub:org/big"]]


def test_a_folder_of_the_same_name_is_not_taken_for_the_repository(
    repo: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "org" / "big").mkdir(parents=True)
    outcome = run("rm", "org/big", "--yes")
    assert outcome.returncode == 2
    assert "is no download of the hub (hub:org/name)" in outcome.stderr
    assert run("rm", "hub:org/big", "--yes").returncode == 0
    assert (tmp_path / "org" / "big").is_dir()


def test_a_revision_is_removed_without_the_others(repo: Path, hub: FakeHub, run: Run) -> None:
    """Weights that both have stay."""
    fetch("org/big", OTHER, hub, repo.parent)
    other, own = (repo / "snapshots" / commit for commit in (OTHER, COMMIT))
    outcome = run("rm", "mine", "--yes")
    assert outcome.returncode == 0
    assert f"{own}\n0 B in all\n" in outcome.stdout
    assert not own.exists()
    assert (other / "model.safetensors").stat().st_size > 1 << 20


def test_a_commit_that_another_repository_has_stays_there(
    repo: Path, run: Run, hub: FakeHub, tmp_path: Path
) -> None:
    """A renamed repository is in the cache twice, with the same commits."""
    for name in ("org/big-0", "a/big", "z/big"):
        hub.repos = {name: tmp_path / "repo", **hub.repos}
        fetch(name, COMMIT, hub, repo.parent)
    assert run("rm", "mine", "--yes").returncode == 0
    kept = sorted(each.name for each in (tmp_path / "cache").glob("models--*"))
    assert kept == ["models--a--big", "models--org--big-0", "models--z--big"]


def test_a_repository_with_several_gguf_files_is_removed_whole(
    hub: FakeHub, run: Run, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    fetch("org/ggufs", COMMIT, hub, cache)
    snapshot = cache / "models--org--ggufs" / "snapshots" / COMMIT
    refused = run("rm", "hub:org/ggufs/a.gguf", "--yes")
    assert refused.returncode == 2
    assert "(hub:org/name); rm takes only those, whole." in refused.stderr
    assert len([*snapshot.iterdir()]) == 2
    assert run("rm", "hub:org/ggufs", "--yes").returncode == 0
    assert not snapshot.exists()


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04", "no\n"])
def test_a_person_who_does_not_say_yes_keeps_the_files(
    repo: Path, run: Run, home: Path, tmp_path: Path, answer: str
) -> None:
    status, shown = asked(tmp_path, home, answer)
    assert status == 1
    assert f"{repo}\n24 MiB in all\nRemove? [y/N]: " in shown
    assert (repo / "snapshots" / COMMIT / "config.json").exists()


def test_a_person_who_says_yes_removes_them(
    repo: Path, run: Run, home: Path, tmp_path: Path
) -> None:
    status, shown = asked(tmp_path, home, "y\n")
    assert status == 0, shown
    assert not repo.exists()


def asked(folder: Path, home: Path, answer: str) -> tuple[int, str]:
    """Run `rm mine` on a terminal, and answer its question; give the status and the output."""
    master, slave = pty.openpty()
    given = {"GATEWAY_HUB_CACHE": "cache", "GATEWAY_PORT": NOBODY, "NO_COLOR": "1"}
    given["XDG_CACHE_HOME"] = str(home)
    process = subprocess.Popen(
        command("rm", "mine"),
        cwd=folder,
        env=environment(**given),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    shown, is_answered = b"", False
    try:
        while process.poll() is None or b"[y/N]" in shown:
            shown += os.read(master, 4096)
            if b"[y/N]: " in shown and not is_answered:
                os.write(master, answer.encode())
                is_answered = True
    except OSError:  # the terminal's end
        pass
    finally:
        os.close(master)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


def test_without_a_terminal_only_a_flag_says_yes(repo: Path, run: Run) -> None:
    outcome = run("rm", "mine")
    assert outcome.returncode == 2
    assert "There is no terminal to ask on." in outcome.stderr
    assert repo.exists()
    (step,) = steps(outcome)
    assert run(*step).returncode == 0
    assert not repo.exists()


@pytest.mark.parametrize("name", ["mine", "hub:org/big"])
def test_a_loaded_model_is_unloaded_first(repo: Path, run: Run, gateway: Served, name: str) -> None:
    with gateway() as port:
        own = {"GATEWAY_PORT": port, "GATEWAY_ADMIN_KEY": "sesame"}
        assert run("load", "mine", **own).returncode == 0
        outcome = run("rm", name, "--yes", **own)
        assert outcome.returncode == 1
        assert f"mine is loaded at http://127.0.0.1:{port}. Run:" in outcome.stderr
        assert repo.exists()
        stop, again = steps(outcome)
        assert run(*stop, **own).returncode == 0
        assert run(*again, "--yes", **own).returncode == 0
    assert not repo.exists()


def test_a_gateway_at_another_port_keeps_what_it_has_loaded(
    repo: Path, run: Run, gateway: Served, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key's file names it; the file of a gateway that was killed keeps nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    own = {"GATEWAY_ADMIN_KEY": "sesame"}
    with gateway() as port, keep_key("k", "127.0.0.1", int(port)), keep_key("k", "::1", 1):
        assert run("load", "mine", "--port", port, **own).returncode == 0
        outcome = run("rm", "mine", "--yes", **own)
        assert outcome.returncode == 1
        assert f"mine is loaded at http://127.0.0.1:{port}. Run:" in outcome.stderr
        assert repo.exists()
        stop, again = steps(outcome)
        assert stop[-2:] == ["--port", port]
        assert run(*stop, **own).returncode == 0
        assert run(*again, "--yes", **own).returncode == 0
    assert not repo.exists()


def test_a_gateway_that_does_not_tell_its_models_keeps_the_files(
    repo: Path, run: Run, tmp_path: Path, portal: BlockingPortal
) -> None:
    models = served(catalog(tmp_path, MODELS), ScriptedEngines(), api_keys="k")
    with capture_logs(), portal.wrap_async_context_manager(models) as client:
        port = str(client.base_url).rstrip("/").rpartition(":")[2]
        outcome = run("rm", "mine", "--yes", GATEWAY_PORT=port)
        assert outcome.returncode == 1
        assert "Set GATEWAY_API_KEYS to one of its keys." in outcome.stderr
        assert repo.exists()
        assert run("rm", "mine", "--yes", GATEWAY_PORT=port, GATEWAY_API_KEYS="k").returncode == 0


def test_a_download_under_way_is_not_removed(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    hub.gate.clear()
    own = {"GATEWAY_HUB_ENDPOINT": hub.url, "GATEWAY_HUB_CACHE": "cache"}
    with subprocess.Popen(command("pull", "mine"), cwd=tmp_path, env=environment(**own)) as pull:
        try:
            assert hub.half_sent.wait(60)
            outcome = run("rm", "mine", "--yes")
            hub.gate.set()
            assert pull.wait(60) == 0
        finally:
            pull.kill()
    assert outcome.returncode == 1
    assert "models--org--big is being downloaded. Once that has ended, run:" in outcome.stderr
    (again,) = steps(outcome)
    assert run(*again, "--yes").returncode == 0


def test_half_a_download_is_finished_before_it_is_removed(
    repo: Path, run: Run, tmp_path: Path
) -> None:
    shutil.rmtree(repo / "snapshots")
    outcome = run("rm", "mine", "--yes")
    assert outcome.returncode == 1
    assert f"{repo} has no finished download of hub:org/big@{COMMIT}." in outcome.stderr
    pull, again = steps(outcome)
    assert run(*pull).returncode == 0
    assert run(*again, "--yes").returncode == 0
    assert not repo.exists()


@pytest.mark.parametrize("place", ["", "snapshots", f"snapshots/{COMMIT}", "blobs"])
def test_a_folder_that_is_a_link_is_refused(
    repo: Path, run: Run, tmp_path: Path, place: str
) -> None:
    linked, elsewhere = repo / place, tmp_path / "elsewhere"
    shutil.move(linked, elsewhere)
    linked.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    outcome = run("rm", "mine", "--yes")
    assert outcome.returncode == 1
    assert f"{linked} is a link out of the repository's folder" in outcome.stderr
    assert sorted(elsewhere.rglob("*")) == before


def test_a_file_that_links_out_of_the_repository_is_refused(
    repo: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("x")
    (repo / "snapshots" / COMMIT / "notes.txt").symlink_to(tmp_path / "precious")
    outcome = run("rm", "mine", "--yes")
    assert outcome.returncode == 1
    assert (
        "notes.txt is a link out of the repository's folder: remove it yourself." in outcome.stderr
    )
    assert (tmp_path / "precious").read_text() == "x"
    assert repo.exists()


def test_a_cache_that_is_reached_by_a_link_is_a_cache(repo: Path, run: Run, tmp_path: Path) -> None:
    """A disk with more room is often reached so."""
    (tmp_path / "linked").symlink_to(tmp_path / "cache")
    assert run("rm", "mine", "--yes", GATEWAY_HUB_CACHE="linked").returncode == 0
    assert not repo.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
def test_files_that_may_not_be_removed_are_named(repo: Path, run: Run) -> None:
    snapshot = repo / "snapshots" / COMMIT
    snapshot.chmod(0o500)
    try:
        outcome = run("rm", "mine", "--yes")
    finally:
        snapshot.chmod(0o700)
    assert outcome.returncode == 1
    assert f"You may not remove all of {repo}." in outcome.stderr
