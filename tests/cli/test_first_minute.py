"""The terminal of somebody who starts the gateway for the first time."""

import json
import os
import pty
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.cli.serve import Place, write_greeting
from gateway.registry import load_catalog
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
    """Run a command whose stderr is a terminal until it greets; give its lines."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment(**given), stdout=slave, stderr=slave
    )
    os.close(slave)
    try:
        seen = b""
        ends = time.monotonic() + 120
        while not re.search(rb"mlx-gateway is ready[^\n]*\n\r\ncurl [^\n]*\n", seen):
            assert time.monotonic() < ends, seen
            seen += os.read(master, 65536)
        yield seen.decode().replace("\r\n", "\n").splitlines()
    finally:
        process.kill()
        process.wait(10)
        os.close(master)


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


@needs_curl
def test_a_terminal_sees_models_load_and_ends_with_a_line_to_paste(tiny: Path) -> None:
    """Each model when it begins and with its seconds, then the address, then the line, which
    works.
    """
    with in_a_terminal(command("serve"), tiny, GATEWAY_PORT="0") as lines:
        events = [line.split()[0] for line in lines if line]
        order = ["starting", "serving", "model_loading", "model_loaded", "ready", "mlx-gateway"]
        assert [event for event in events if event in order] == order
        (loaded,) = (line for line in lines if line.startswith("model_loaded"))
        assert re.search(r" model=tiny [\d.]+ s [\d.]+ [KM]iB", loaded)
        url = re.search(r"url=(\S+)", "\n".join(lines))
        assert url is not None
        assert lines[-3] == f"mlx-gateway is ready on {url[1]} (Ctrl-C stops it). Ask it something:"
        assert lines[-1].startswith(f"curl {url[1]}/v1/chat/completions -d ")
        assert "choices" in answered(lines[-1])
        assert all(len(line) <= 100 for line in lines[:-1])
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
    """The address is not the wildcard, and its name is a Host that the gateway lets in."""
    specs = list(load_catalog(ROOT / "models.yaml", {}).specs)
    open_to_all = settings(allow_unauthenticated=True)
    said = write_greeting([Place(host, 80)], specs, open_to_all)
    assert f"curl {shown}v1/chat/completions" in said
    assert '{"model": "smollm2-135m", "messages": ' in said
    assert "curl --unix-socket /a http://localhost/v1/" in write_greeting(
        [Place("/a")], specs, open_to_all
    )
    (embedder, *_) = (spec for spec in specs if spec.kind == "embedding")
    assert "/v1/embeddings" in write_greeting([Place(host, 80)], [embedder], open_to_all)
    assert "curl" not in write_greeting([Place(host, 80)], [], open_to_all)


@needs_curl
def test_the_readme_shows_what_the_terminal_shows() -> None:
    """The first start of the shipped models.yaml, but for numbers; and the line finds Paris."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("```console\n")[2]
    shown = block.partition("```")[0].splitlines()
    with in_a_terminal(command("serve"), ROOT, GATEWAY_PORT=str(free_port()), **AT_ONCE) as lines:
        assert of_any_machine(lines) == of_any_machine(shown[1:])
        assert "Paris" in json.dumps(answered(lines[-1]))


def of_any_machine(lines: list[str]) -> list[str]:
    """Leave out the parts that differ on another machine: numbers and warnings."""
    kept = [line for line in lines if not line.startswith(("warning:", "    ", "self_test_"))]
    told = "\n".join(kept)
    told = re.sub(r"\d\d:\d\d:\d\d", "TIME", told)
    told = re.sub(r"127\.0\.0\.1:\d+", "HOST", told)
    return re.sub(r"[\d.]+ (s|[KMG]iB)\b", r"N \1", told).splitlines()
