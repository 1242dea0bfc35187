"""`mlx-gateway run` in pipes, as scripts have it."""

import shlex
import subprocess
from pathlib import Path

from tests.processes import DEMO, command, environment


def run(line: str, folder: Path, **given: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell's line, in which `run` is `mlx-gateway run`."""
    script = f'set -o pipefail; run() {{ {shlex.join(command("run"))} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment(**given),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_pipe_asks_the_gateway_that_runs(url: str, tmp_path: Path) -> None:
    port = {"GATEWAY_PORT": url.rpartition(":")[2]}
    asked = run("echo 'What is the capital of France?' | run demo-chat | cat", tmp_path, **port)
    named = run("run gpt-4o-mini 'What is the capital of Italy?' > answer", tmp_path, **port)
    assert (asked.returncode, asked.stdout, asked.stderr) == (
        0,
        "The capital of France is Paris.\n",
        "",
    )
    assert (named.returncode, named.stdout + named.stderr) == (0, "")
    assert (tmp_path / "answer").read_text() == "The capital of Italy is Rome.\n"


def test_a_model_that_is_not_served_is_refused(url: str, tmp_path: Path) -> None:
    port = {"GATEWAY_PORT": url.rpartition(":")[2]}
    done = run("echo Hello | run nobody | cat", tmp_path, **port)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        f"The gateway at {url} does not serve the chat model nobody. Run one of:\n" in done.stderr
    )
    assert "\n  mlx-gateway run demo-chat\n" in done.stderr


def test_without_a_gateway_one_is_started_and_ended(tmp_path: Path) -> None:
    """A folder's name is enough: nothing else is served, or read from the hub."""
    chat = shlex.quote(str(DEMO.parent / "chat"))
    given = {"GATEWAY_PORT": "0", "GATEWAY_HUB_ENDPOINT": "http://127.0.0.1:9"}
    done = run(f"echo 'What is the capital of France?' | run {chat} | head -1", tmp_path, **given)
    assert done.stdout == "The capital of France is Paris.\n"
    assert (done.returncode, done.stderr) == (0, "Starting a gateway…\n")
