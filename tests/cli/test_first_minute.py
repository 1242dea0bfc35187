"""The terminal of somebody who starts the gateway for the first time."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import __version__
from gateway.cli.serve import Place, write_greeting
from gateway.registry import ChatSpec, EmbeddingSpec, ModelSpec, PathSource
from tests.checkpoints import write_chat
from tests.processes import ROOT, command, environment, free_port, needs_openssl, write_certificate
from tests.serving_app import settings

pytestmark = pytest.mark.slow

MODELS = """
version: 1
models:
  tiny: {kind: chat, source: "path:tiny", preload: true, sampling: {max_tokens: 4}}
"""
# Its own passes are the first test's subject.
AT_ONCE = {"GATEWAY_WARM_UP": "false", "GATEWAY_SELF_TEST": "false"}
needs_curl = pytest.mark.skipif(not shutil.which("curl"), reason="pastes a line that calls curl")


@contextmanager
def in_a_terminal(arguments: list[str], folder: Path, **given: str) -> Iterator[list[str]]:
    """Run a command whose stderr is a terminal until it greets; give the lines on the screen."""
    master, slave = pty.openpty()
    wide = {"TERM": "xterm", "COLUMNS": "100", **given}
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment(**wide), stdout=slave, stderr=slave
    )
    os.close(slave)
    try:
        seen = b""
        ends = time.monotonic() + 120
        while not re.search(rb"mlx-gateway is ready[^$]*\ncurl [^\n]*\n", seen):
            assert time.monotonic() < ends, seen
            seen += os.read(master, 65536)
        yield on_screen(seen.decode())
    finally:
        process.kill()
        process.wait(60)
        os.close(master)


def on_screen(written: str) -> list[str]:
    """Give the lines that a terminal shows at the end, without the bar that was there before."""
    lines = [""]
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part[0] not in "\x1b\r":
            lines[-1] += part
    return lines[:-1]


def answered(line: str, **given: str) -> dict[str, object]:
    """Paste a line into a shell, and read its output."""
    done = subprocess.run(
        ["sh", "-c", line], env={**os.environ, **given}, capture_output=True, timeout=60, check=True
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.fixture
def tiny(short_path: Path) -> Path:
    """Give a folder to serve a tiny model from."""
    write_chat(short_path / "tiny")
    (short_path / "models.yaml").write_text(MODELS)
    return short_path


QUESTION = (
    '{"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)


def without_warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith(("warning:", "    "))]


@needs_curl
def test_a_terminal_tells_a_person_what_to_do(tiny: Path) -> None:
    """The address, the models and how to ask them. The bar is gone; nothing internal is said."""
    with in_a_terminal(command("serve"), tiny, GATEWAY_PORT="0") as lines:
        port = lines[-1].partition("127.0.0.1:")[2].partition("/")[0]
        assert without_warnings(lines) == [
            f"mlx-gateway {__version__} is starting (models.yaml).",
            f"mlx-gateway is ready on http://127.0.0.1:{port} (Ctrl-C stops it).",
            f"Dashboard: http://127.0.0.1:{port}/dashboard",
            "",
            "tiny  chat       loaded",
            "",
            "Ask it something, in another terminal:",
            f"GATEWAY_PORT={port} mlx-gateway run tiny",
            f"curl http://127.0.0.1:{port}/v1/chat/completions -d '{QUESTION}'",
        ]
        assert "choices" in answered(lines[-1])


def test_a_debug_log_tells_the_rest(tiny: Path) -> None:
    """Each event of a start, which a log of JSON has too."""
    given = {"GATEWAY_PORT": "0", "GATEWAY_LOG_LEVEL": "debug"}
    with in_a_terminal(command("serve"), tiny, **given) as lines:
        lines = [line.removeprefix("debug: ") for line in lines if line]
        events = [line.split()[0] for line in lines]
        order = ["starting", "serving", "model_loading", "model_loaded", "ready", "mlx-gateway"]
        assert [event for event in events[1:] if event in order] == order
        assert "memory_budget" in events
        (loaded,) = (line for line in lines if line.startswith("model_loaded"))
        assert re.search(r" model=tiny [\d.]+ s [\d.]+ [KM]iB", loaded)
        tested = [line.replace('"', "") for line in lines if line.startswith("self_test_")]
        assert tested
        assert all(
            re.search(r" model=tiny answers=(together|one at a time)", each) for each in tested
        )
        assert not any("None" in each for each in tested)


@needs_curl
@needs_openssl
def test_the_line_to_paste_names_a_key_shows_none_and_speaks_tls(tiny: Path) -> None:
    keys = "one,two"
    given = {**AT_ONCE, **write_certificate(tiny), "GATEWAY_API_KEYS": keys}
    with in_a_terminal(command("serve"), tiny, GATEWAY_PORT="0", **given) as lines:
        assert "one" not in "\n".join(lines).replace("none", "")
        assert "https://127.0.0.1:" in lines[-1]
        assert "choices" in answered(lines[-1], GATEWAY_API_KEYS=keys)


@needs_curl
@needs_openssl
def test_the_line_to_paste_goes_to_a_unix_socket(tiny: Path) -> None:
    """It speaks TLS too."""
    given = {**AT_ONCE, **write_certificate(tiny), "GATEWAY_BIND": "unix:a b.sock"}
    with in_a_terminal(command("serve"), tiny, **given) as lines:
        assert f"--unix-socket '{tiny}/a b.sock'" in lines[-1]
        assert "https://" in lines[-1]
        assert "choices" in answered(lines[-1])


@pytest.mark.parametrize("is_on_path", [False, True])
def test_the_greeting_names_a_command_that_another_terminal_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_path: bool
) -> None:
    program = tmp_path / "a folder" / "mlx-gateway"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["a folder/mlx-gateway", "serve"])
    monkeypatch.setenv("PATH", str(program.parent if is_on_path else tmp_path))
    said = write_greeting([AT_8000], SPECS, SPECS[:1], settings())
    name = "mlx-gateway" if is_on_path else f"'{program}'"
    assert f"\n{name} run writer\n" in said


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("::", "'http://[::1]:80/"),
        ("::1", "'http://[::1]:80/"),
        ("192.0.2.1", "-H 'Host: localhost' http://192.0.2.1:80/"),
    ],
)
def test_the_greeting_names_an_address_that_answers(host: str, shown: str) -> None:
    """The address is not the wildcard, and its name is a Host that the gateway lets in.

    `run` asks 127.0.0.1, and is named if that is the gateway.
    """
    open_to_all = settings(allow_unauthenticated=True)
    said = write_greeting([Place(host, 80)], SPECS, [], open_to_all)
    assert f"curl {shown}v1/chat/completions" in said
    is_found = host in ("127.0.0.1", "0.0.0.0")
    assert ("GATEWAY_PORT=80 mlx-gateway run writer\n" in said) == is_found


SPECS: list[ModelSpec] = [
    ChatSpec(id="writer", kind="chat", source=PathSource(Path("w"))),
    EmbeddingSpec(id="an-embedder", kind="embedding", source=PathSource(Path("e"))),
]
CHAT = QUESTION.replace("tiny", "writer")
ASK = "Ask it something, in another terminal:\n"
LISTED = "writer       chat       loaded\nan-embedder  embedding  on first use"
AT_8000 = Place("127.0.0.1", 8000)


def ready_on(url: str) -> str:
    return f"mlx-gateway is ready on {url} (Ctrl-C stops it).\nDashboard: {url}/dashboard"


@pytest.mark.parametrize(
    ("given", "options"),
    [({}, ""), ({"api_keys": "k"}, '-H "Authorization: Bearer $GATEWAY_API_KEYS" ')],
)
def test_the_greeting_of_a_loaded_model(given: dict[str, Any], options: str) -> None:
    """The default port needs no variable, and a key is never shown."""
    url = "http://127.0.0.1:8000"
    commands = f"mlx-gateway run writer\ncurl {options}{url}/v1/chat/completions -d '{CHAT}'"
    assert write_greeting([AT_8000], SPECS, SPECS[:1], settings(**given)) == (
        f"{ready_on(url)}\n\n{LISTED}\n\n{ASK}{commands}"
    )


def test_the_greeting_over_tls_names_no_command_that_would_distrust_it(tmp_path: Path) -> None:
    url = "https://127.0.0.1:8000"
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    for file in files.values():
        file.touch()
    assert write_greeting([AT_8000], SPECS, SPECS[:1], settings(**files)) == (
        f"{ready_on(url)}\n\n{LISTED}\n\n{ASK}curl --insecure {url}/v1/chat/completions -d '{CHAT}'"
    )


def test_the_greeting_of_a_unix_socket_names_no_page() -> None:
    socket = Place("/run/a b.sock")
    assert write_greeting([socket], SPECS, SPECS[:1], settings()) == (
        f"mlx-gateway is ready on unix:/run/a b.sock (Ctrl-C stops it).\n\n{LISTED}\n\n{ASK}"
        f"curl --unix-socket '/run/a b.sock' http://localhost/v1/chat/completions -d '{CHAT}'"
    )


def test_the_greeting_without_models_names_the_next_step() -> None:
    assert write_greeting([AT_8000], [], [], settings(dashboard=False)) == (
        "mlx-gateway is ready on http://127.0.0.1:8000 (Ctrl-C stops it).\n\n"
        "It serves no models: see `mlx-gateway models recommend`."
    )


def test_the_greeting_of_many_models_names_the_loaded_ones_first_and_counts_the_rest() -> None:
    """An embedder alone is asked for a vector."""
    specs: list[ModelSpec] = [
        EmbeddingSpec(id=f"e{number}", kind="embedding", source=PathSource(Path("e")))
        for number in range(12)
    ]
    said = write_greeting([Place("127.0.0.1", 8000)], specs, specs[11:], settings())
    rows = said.split("\n\n")[1].splitlines()
    assert rows[:2] == ["e11  embedding  loaded", "e0   embedding  on first use"]
    assert len(rows) == 5
    assert rows[-1] == "and 8 more on first use: mlx-gateway models"
    assert said.endswith("""/v1/embeddings -d '{"model": "e11", "input": "Hello"}'""")
    assert "mlx-gateway run" not in said


@needs_curl
def test_the_readme_shows_what_the_terminal_shows() -> None:
    """The first start of the shipped models.yaml, but for the port; and the line finds Paris."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("```console\n")[2]
    shown = block.partition("```")[0].splitlines()
    with in_a_terminal(command("serve"), ROOT, GATEWAY_PORT=str(free_port()), **AT_ONCE) as lines:
        assert of_any_machine(lines) == of_any_machine(shown[1:])
        assert "Paris" in json.dumps(answered(lines[-1]))


def of_any_machine(lines: list[str]) -> list[str]:
    """Leave out the parts that differ on another machine: the port and warnings."""
    kept = without_warnings(lines)
    told = "\n".join(kept)
    told = re.sub(r"GATEWAY_PORT=\d+ ", "", told)
    return re.sub(r"127\.0\.0\.1:\d+", "HOST", told).splitlines()


def installed(folder: Path, pip: str) -> "subprocess.CompletedProcess[str]":
    """Run `make setup` with another pip, and an environment that is there."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    given = [f"VENV={folder / 'venv'}", f"PIP={pip}", "SAY_S=0.05"]
    return subprocess.run(
        ["make", "setup", *given], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_long_install_says_that_it_goes_on(tmp_path: Path) -> None:
    """Until the step itself has ended, whose status is the command's."""
    done = installed(tmp_path, "sh -c 'sleep 1; exit 3' --")
    assert done.returncode
    assert "Error 3" in done.stderr
    lines = done.stdout.splitlines()
    assert (
        sum(
            re.fullmatch(r"Still at it: \S+ in \S+/venv so far\.", line) is not None
            for line in lines
        )
        >= 2
    )
