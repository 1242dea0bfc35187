"""A gateway in a process of its own, as an operator runs it."""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "demo" / "models.yaml"
"""Models that are quick, and on every machine."""
UNDRAWN = range(20_000, 32_000)
"""Ports that no kernel gives by itself: Linux draws from 32768 on, macOS from 49152."""
PRELOADED = re.compile('"event":"(?:not_)?ready"')

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate")


def command(*arguments: str) -> list[str]:
    """Give the command line of `mlx-gateway`."""
    return [sys.executable, "-m", "gateway", *arguments]


def environment(**given: str) -> dict[str, str]:
    """Give this process's environment, with these of the gateway's variables and no others."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    return {**clean, "PYTHONPATH": str(ROOT), **given}


def ran(folder: Path, *arguments: str, **given: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of `mlx-gateway` in a folder until it ends."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(**{"NO_COLOR": "1", **given}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def children() -> set[str]:
    """List the processes that this one has started."""
    asked = ["pgrep", "-P", str(os.getpid())]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as own:
        return {*own.communicate()[0].split()} - {str(own.pid)}


def free_ports(count: int) -> list[int]:
    """Choose consecutive ports for servers that must be told theirs; nobody else draws them."""
    while True:
        first = UNDRAWN.start + secrets.randbelow(len(UNDRAWN) - count)
        ports = list(range(first, first + count))
        with suppress(OSError), ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports


def free_port() -> int:
    [port] = free_ports(1)
    return port


def write_certificate(folder: Path) -> dict[str, str]:
    """Make a certificate that nobody trusts; give the variables that name it."""
    files = {"GATEWAY_TLS_CERT": folder / "cert.pem", "GATEWAY_TLS_KEY": folder / "key.pem"}
    cert, key = map(str, files.values())
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]  # made sooner than RSA
    asked = ["openssl", "req", "-x509", *kind, "-nodes", "-subj", "/CN=gateway"]
    subprocess.run([*asked, "-out", cert, "-keyout", key], capture_output=True, check=True)
    return {name: str(file) for name, file in files.items()}


@dataclass(frozen=True)
class Served:
    """A process that serves at `url`, its port or its unix socket, and logs to `log`."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def rss_bytes(self) -> int:
        """Count the memory it holds."""
        asked = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        return 1024 * int(subprocess.run(asked, capture_output=True, check=True).stdout)


@contextmanager
def started(arguments: list[str], folder: Path, **given: str) -> Iterator[Served]:
    """Start a server in a folder and wait until it has preloaded; it is killed at the end."""
    log = folder / "log"
    given = {"GATEWAY_PORT": "0", "GATEWAY_LOG_FORMAT": "json", **given}
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, cwd=folder, env=environment(**given), stderr=output)
    try:
        while not PRELOADED.search(log.read_text()):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        found = re.search(r'"(?:url|bind)":"([^"]+)"', log.read_text())
        assert found, log.read_text()
        yield Served(process, found[1], log)
    finally:
        process.kill()
        process.wait(60)
