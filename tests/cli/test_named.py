"""Commands take models by name: a new user's first commands, and their output."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.cli.conftest import Inside
from tests.fake_hub import FakeHub
from tests.processes import command, started


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub({"org/tiny": write_chat(tmp_path / "repo")}).serving() as hub:
        yield hub


def at(hub: FakeHub, folder: Path) -> dict[str, str]:
    return {
        "GATEWAY_HUB_ENDPOINT": hub.url,
        "GATEWAY_HUB_TIMEOUT_S": "60",
        "GATEWAY_HUB_CACHE": str(folder / "cache"),
        "HOME": str(folder),
    }


def test_what_a_name_is_and_what_lies_here_are_listed(
    hub: FakeHub, tmp_path: Path, inside: Inside
) -> None:
    """No models.yaml is needed; the second time nobody is asked."""
    where = at(hub, tmp_path)
    done = inside(tmp_path, "models", "hub:org/tiny", **where)
    assert done.stdout == "org/tiny\tchat\ttiny\thub:org/tiny\tno\t\n"
    done = inside(tmp_path, "pull", "org/tiny", **where)
    assert (done.returncode, done.stdout[:10]) == (0, "org/tiny: ")
    hub.asked.clear()
    embedder = tmp_path / ".lmstudio" / "models" / "org" / "Some-Embedding"
    embedder.parent.mkdir(parents=True)
    embedder.symlink_to(tmp_path / "repo")
    done = inside(tmp_path, "models", "./repo", "--discover", **where)
    listed = [line.split("\t")[:2] for line in done.stdout.splitlines()]
    assert listed == [["repo", "chat"], ["org/tiny", "chat"]]
    assert done.stderr.startswith("org/Some-Embedding is not served: its name says that it embeds")
    done = inside(tmp_path, "check", "./repo", "hub:org/tiny", **where)
    assert done.stdout == "named: 2 models by 3 names, no problems\n"
    assert hub.asked == []


def test_a_name_that_cannot_be_had_is_a_line_of_every_command(
    hub: FakeHub, tmp_path: Path, inside: Inside
) -> None:
    where = at(hub, tmp_path)
    for name in ("serve", "check", "models", "pull"):
        done = inside(tmp_path, name, "hub:org/gone", **where)
        assert done.returncode == 1
        [line] = (done.stdout + done.stderr).splitlines()
        assert line == (
            "hub:org/gone: The hub has no public repository org/gone: check its name, or if "
            "private run `hf auth login` or set HF_TOKEN."
        )
    assert not (tmp_path / "cache").exists()


def test_a_misspelt_name_ends_each_command_with_the_one_to_type(
    tmp_path: Path, inside: Inside
) -> None:
    own = {"HOME": str(tmp_path), "GATEWAY_PORT": "1"}
    for name in ("serve", "check", "models", "pull", "show", "rm"):
        done = inside(tmp_path, name, "Qwen3.5:9B", **own)
        assert done.returncode == 1
        assert done.stderr.endswith(f"Run `mlx-gateway {name} qwen3.5-9b`.\n")
        done = inside(tmp_path, name, "xyzzy", **own)
        step = "list" if name == "rm" else "models recommend"
        assert done.stderr.endswith(f" Run `mlx-gateway {step}`.\n")


@pytest.mark.slow
def test_a_named_model_is_served_once_its_download_is_whole(
    hub: FakeHub, tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that breaks off ends serve in a line, and the next try is served."""
    where = at(hub, tmp_path)
    hub.cuts = [5_000] * 9
    with monkeypatch.context() as hasty:
        hasty.setattr(time, "sleep", lambda _: None)  # a second before each of the hub's tries
        done = inside(tmp_path, "serve", "org/tiny", **where)
    assert done.returncode == 1
    assert "org/tiny could not be fetched from the hub" in done.stderr.splitlines()[-1]
    hub.cuts = []
    with started(command("serve", "org/tiny", "./repo"), tmp_path, **where) as served:
        url = f"{served.url}/v1"
        assert httpx2.get(f"{url}/models/org/tiny").json()["state"] == "loaded"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert httpx2.post(f"{url}/chat/completions", json=body, timeout=60).status_code == 200
        hub.status = 503  # a reload asks nobody for what is here
        os.kill(served.process.pid, signal.SIGHUP)
        while '"event":"reloaded"' not in served.log.read_text():
            assert "reload_refused" not in served.log.read_text()
        names = [model["id"] for model in httpx2.get(f"{url}/models").json()["data"]]
        assert names == ["org/tiny", "tiny", "repo"]
