"""A g++ that finds no room, in the place of the machine's, and functions without code yet."""

import ctypes
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.engine import compiled_code

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="mlx compiles with g++")
NO_ROOM = "fatal error: error closing x.s: No space left on device"
_SCRIPT = """#!/bin/sh
[ "$1" = --version ] && exit 0
[ -e {folder}/full ] && echo '{said}' && exit 1
[ -e {folder}/broken ] && for output; do :; done && exec touch "$output"
PATH='{path}' exec g++ "$@"
"""


@dataclass(frozen=True)
class Compiler:
    """It fails while its folder has a file `full`, and writes empty files while it has `broken`."""

    folder: Path

    @property
    def path(self) -> str:
        """Give a PATH with it in front."""
        return f"{self.folder}:{os.environ['PATH']}"

    def is_now(self, state: str) -> None:
        for each in ("full", "broken"):
            (self.folder / each).unlink(missing_ok=True)
        if state:
            (self.folder / state).touch()


def in_c(name: str) -> str | None:
    """Give an environment variable as mlx and g++ see it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value: bytes | None = getenv(name.encode())
    return None if value is None else os.fsdecode(value)


@contextmanager
def compiling_in(folder: Path) -> Iterator[Path]:
    """Have this process compile in a folder, which is made, and afterwards as before."""
    folder.mkdir()
    before, on_device = in_c("TMPDIR"), mx.default_device()
    os.putenv("TMPDIR", str(folder))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiled_code, "FOLDER", folder)
        yield folder
    if before is None:
        os.unsetenv("TMPDIR")
    else:
        os.putenv("TMPDIR", before)
    mx.set_default_device(on_device)
    mx.enable_compile()


def write_compiler(folder: Path) -> Compiler:
    """Write it into a folder, which is made."""
    folder.mkdir()
    script = _SCRIPT.format(folder=folder, said=NO_ROOM, path=os.environ["PATH"])
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o755)
    return Compiler(folder)


def new_function() -> Callable[[mx.array], mx.array]:
    """Give a compiled function for which there is no code yet: nearly the identity."""
    tiny = random.uniform(1e-30, 2e-30)
    compiled: Callable[[mx.array], mx.array] = mx.compile(lambda x: x + mx.exp(x * tiny) * tiny)
    return compiled


def is_fused() -> bool:
    """Return True if a function that was compiled long ago becomes one node of a graph."""
    drawn = io.StringIO()
    export: Any = mx.export_to_dot  # a file-like object will do; the stubs know none
    export(drawn, _OLD(mx.ones(2)))
    return "Compiled" in drawn.getvalue()


_OLD = new_function()
