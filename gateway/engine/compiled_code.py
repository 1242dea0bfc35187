"""Code that mlx compiles with g++ for a CPU: in which folder, and passes that do without it.

mlx writes sources to the temporary folder, runs g++ there and loads what came of it, now and in
later processes. So it has a folder that nobody else can write to, in the user's cache. Where there
can be none, as on a disk that is read-only, it compiles in the temporary folder.
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

# Free, or passes run unfused: 67 functions took 1.4 MB, and g++'s files beside each some more.
LEAST_BYTES: Final = 16 << 20
# Beginnings of the texts in mlx/backend/cpu/compiled.cpp and mlx/backend/cuda/jit_module.cpp, and
# of our own.
FAILURES: Final = (
    r"\[Compile(::eval_cpu)?\] |Could not load C\+\+ shared library |Failed to load compiled "
    r"|filesystem error: "
)


def choose_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder where this process compiles from now on, made if missing."""
    # C++'s std::filesystem::temp_directory_path reads these, in this order.
    values = map(environment.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    temporary = Path(next(filter(None, values), "/tmp"))
    # A home may be that of machines of several kinds; macOS gives a user a temporary folder.
    folder = cache_folder(environment, f"mlx-{platform.machine()}")
    may_run = False
    if sys.platform == "linux":
        with suppress(OSError), open_folder(folder) as opened:
            may_run = not os.fstatvfs(opened).f_flag & os.ST_NOEXEC
    if folder is None or not may_run or not os.access(folder, os.W_OK):
        return temporary
    # For mlx and its g++: os.environ stays as it is, and with it Python's temporary files, and the
    # folder of sandboxes, whose environment is made of it.
    os.putenv("TMPDIR", str(folder))
    return folder


FOLDER: Final = choose_folder(os.environ)


def room() -> int:
    """Return how many bytes may be written to the folder."""
    return shutil.disk_usage(FOLDER).free if os.access(FOLDER, os.W_OK) else 0


def fuse() -> bool:
    """Have passes fused if there is room for their code; return False if there is not. On the lane.

    Functions that `mx.compile` has made already obey it, too. A GPU's back end needs no folder.
    """
    has_room = mx.default_device() != mx.Device(mx.cpu, 0) or room() >= LEAST_BYTES
    if has_room and "MLX_DISABLE_COMPILE" not in os.environ:
        mx.enable_compile()
    else:
        mx.disable_compile()
    return has_room


@contextmanager
def unfused() -> Iterator[None]:
    """Compile nothing inside. On the lane."""
    mx.disable_compile()
    try:
        yield
    finally:
        fuse()


def name_failure(error: Exception) -> Exception:
    """Return an error with the folder's name and free bytes for what MLX raises of a compilation,
    and any other error as it is. On the lane.

    From then on passes run unfused, until a load finds room. What has been compiled so far is
    deleted: a broken file among it would be loaded again and again.
    """
    if type(error) is not RuntimeError or not re.match(FAILURES, str(error)):
        return error
    mx.disable_compile()
    reason = str(error).rpartition("the output is: ")[2][:300]
    found = f"in {FOLDER}, where {room():,} bytes are free"
    shutil.rmtree(FOLDER / "mlx" / version("mlx") / "cpu", ignore_errors=True)
    return RuntimeError(f"[Compile] mlx could not compile {found}: {reason}")
