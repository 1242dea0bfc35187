"""Code that mlx compiles with g++ for a CPU: its folder, and passes without such code.

mlx writes sources to the temporary folder, runs g++ there and loads the result, now and in later
processes. So it has a folder that nobody else can write to, in the user's cache. Without such a
folder, as on a read-only disk, it compiles in the temporary folder.
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

# The free bytes without which passes run unfused: 67 functions took 1.4 MB, and g++'s files beside
# each some more.
LEAST_BYTES: Final = 16 << 20
# The beginnings of the texts in mlx/backend/cpu/compiled.cpp and mlx/backend/cuda/jit_module.cpp,
# and of our own.
FAILURES: Final = (
    r"\[Compile(::eval_cpu)?\] |Could not load C\+\+ shared library |Failed to load compiled "
    r"|filesystem error: "
)


def choose_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder where this process compiles from now on, made if missing."""
    # C++'s std::filesystem::temp_directory_path reads these, in this order.
    values = map(environment.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    temporary = Path(next(filter(None, values), "/tmp"))
    # Machines of several kinds may share a home; macOS gives a user a temporary folder.
    folder = cache_folder(environment, f"mlx-{platform.machine()}")
    may_run = False
    if sys.platform == "linux":
        with suppress(OSError), open_folder(folder) as opened:
            may_run = not os.fstatvfs(opened).f_flag & os.ST_NOEXEC
    if folder is None or not may_run or not os.access(folder, os.W_OK):
        return temporary
    # The variable is for mlx and its g++ only: os.environ is unchanged, and so are Python's
    # temporary files and the folder of sandboxes, whose environment is made from it.
    os.putenv("TMPDIR", str(folder))
    return folder


FOLDER: Final = choose_folder(os.environ)


def room() -> int:
    """Return how many bytes may be written to the folder."""
    return shutil.disk_usage(FOLDER).free if os.access(FOLDER, os.W_OK) else 0


def fuse() -> bool:
    """Have passes fused if there is room for their code; return False if there is none. On the
    lane.

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
    """Return a compilation's error with the folder's name and free bytes, and any other error
    unchanged. On the lane.

    From then on passes run unfused, until a load finds room. All compiled files are deleted: a
    broken one would be loaded again and again.
    """
    if type(error) is not RuntimeError or not re.match(FAILURES, str(error)):
        return error
    mx.disable_compile()
    reason = str(error).rpartition("the output is: ")[2][:300]
    found = f"in {FOLDER}, where {room():,} bytes are free"
    shutil.rmtree(FOLDER / "mlx" / version("mlx") / "cpu", ignore_errors=True)
    return RuntimeError(f"[Compile] mlx could not compile {found}: {reason}")
