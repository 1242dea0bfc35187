"""Code that mlx compiles with g++ for a CPU: the folder for it, and passes without compiled code.

mlx writes source files to the temporary folder, runs g++ there and loads the compiled libraries, in
this process and in later ones. Other users could replace them, so we give mlx a folder in the
user's cache that nobody else can write to. If that folder cannot be created, for example on a
read-only disk, the temporary folder is used after all.
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

# With less free disk space than this, passes run unfused. 67 functions took 1.4 MB, and g++'s own
# files take some more.
LEAST_BYTES: Final = 16 << 20
# How messages of failed compilations begin, in mlx/backend/cpu/compiled.cpp,
# mlx/backend/cuda/jit_module.cpp and `name_failure`.
FAILURES: Final = (
    r"\[Compile(::eval_cpu)?\] |Could not load C\+\+ shared library |Failed to load compiled "
    r"|filesystem error: "
)


def choose_folder(environment: Mapping[str, str]) -> Path:
    """Choose the folder where mlx compiles from now on, and create it if it is missing."""
    # C++'s std::filesystem::temp_directory_path reads these variables, in this order.
    values = map(environment.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    temporary = Path(next(filter(None, values), "/tmp"))
    # The name includes the machine because different machines may share a home. On macOS the
    # temporary folder is already the user's own.
    folder = cache_folder(environment, f"mlx-{platform.machine()}")
    may_run = False
    if sys.platform == "linux":
        with suppress(OSError), open_folder(folder) as opened:
            may_run = not os.fstatvfs(opened).f_flag & os.ST_NOEXEC
    if folder is None or not may_run or not os.access(folder, os.W_OK):
        return temporary
    # putenv affects only C code, such as mlx, and the g++ that mlx starts. Python's temporary files
    # and the sandbox processes go by os.environ, which putenv doesn't change.
    os.putenv("TMPDIR", str(folder))
    return folder


FOLDER: Final = choose_folder(os.environ)


def room() -> int:
    """Return how many bytes can be written to the folder for compiled code."""
    return shutil.disk_usage(FOLDER).free if os.access(FOLDER, os.W_OK) else 0


def fuse() -> bool:
    """Turn fusion by `mx.compile` on if the disk has room for compiled code, otherwise off. Return
    True if there is room. Must run on the lane.

    Functions that are compiled already follow this switch too. A GPU needs no folder.
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
    """If a failed compilation raised this error, return an error that also names the folder and the
    free bytes there; return any other error unchanged. Must run on the lane.

    After a failed compilation, passes run unfused until a model is loaded while the disk has room.
    All compiled files are deleted, since a broken file would be loaded again and again.
    """
    if type(error) is not RuntimeError or not re.match(FAILURES, str(error)):
        return error
    mx.disable_compile()
    reason = str(error).rpartition("the output is: ")[2][:300]
    found = f"in {FOLDER}, where {room():,} bytes are free"
    shutil.rmtree(FOLDER / "mlx" / version("mlx") / "cpu", ignore_errors=True)
    return RuntimeError(f"[Compile] mlx could not compile {found}: {reason}")
