"""A real cluster of this machine alone, as `python -m deploy.ray` starts it, and its processes."""

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.processes import ROOT

PYTHON = ROOT / ".venv-ray" / "bin" / "python"
MARK = "RAY_TEST_CLUSTER"  # a variable that each of a cluster's processes has
SCRIPTED = "compat_tests.ray.engines:paced"
REPLICA = "ray::ServeReplica"


@dataclass(frozen=True)
class Cluster:
    """A cluster's address, and the mark that its processes are known by."""

    url: str
    mark: str
    log: Path

    @property
    def pids(self) -> list[int]:
        """List the cluster's processes, its ingress among them."""
        return _marked(self.mark)

    @property
    def replicas(self) -> list[int]:
        return [pid for pid in self.pids if _command(pid).startswith(REPLICA)]

    def metrics(self, pattern: str) -> list[float]:
        """Return the values of the series that match a pattern from their beginning."""
        text = httpx2.get(f"{self.url}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if re.match(pattern, line)]
        return [float(line.rpartition(" ")[2]) for line in lines]

    def wait_for(self, replicas: int) -> None:
        """Wait until this number of replicas answer."""
        _until(lambda: len(self.metrics(r"gateway_ready\{")) == replicas, self.log)


@contextmanager
def running(folder: Path, models: Path, *options: str, **settings: str) -> Iterator[Cluster]:
    """Run a cluster until exit. At the end none of its processes is left."""
    log, mark = folder / "log", uuid.uuid4().hex
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GATEWAY_", "RAY_"))}
    environment |= {
        "GATEWAY_LOG_FORMAT": "json",
        "GATEWAY_HUB_ENDPOINT": "http://127.0.0.1:9",
        "GATEWAY_HUB_CACHE": str(folder / "hub"),
        "GATEWAY_DRAIN_S": "2",
        MARK: mark,
        **settings,
    }
    command = [str(PYTHON), "-m", "deploy.ray", "--port", "0", "--models", str(models), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        _until(lambda: '"url":"' in log.read_text() or process.poll() is not None, log)
        assert process.poll() is None, log.read_text()
        found = re.search(r'"url":"([^"]+)"', log.read_text())
        assert found is not None
        cluster = Cluster(found[1], mark, log)
        _until(lambda: _is_ready(cluster.url), log)
        yield cluster
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        _until(lambda: not _marked(mark), log, seconds=20)
    finally:
        process.kill()
        for pid in _marked(mark):
            os.kill(pid, signal.SIGKILL)


def write_models(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> Path:
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "models": dict(models)}), encoding="utf-8")
    return file


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready", timeout=30).status_code == 200
    except httpx2.TransportError:
        return False


def _until(is_so: Any, log: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it is gone, or another user's
                continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
