"""Fixtures for the tests of commands."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import TypeAlias

import pytest
import structlog
from anyio.from_thread import BlockingPortal, start_blocking_portal

from gateway.cli import main
from tests.processes import environment

Inside: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Give a folder for unix sockets, whose paths are of 103 bytes at most on macOS: its temporary
    folders have more.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder).resolve()


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """Give a loop in a thread of its own: a command in this thread waits for the server there."""
    with start_blocking_portal("asyncio") as portal:
        yield portal


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Inside]:
    """Give a function that runs a command as `processes.ran` does, but in this process.

    Most of a command's own time is its imports, which a test of its output need not pay.
    """

    def ran(folder: Path, *arguments: str, **given: str) -> "subprocess.CompletedProcess[str]":
        wanted = environment(**{"NO_COLOR": "1", **given})
        with monkeypatch.context() as patched, chdir(folder):
            for name in os.environ.keys() - wanted.keys():
                patched.delenv(name)
            for name, text in wanted.items():
                patched.setenv(name, text)
            patched.setattr(tempfile, "tempdir", None)  # TMPDIR says it anew
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out, err)

    yield ran
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # `serve` holds it back at first
    structlog.reset_defaults()
