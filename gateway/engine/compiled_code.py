"""The folder for code that mlx compiles with g++ for a CPU.

mlx loads compiled libraries from the temporary folder, where other users could replace them. So mlx
gets a folder in the user's cache, which only this user can access.
"""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

import mlx.core as mx

from gateway.engine.blas import cache_folder, open_folder

# Free disk space that fusion needs: 67 functions took 1.4 MB, and g++ needs more.
LEAST_BYTES: Final = 16 << 20
# The beginnings of messages of failed compilations: mlx/backend/cpu/compiled.cpp,
# mlx/backend/cuda/jit_module.cpp and `name_failure`.
FAILURES: Final = (
    r"\[Compile(::eval_cpu)?\] |Could not load C\+\+ shared library |Failed to load compiled "
    r"|filesystem error: "
)


def choose_folder(environment: Mapping[str, str]) -> Path:
    """Choose the folder for compiled code, create it if missing, and set it in mlx."""
    # std::filesystem::temp_directory_path reads these variables in this order.
    values = map(environment.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    temporary = Path(next(filter(None, values), "/tmp"))
    # Different machines may share a home. On macOS, the temporary folder is already the user's own.
    folder = cache_folder(environment, f"mlx-{platform.machine()}")
    may_run = False
    if sys.platform == "linux":
        with suppress(OSError), open_folder(folder) as opened:
            may_run = not os.fstatvfs(opened).f_flag & os.ST_NOEXEC
    if folder is None or not may_run or not os.access(folder, os.W_OK):
        return temporary
    # putenv changes TMPDIR for mlx and g++, but not for Python's temporary files and child
    # processes.
    os.putenv("TMPDIR", str(folder))
    return folder


FOLDER: Final = choose_folder(os.environ)


def room() -> int:
    return shutil.disk_usage(FOLDER).free if os.access(FOLDER, os.W_OK) else 0


def fuse() -> bool:
    """Turn `mx.compile` on if the disk has room for compiled code, otherwise off.

    Return True if there is room. Must run on the lane.
    """
    has_room = mx.default_device() != mx.Device(mx.cpu, 0) or room() >= LEAST_BYTES
    if has_room and "MLX_DISABLE_COMPILE" not in os.environ:
        mx.enable_compile()
    else:
        mx.disable_compile()
    return has_room


@contextmanager
def unfused() -> Iterator[None]:
    """Turn compilation off inside the context. Must run on the lane."""
    mx.disable_compile()
    try:
        yield
    finally:
        fuse()


def name_failure(error: Exception) -> Exception:
    """Return the error to raise, which names the folder if a compilation failed. Must run on the
    lane.
    """
    if type(error) is not RuntimeError or not re.match(FAILURES, str(error)):
        return error
    mx.disable_compile()
    reason = str(error).rpartition("the output is: ")[2][:300]
    found = f"in {FOLDER}, where {room():,} bytes are free"
    # mlx would load a broken file again and again.
    shutil.rmtree(FOLDER / "mlx" / version("mlx") / "cpu", ignore_errors=True)
    return RuntimeError(f"[Compile] mlx could not compile {found}: {reason}")
