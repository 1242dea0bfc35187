"""serve and SIGHUP: models.yaml is read again, while requests go on."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.processes import command, environment, started

pytestmark = pytest.mark.slow

MODELS = """
version: 1
models:
  tiny: {kind: chat, source: "path:tiny", preload: true}
"""
IDLE = "version: 1\nmodels:\n  a: {kind: chat, source: 'path:.'}\n"


def wait_for(log: Path, event: str) -> None:
    deadline = time.monotonic() + 60
    while event not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


@contextmanager
def written(fifo: Path) -> Iterator[None]:
    """Wait for somebody to read from a pipe, who then waits for bytes."""
    deadline = time.monotonic() + 60
    while True:
        try:
            other = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:  # nobody reads
            assert time.monotonic() < deadline
            time.sleep(0.02)
    try:
        yield
    finally:
        os.close(other)


def test_a_hangup_reads_the_models_again_and_holds_up_no_exit(tmp_path: Path) -> None:
    """One that cannot be obeyed does not keep the next from being heard; nor does a models file
    that does not answer keep the process.
    """
    write_chat(tmp_path / "tiny")
    file = tmp_path / "models.yaml"
    file.write_text(MODELS)
    with started(command("serve"), tmp_path) as served:
        file.write_text("version: 1\nmodels:\n  a: {kind: chta, source: 'path:.'}\n")
        served.process.send_signal(signal.SIGHUP)
        wait_for(served.log, "models.yaml:3")
        (tmp_path / ".env").write_bytes(b"\xff\xfe=1\n")
        served.process.send_signal(signal.SIGHUP)
        wait_for(served.log, '"event":"reload_failed"')
        (tmp_path / ".env").unlink()
        assert [each["id"] for each in listed(served.url)] == ["tiny"]
        file.write_text(MODELS.replace("{", "{aliases: small, "))
        served.process.send_signal(signal.SIGHUP)
        wait_for(served.log, '"event":"reloaded"')
        names = [(each["id"], each["state"]) for each in listed(served.url)]
        assert names == [("tiny", "loaded"), ("small", "loaded")]
        assert served.log.read_text().count('"event":"model_loaded"') == 1
        file.unlink()
        os.mkfifo(file)
        served.process.send_signal(signal.SIGHUP)
        with written(file):
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(60) == 0


def test_a_hangup_while_it_drains_changes_nothing(tmp_path: Path) -> None:
    """Nobody would use a newly loaded model any more; nor does the signal end the process."""
    (tmp_path / "models.yaml").write_text(IDLE)
    with started(command("serve"), tmp_path, GATEWAY_DRAIN_S="1") as served:
        place = urlsplit(served.url)
        assert place.hostname is not None
        with socket.create_connection((place.hostname, place.port or 0), 20) as slow:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            slow.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 100 ")  # its body is waited for
            served.process.send_signal(signal.SIGTERM)
            wait_for(served.log, '"event":"draining"')
            served.process.send_signal(signal.SIGHUP)
            assert served.process.wait(60) == 0
    assert '"event":"drain_cut_short"' in served.log.read_text()
    assert '"event":"reloaded"' not in served.log.read_text()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="nobody tells which signals wait")
def test_a_hangup_while_it_starts_waits_until_it_serves(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(IDLE)
    log = tmp_path / "log"
    given = environment(GATEWAY_PORT="0", GATEWAY_LOG_FORMAT="json")
    with (
        log.open("wb") as output,
        subprocess.Popen(command("serve"), cwd=tmp_path, env=given, stderr=output) as process,
    ):
        try:
            while not blocks(process.pid, signal.SIGHUP):
                time.sleep(0.01)
            process.send_signal(signal.SIGHUP)
            wait_for(log, '"event":"reloaded"')
        finally:
            process.kill()


def blocks(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process has a signal wait."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigBlk:")[2].split()[0], 16)
    return bool(mask >> (number - 1) & 1)


def listed(url: str) -> list[dict[str, object]]:
    data: list[dict[str, object]] = httpx2.get(f"{url}/v1/models").json()["data"]
    return data
