"""Calls of the system that fail in a gateway's processes when a test says so (Linux: faults.c)."""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")
CAN_BUILD = sys.platform == "linux" and shutil.which("cc") is not None
FOR_A_WHILE = 1 << 30


class Call(IntEnum):
    """The calls that can fail, numbered as faults.c does."""

    NONE, OPEN, WRITE, FORK, ACCEPT, MMAP, RENAME, GETRANDOM, CLOCK, THREAD = range(10)


@dataclass(frozen=True)
class Fault:
    """A failure of a call: an error, a write of half its bytes (`error` 0), or another date."""

    call: Call
    error: int = 0
    shift_s: int = 0


class _Control(ctypes.Structure):
    """The memory that faults.c reads, field for field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("call", "error", "skipped", "left", "waits", "hits")),
        ("shift_s", ctypes.c_int64),
    )


class Injector:
    """Makes calls fail in the processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        library, file = folder / "faults.so", folder / "faults"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        file.write_bytes(bytes(ctypes.sizeof(_Control)))
        with file.open("r+b") as opened:
            self._control = _Control.from_buffer(mmap.mmap(opened.fileno(), 0))
        self.environment = {"LD_PRELOAD": str(library), "FAULTS": str(file)}

    @contextmanager
    def failing(
        self, fault: Fault, times: int, *, skipped: int = 0, from_start: bool = False
    ) -> Iterator[None]:
        """Make a call fail `times` times while entered, or from the opening of models.yaml."""
        control = self._control
        control.error, control.shift_s = fault.error, fault.shift_s
        control.skipped, control.left, control.waits = skipped, times, from_start
        control.hits = 0
        control.call = fault.call
        try:
            yield
        finally:
            control.call = Call.NONE

    @property
    def hits(self) -> int:
        """Count the calls that failed since `failing` was entered."""
        return int(self._control.hits)

    @property
    def has_begun(self) -> bool:
        """Return True once models.yaml was opened."""
        return not self._control.waits


def children(pid: int) -> list[int]:
    """Return the processes that one has started."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(child) for child in listed.stdout.split()]


def kill_children(pid: int) -> int:
    """Kill the processes that one has started, as the kernel does where memory is short."""
    killed = 0
    for child in children(pid):
        try:
            os.kill(child, 9)
        except ProcessLookupError:
            continue
        killed += 1
    return killed
