"""The machine measured: the device, its memory, the system, and the versions of the software."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gateway.doctor.report import describe_system
from gateway.engine.device import Device, choose_device, device_facts, memory_bytes

CHECKOUT = Path(__file__).parents[2]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, as mlx names it (`kind` is cpu, metal or cuda), and the software on it. `commit` is
    the gateway's, with a plus where files differ from it.
    """

    device: str
    kind: str
    memory_bytes: int
    cores: int
    system: str
    python: str
    mlx: str
    mlx_lm: str
    commit: str

    @classmethod
    def read(cls) -> "Machine":
        device = choose_device("auto")
        return cls(
            device=str(device_facts(device).get("device_name", device.value)),
            kind=device.value,
            memory_bytes=memory_bytes(device),
            cores=os.cpu_count() or 1,
            system=describe_system(),
            python=platform.python_version(),
            mlx=version("mlx"),
            mlx_lm=version("mlx-lm"),
            commit=_read_commit(),
        )

    def describe(self) -> str:
        """Say all of it in one line, for below a table."""
        return (
            f"{self.device} ({self.kind}, {self.cores} cores, {self.memory_bytes / GIB:.0f} GiB), "
            f"{self.system}, Python {self.python}; mlx {self.mlx}, mlx-lm {self.mlx_lm}, "
            f"gateway {self.commit}"
        )

    @property
    def is_cpu(self) -> bool:
        return self.kind == Device.CPU


def _read_commit() -> str:
    """Return the checkout's commit, or "unknown" where there is no git."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--", "gateway", "benchmarks")
    if not commit:
        return "unknown"
    return f"{commit}+" if changes else commit


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(CHECKOUT), *arguments)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
