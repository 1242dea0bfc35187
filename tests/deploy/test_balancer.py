"""Gateways behind HAProxy, by deploy/balancer/haproxy.cfg: one that leaves is not missed."""

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from gateway.settings import load_settings
from tests.checkpoints import write_chat
from tests.processes import ROOT, Served, command, environment, free_port, started

CONFIG = ROOT / "deploy" / "balancer" / "haproxy.cfg"
SCALING = ROOT / "docs" / "scaling.md"
HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
MODELS = "version: 1\nmodels:\n  tiny: {kind: chat, source: 'path:tiny', preload: true}\n"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}

balanced = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")


def section(title: str) -> str:
    """Return the text of docs/scaling.md under a heading."""
    return SCALING.read_text().partition(f"### {title}\n")[2].partition("\n##")[0]


@contextmanager
def balancing(folder: Path, gateways: list[Served]) -> Iterator[str]:
    """Run the page's command, with the test's ports in the file; yield the address."""
    assert "haproxy -f deploy/balancer/haproxy.cfg\n" in section("Several gateways, a balancer")
    port = free_port()
    text = CONFIG.read_text()
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{port}"),
        ("127.0.0.1:8001", gateways[0].url.removeprefix("http://")),
        ("127.0.0.1:8002", gateways[1].url.removeprefix("http://")),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    file = folder / "haproxy.cfg"
    file.write_text(text)
    assert HAPROXY
    log = folder / "haproxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen([HAPROXY, "-f", str(file)], stdout=output, stderr=output)
    try:
        for _ in range(200):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


def served(gateway: Served) -> int:
    """Count the chats that a gateway has answered."""
    return gateway.log.read_text().count('"path":"/v1/chat/completions","status":200')


@balanced
@pytest.mark.slow
def test_a_gateway_that_drains_or_dies_is_not_missed(tmp_path: Path) -> None:
    write_chat(tmp_path / "tiny")
    (tmp_path / "models.yaml").write_text(MODELS)
    arguments = command("serve", "--models", str(tmp_path / "models.yaml"))
    with ExitStack() as stack:
        gateways = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            gateways.append(stack.enter_context(started(arguments, tmp_path / name)))
        url = stack.enter_context(balancing(tmp_path, gateways))

        def ask(_: int) -> int:
            answer = httpx2.post(f"{url}/v1/chat/completions", json=BODY, timeout=60)
            return answer.status_code

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(ask, range(16))) == {200}
            assert min(map(served, gateways)) > 0
            asking = pool.map(ask, range(40))
            gateways[0].process.send_signal(signal.SIGTERM)
            assert set(asking) == {200}
            gateways[0].process.wait(30)
            before = served(gateways[1])
            assert set(pool.map(ask, range(8))) == {200}
            assert served(gateways[1]) == before + 8


def test_the_settings_of_a_bigger_mac_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = re.findall(
        r"^(GATEWAY_.*) mlx-gateway serve$", section("One bigger Mac"), re.MULTILINE
    )
    pairs = dict(each.split("=") for each in line.split())
    assert len(pairs) == 3
    for name, value in pairs.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({})
    for name, value in pairs.items():
        assert str(getattr(settings, name.removeprefix("GATEWAY_").lower())) == value
    done = subprocess.run(
        command("config"), env=environment(**pairs), capture_output=True, text=True, check=True
    )
    for name in pairs:
        assert re.search(rf"{name}\b.*environment", done.stdout), done.stdout
