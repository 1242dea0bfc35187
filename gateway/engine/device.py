"""The choice of the device, its dtype and memory limits, and functions that depend on the device.

gateway/engine/__init__.py has loaded OpenBLAS before this module imports mlx.
"""

import ctypes
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import mlx.core as mx

from gateway.engine.blas import BLAS as BLAS
from gateway.engine.blas import OPENBLAS


class Device(StrEnum):
    """The device on which mlx computes."""

    CPU = "cpu"
    METAL = "metal"
    CUDA = "cuda"


def choose_device(requested: str) -> Device:
    """Return the device for `auto`, `cpu` or `gpu`. Raises ValueError if it isn't available."""
    # https://ml-explore.github.io/mlx/build/html/python/metal.html: a build without Metal or CUDA
    # has the modules mx.metal and mx.cuda too, but their is_available() returns False.
    metal, cuda = mx.metal.is_available(), mx.cuda.is_available()
    if requested == "cpu":
        return Device.CPU
    if requested == "gpu" and not (metal or cuda):
        raise ValueError("this mlx sees neither Metal nor CUDA; auto takes the CPU")
    if requested not in ("auto", "gpu"):
        raise ValueError(f"device must be auto, cpu or gpu, not `{requested}`")
    if metal:
        return Device.METAL
    if cuda:
        return Device.CUDA
    return Device.CPU


_DTYPES: Final = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def pick_dtype(device: Device, requested: str | None, checkpoint: mx.Dtype) -> mx.Dtype:
    """Return the dtype to compute with: the requested one, or else the checkpoint's on a GPU and
    float32 on a CPU, where half precision is 10 to 50 times slower.
    """
    if requested is not None:
        if requested not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not `{requested}`")
        return _DTYPES[requested]
    if device is Device.CPU:
        return mx.float32
    return checkpoint


def configure(
    device: Device, cache_limit_bytes: int | None = None, wired_limit_bytes: int | None = None
) -> None:
    """Set the default device and the memory limits. Call it once, on the thread that will use mlx,
    since mlx has a default device and streams per thread.
    """
    mx.set_default_device(mx.Device(mx.cpu if device is Device.CPU else mx.gpu, 0))
    info = device_info(device)
    limits = memory_limits(device, info, cache_limit_bytes, wired_limit_bytes)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
    if limits.cache is not None:
        mx.set_cache_limit(limits.cache)


@dataclass(frozen=True, slots=True)
class Limits:
    """mlx's memory limits, in bytes; None means mlx's default."""

    cache: int | None
    wired: int | None


def memory_limits(
    device: Device, info: Mapping[str, object], cache: int | None, wired: int | None
) -> Limits:
    """Return the limits to set in mlx. `cache` and `wired` are the settings, in bytes or None;
    `info` is mlx's device_info of a GPU, empty for a CPU.
    """
    recommended = info.get("max_recommended_working_set_size")
    if device is not Device.METAL or not isinstance(recommended, int):
        return Limits(cache, None)
    # https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.set_wired_limit.html
    # By default no memory is wired. With wired memory, concurrent streams and a prompt cache that
    # changes all the time, as here, macOS's kernel panicked within two minutes; without wired
    # memory, the same load ran for four hours (https://github.com/ml-explore/mlx/issues/3186,
    # mlx-lm #1666). mlx raises an error if more is wired than recommended.
    if wired is not None:
        wired = min(wired, recommended)
    # If more bytes are cached than this limit, or all memory is used, MLX itself returns buffers to
    # the system while others are in flight, which also caused panics (mlx #3346). So the limit is
    # all memory beyond the models' default budget, and `give_back` empties the cache long before.
    if cache is None:
        cache = recommended // 4
    return Limits(cache, wired)


# MLX's limit on the number of buffers if `iogpu.rsrc_limit` isn't set
# (mlx/backend/metal/device_info.cpp). Live buffers and buffers cached for reuse both count; beyond
# the limit MLX raises "Resource limit (499000) exceeded" (mlx #3849).
METAL_BUFFERS: Final = 499_000
# The prefix caches' share of the buffers; weights, rows and passes need the rest.
KEPT_SHARE: Final = 0.5
# Seconds. After a longer pass, the next one is evaluated in parts. macOS ends a command buffer
# after about five seconds, or sooner to draw the screen (exo #1620, omlx #1387, mlx #3267); Apple
# documents no number.
PASS_S: Final = 1.0


@dataclass(slots=True)
class KeptBuffers:
    """The number of arrays in the prefix caches of all models together, and the most allowed."""

    limit: float = math.inf
    count: int = 0


@dataclass(frozen=True, slots=True)
class DeviceBounds:
    """A device's limits; None means unlimited."""

    buffer_bytes: int | None = None  # the largest possible buffer, in bytes
    # Seconds. A pass that took longer is followed by one that is evaluated in parts.
    pass_s: float | None = None
    kept: KeptBuffers = field(default_factory=KeptBuffers)


def read_bounds(device: Device, info: Mapping[str, object]) -> DeviceBounds:
    """Return the limits of a device, given mlx's device_info. Only Metal has limits."""
    if device is not Device.METAL:
        return DeviceBounds()
    buffers, largest = info.get("resource_limit"), info.get("max_buffer_length")
    if not isinstance(buffers, int):
        buffers = METAL_BUFFERS
    if not isinstance(largest, int):
        largest = None
    return DeviceBounds(largest, PASS_S, KeptBuffers(KEPT_SHARE * buffers))


def device_info(device: Device) -> Mapping[str, str | int]:
    """Return mlx's information about a GPU; an empty mapping for a CPU."""
    if device is Device.CPU:
        return {}
    return mx.device_info()


@contextmanager
def keep_file_limits() -> Iterator[None]:
    """Inside the context, let `resource.setrlimit` only raise limits, up to the hard limit.

    mlx_lm/utils.py, when it is imported, sets the limit of open files to 2048, even if it was
    higher, and raises ValueError if the hard limit is below 4096.
    """
    set_limit = resource.setrlimit

    def raise_limit(kind: int, limits: tuple[int, int]) -> None:
        soft, hard = resource.getrlimit(kind)
        limit = limits[0]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        if soft != resource.RLIM_INFINITY and limit > soft:
            set_limit(kind, (limit, hard))

    resource.setrlimit = raise_limit
    try:
        yield
    finally:
        resource.setrlimit = set_limit


_KNOWN_BY: Final = (
    *("device_name", "architecture", "compute_capability_major", "compute_capability_minor"),
    *("max_recommended_working_set_size", "memory_size", "total_memory"),
)


def device_facts(device: Device) -> dict[str, str | int]:
    """Return mlx's information about a device, leaving out all that identifies this machine."""
    info = mx.device_info(mx.Device(mx.cpu if device is Device.CPU else mx.gpu, 0))
    return {name: info[name] for name in _KNOWN_BY if name in info}


def leave() -> None:
    """Release this thread's streams. Call it last on the thread: otherwise about half of all
    processes abort at exit.
    """
    mx.clear_streams()


def cpu_threads() -> int:
    """Return the number of threads that OpenBLAS uses; without OpenBLAS, the number of cores that
    this process may use.
    """
    if OPENBLAS is not None:
        return max(1, int(OPENBLAS.openblas_get_num_threads()))
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_own = threading.local()


def cpu_streams(count: int) -> list[mx.Stream]:
    """Return `count` CPU streams of this thread, creating missing ones. mlx runs each stream in a
    separate thread.
    """
    made: list[mx.Stream] = _own.__dict__.setdefault("streams", [])
    while len(made) < count:
        made.append(mx.new_stream(mx.Device(mx.cpu, 0)))
    return made[:count]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Make OpenBLAS use one thread per call inside the context. Use it where several streams call
    OpenBLAS at the same time.
    """
    if OPENBLAS is None:
        yield
        return
    threads = cpu_threads()
    OPENBLAS.openblas_set_num_threads(1)
    try:
        yield
    finally:
        OPENBLAS.openblas_set_num_threads(threads)


_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_bytes(device: Device) -> int:
    """Return the bytes that models may use in total.

    On Metal this is the recommended working set, on CUDA the device's memory, and on a CPU the
    machine's memory or, if that is less, the limit of this process's control group.
    """
    info = device_info(device)
    # https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.device_info.html
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(key):
            return int(info[key])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *cgroup_limits(_CGROUPS, _MEMBERSHIP)])


def active_bytes() -> int:
    """Return the bytes of live arrays. Safe on any thread."""
    return mx.get_active_memory()


def cached_bytes() -> int:
    """Return the bytes of freed buffers that mlx keeps for reuse. Safe on any thread."""
    return mx.get_cache_memory()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MMAP_ABOVE, _TRIM_ABOVE = 32 << 20, 512 << 20


def prepare_malloc() -> None:
    """Tune glibc's malloc, from which mlx's buffers come on a CPU. Call it before threads start.

    Freed buffers are kept for reuse. By default, each buffer of a few MB is mapped anew and its
    pages are faulted in one by one, so that GELU over 6 MB took 18 ms instead of 4.

    All threads share one arena, since memory that is freed in one arena cannot be used by another.
    With one arena per thread, the mixed load of tests/provoked/test_soak.py took 358 MB instead of
    312, and no more requests were answered.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_ABOVE)
    # https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if not ("MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena" in tunables):
        mallopt(_M_ARENA_MAX, 1)


def launch(*arrays: object) -> None:
    """Start to compute arrays, or trees of them, without waiting. Must run on the lane."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def is_late() -> bool:
    """Return True if errors of this thread's device may be raised late: after `mx.eval` returned.

    This is true of GPUs. If a Metal command buffer fails before an evaluation's last one, the
    arrays contain zeros, `mx.eval` returns, and the error is raised at the stream's next use (mlx
    #3979, and pull requests 4134 and 4174).
    """
    return mx.default_device() != mx.cpu


def confirm() -> None:
    """If errors may be raised late (`is_late`), wait for all launched work and raise its error. A
    pass's results may be delivered or stored only after this call. Must run on the lane.
    """
    if is_late():
        mx.synchronize()


def evaluate(*arrays: object) -> None:
    """Compute arrays, or trees of them, and wait. Raises device errors. Must run on the lane."""
    mx.eval(*arrays)
    confirm()


class FreedBuffers(Protocol):
    """MLX's functions for freed buffers: mlx.core itself, or a test's replacement."""

    def synchronize(self) -> None:
        """Wait until no work is in flight."""

    def clear_cache(self) -> None:
        """Return all freed buffers to the system."""


def clear_cache(mlx: FreedBuffers = mx) -> None:
    """Wait until no work is in flight, then return freed buffers to the system. Must run on the
    lane.

    No other code may return buffers: doing so while others are in flight can cause a kernel panic
    on macOS (https://github.com/ml-explore/mlx/issues/3346 and 3186).
    """
    mlx.synchronize()
    mlx.clear_cache()


def give_back() -> None:
    """Return freed memory to the system. Must run on the lane.

    Keeping memory saves page faults, but a process that never returns memory stays as large as it
    ever was. On a CPU, a call took 4 to 14 ms under a load of embeddings, and 58 ms after prompts
    of 5,000 tokens, when the process shrank from 752 to 449 MB.
    """
    clear_cache()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc's malloc.h; None if the C library lacks it, as musl does."""
    if sys.platform == "linux":
        return getattr(ctypes.CDLL(None), name, None)
    return None


def cgroup_limits(groups: Path, membership: Path) -> list[int]:
    """Return the memory limits, in bytes, of a process's control group and its parents.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max) and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.limit_in_bytes).
    """
    limits = [_number(file) for file in _limit_files(groups, membership)]
    return [limit for limit in limits if limit is not None]


def _limit_files(groups: Path, membership: Path) -> Iterator[Path]:
    """Yield all files that may contain a memory limit of this process: one for its control group
    and one for each parent. Inside a container, the group's path is often /.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        yield from (
            folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)
        )


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file doesn't exist, or contains "max": no limit
        return None


def multiply() -> None:
    """Multiply two small matrices on this thread's default device."""
    evaluate(mx.ones((64, 64)) @ mx.ones((64, 64)))


def gflops(size: int = 512, times: int = 9) -> float:
    """Return the speed of multiplying square float32 matrices, in 10⁹ operations per second.

    The fastest of several runs counts, since other work on the machine can only slow a run down.
    """
    matrix = mx.ones((size, size))
    mx.eval(matrix @ matrix)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        mx.eval(matrix @ matrix)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9
