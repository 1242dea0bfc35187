"""Device, dtype and BLAS: chosen once, and before mlx is imported.

On Linux the mlx wheel carries reference BLAS, fifty times slower than OpenBLAS. Loading
OpenBLAS with global symbols first puts it in front. Whoever wants mlx imports this first.
"""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
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


_FOUND: Final = _load_openblas()
BLAS: Final = _FOUND[0]
_OPENBLAS: Final = _FOUND[1]

import mlx.core as mx  # noqa: E402  (after OpenBLAS, see above)


class Device(StrEnum):
    """Where the maths runs."""

    CPU = "cpu"
    METAL = "metal"
    CUDA = "cuda"


def choose_device(requested: str) -> Device:
    """Turn `auto`, `cpu` or `gpu` into the device to use; ValueError when it is not there."""
    # https://ml-explore.github.io/mlx/build/html/python/metal.html: on a build without the
    # back end the modules are there and is_available() is false.
    metal, cuda = mx.metal.is_available(), mx.cuda.is_available()
    if requested == "cpu":
        return Device.CPU
    if requested == "gpu" and not (metal or cuda):
        raise ValueError("device `gpu` was asked for, but this mlx sees neither Metal nor CUDA")
    if requested not in ("auto", "gpu"):
        raise ValueError(f"device must be auto, cpu or gpu, not `{requested}`")
    if metal:
        return Device.METAL
    return Device.CUDA if cuda else Device.CPU


_DTYPES: Final = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def pick_dtype(device: Device, requested: str | None, checkpoint: mx.Dtype) -> mx.Dtype:
    """Choose the dtype to compute in.

    On the CPU half precision runs 10 to 50 times slower than float32, so float32 is taken
    unless another is asked for. A GPU keeps what the checkpoint holds.
    """
    if requested is not None:
        if requested not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not `{requested}`")
        return _DTYPES[requested]
    return mx.float32 if device is Device.CPU else checkpoint


def configure(device: Device, cache_limit_bytes: int | None = None) -> None:
    """Set the default device and the memory limits. Once, on the thread that will use mlx.

    The thread matters: mlx keeps its default device and streams per thread.
    """
    mx.set_default_device(mx.Device(mx.cpu if device is Device.CPU else mx.gpu, 0))
    if device is Device.CPU:
        _keep_freed_memory()
        return
    info = mx.device_info()
    # https://github.com/ml-explore/mlx-lm: mlx_lm.generate.wired_limit asks for the same number.
    # Wired memory is Metal's; CUDA devices report no such size.
    if recommended := int(info.get("max_recommended_working_set_size", 0)):
        mx.set_wired_limit(recommended)
    # A buffer given back to Metal while in flight can panic the kernel (mlx #3346, #3186):
    # the cache may hold all memory, and is cleared only between bursts, after a synchronise.
    limit = cache_limit_bytes or int(info.get("memory_size", 0))
    if limit:
        mx.set_cache_limit(limit)


def leave() -> None:
    """Give up this thread's streams, as its last act: without it about half of all exits abort."""
    mx.clear_streams()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_ABOVE, _TRIM_ABOVE = 32 << 20, 512 << 20


def _keep_freed_memory() -> None:
    """Let glibc keep freed buffers instead of giving them back to the kernel each time.

    mlx's CPU allocator is malloc. By default each buffer of a few MB is mapped anew and its
    pages are faulted in one by one: GELU over 6 MB took 18 ms instead of 4.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_ABOVE)


def cpu_threads() -> int:
    """Count the cores OpenBLAS uses, or those this process may use."""
    if _OPENBLAS is not None:
        return max(1, int(_OPENBLAS.openblas_get_num_threads()))
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_own = threading.local()


def cpu_streams(count: int) -> list[mx.Stream]:
    """Give `count` CPU streams of this thread, made once: each is a thread of mlx."""
    made: list[mx.Stream] = _own.__dict__.setdefault("streams", [])
    while len(made) < count:
        made.append(mx.new_stream(mx.Device(mx.cpu, 0)))
    return made[:count]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Keep OpenBLAS to one thread per call, while several streams call it side by side."""
    if _OPENBLAS is None:
        yield
        return
    threads = cpu_threads()
    _OPENBLAS.openblas_set_num_threads(1)
    try:
        yield
    finally:
        _OPENBLAS.openblas_set_num_threads(threads)
