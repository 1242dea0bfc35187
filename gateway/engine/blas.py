"""BLAS: chosen before mlx is imported, which this module never does.

On Linux the mlx wheel carries reference BLAS, fifty times slower than OpenBLAS. Loading
OpenBLAS with global symbols first puts it in front. Whoever wants mlx imports this first.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_MLX_WAS_IMPORTED: Final = "mlx.core" in sys.modules


@dataclass(frozen=True, slots=True)
class BlasFinding:
    """What was found, for the log. `hint` says what to do when mlx is left with a slow BLAS."""

    loaded: bool
    hint: str | None = None


_SLOW = (
    "mlx on this CPU multiplies matrices with reference BLAS, about 50 times slower than with "
    "OpenBLAS. "
)
_INSTALL = "Install OpenBLAS (Debian, Ubuntu: `apt-get install libopenblas0`) and start again."
_LATE = "mlx was imported before gateway.engine, so OpenBLAS came too late: import it first."


def openblas_candidates(machine: str) -> tuple[str, ...]:
    """List where OpenBLAS may be, the loader's own choice first.

    Only a copy with unprefixed symbols serves: Debian's. Those inside the numpy and scipy
    wheels rename every function.
    """
    return (
        "libopenblas.so.0",
        f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0",
        "/usr/lib64/libopenblasp.so.0",
    )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable that has no value, while entered: OpenBLAS reads it as it is loaded.

    Its threads spin for 2^26 cycles after each product, some 25 ms on a core that others want.
    After 2^20 they sleep, later than the next product of a pass. Child processes are spared it.
    """
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _load_openblas() -> tuple[BlasFinding, ctypes.CDLL | None]:
    if not sys.platform.startswith("linux"):
        return BlasFinding(loaded=False), None  # macOS: mlx uses Accelerate and Metal.
    for path in openblas_candidates(platform.machine()):
        try:
            with _environment("OPENBLAS_THREAD_TIMEOUT", "20"):
                library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            _ = library.cblas_sgemm, library.openblas_set_num_threads
        except (OSError, AttributeError):
            continue
        if _MLX_WAS_IMPORTED:
            return BlasFinding(loaded=False, hint=_SLOW + _LATE), None
        return BlasFinding(loaded=True), library
    return BlasFinding(loaded=False, hint=_SLOW + _INSTALL), None


BLAS, OPENBLAS = _load_openblas()
