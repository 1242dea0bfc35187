"""The device, its dtype, memory and limits.

gateway.engine has loaded OpenBLAS before this module imports mlx.
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
    """Return the device for `auto`, `cpu` or `gpu`, or raise ValueError if it isn't available."""
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
    """Return `requested`, or by default the checkpoint's dtype on a GPU and float32 on a CPU."""
    if requested is not None:
        if requested not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not `{requested}`")
        return _DTYPES[requested]
    if device is Device.CPU:  # half precision is 10 to 50 times slower there
        return mx.float32
    return checkpoint


def configure(
    device: Device, cache_limit_bytes: int | None = None, wired_limit_bytes: int | None = None
) -> None:
    """Set the default device and the memory limits.

    Call it once, on the thread that will use mlx: each thread has a default device.
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
    """mlx's memory limits in bytes, None for mlx's defaults."""

    cache: int | None
    wired: int | None


def memory_limits(
    device: Device, info: Mapping[str, object], cache: int | None, wired: int | None
) -> Limits:
    """Return mlx's limits for the settings `cache` and `wired`, in bytes."""
    recommended = info.get("max_recommended_working_set_size")
    if device is not Device.METAL or not isinstance(recommended, int):
        return Limits(cache, None)
    # Wired memory made macOS's kernel panic within two minutes, so none is wired by default
    # (https://github.com/ml-explore/mlx/issues/3186, mlx-lm #1666). mlx raises an error if more is
    # wired than recommended.
    if wired is not None:
        wired = min(wired, recommended)
    # Beyond this limit, MLX frees buffers while others are in flight, which also caused panics (mlx
    # #3346). The default is all memory beyond the models' default budget.
    if cache is None:
        cache = recommended // 4
    return Limits(cache, wired)


# MLX's limit of live and cached buffers, unless `iogpu.rsrc_limit` is set
# (mlx/backend/metal/device_info.cpp).
METAL_BUFFERS: Final = 499_000
KEPT_SHARE: Final = 0.5  # the prefix caches' share of the buffers
# Seconds of a pass, after which the next is evaluated in parts: macOS ends a command buffer after
# five seconds, or sooner to draw the screen (exo #1620, omlx #1387, mlx #3267).
PASS_S: Final = 1.0


@dataclass(slots=True)
class KeptBuffers:
    """The number of arrays in all models' prefix caches, and its limit."""

    limit: float = math.inf
    count: int = 0


@dataclass(frozen=True, slots=True)
class DeviceBounds:
    """A device's limits, None if unlimited."""

    buffer_bytes: int | None = None  # size of the largest possible buffer
    pass_s: float | None = None  # see PASS_S
    kept: KeptBuffers = field(default_factory=KeptBuffers)


def read_bounds(device: Device, info: Mapping[str, object]) -> DeviceBounds:
    if device is not Device.METAL:
        return DeviceBounds()
    buffers, largest = info.get("resource_limit"), info.get("max_buffer_length")
    if not isinstance(buffers, int):
        buffers = METAL_BUFFERS
    if not isinstance(largest, int):
        largest = None
    return DeviceBounds(largest, PASS_S, KeptBuffers(KEPT_SHARE * buffers))


def device_info(device: Device) -> Mapping[str, str | int]:
    if device is Device.CPU:
        return {}
    return mx.device_info()


@contextmanager
def keep_file_limits() -> Iterator[None]:
    """Inside the context, let `resource.setrlimit` only raise limits, up to the hard limit.

    On import, mlx_lm/utils.py sets the limit of open files to 2048, or raises ValueError.
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
    """Return mlx's information about a device, without facts that identify this machine."""
    info = mx.device_info(mx.Device(mx.cpu if device is Device.CPU else mx.gpu, 0))
    return {name: info[name] for name in _KNOWN_BY if name in info}


def leave() -> None:
    """Release this thread's streams, as the thread's last call.

    Otherwise about half of all processes abort at exit.
    """
    mx.clear_streams()


def cpu_threads() -> int:
    if OPENBLAS is not None:
        return max(1, int(OPENBLAS.openblas_get_num_threads()))
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_own = threading.local()


def cpu_streams(count: int) -> list[mx.Stream]:
    """Return `count` CPU streams of this thread, each run by mlx on its own thread."""
    made: list[mx.Stream] = _own.__dict__.setdefault("streams", [])
    while len(made) < count:
        made.append(mx.new_stream(mx.Device(mx.cpu, 0)))
    return made[:count]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Make OpenBLAS use one thread per call, while several streams call it."""
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
    """Return the bytes that models may use in total, within the control group's limit."""
    info = device_info(device)
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(key):
            return int(info[key])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *cgroup_limits(_CGROUPS, _MEMBERSHIP)])


def active_bytes() -> int:
    """Return the bytes of live arrays, on any thread."""
    return mx.get_active_memory()


def cached_bytes() -> int:
    """Return the bytes of freed buffers that mlx keeps, on any thread."""
    return mx.get_cache_memory()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MMAP_ABOVE, _TRIM_ABOVE = 32 << 20, 512 << 20


def prepare_malloc() -> None:
    """Tune glibc's malloc, which allocates mlx's buffers on a CPU. Call it before threads start.

    By default, large buffers are mapped anew each time: GELU over 6 MB took 18 ms instead of 4. All
    threads share one arena, since memory freed in one arena cannot be used by another.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_ABOVE)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if not ("MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena" in tunables):
        mallopt(_M_ARENA_MAX, 1)


def launch(*arrays: object) -> None:
    """Start to compute arrays, or trees of them, on the lane."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def is_late() -> bool:
    """Return True if `mx.eval` may return before an error is raised, as on GPUs.

    After a failed Metal command buffer, arrays contain zeros until the stream's next use raises the
    error (mlx #3979, and pull requests 4134 and 4174).
    """
    return mx.default_device() != mx.cpu


def confirm() -> None:
    """Raise late errors of launched work, on the lane.

    Deliver or store results only after this call.
    """
    if is_late():
        mx.synchronize()


def evaluate(*arrays: object) -> None:
    """Compute arrays, or trees of them, on the lane, and raise device errors."""
    mx.eval(*arrays)
    confirm()


class FreedBuffers(Protocol):
    """MLX's functions for freed buffers, or a test's replacement."""

    def synchronize(self) -> None:
        """Wait until no work is in flight."""

    def clear_cache(self) -> None:
        """Return all freed buffers to the system."""


def clear_cache(mlx: FreedBuffers = mx) -> None:
    """Wait for all work on the lane, then return freed buffers to the system.

    No other code may return buffers: with work in flight, macOS's kernel can panic
    (https://github.com/ml-explore/mlx/issues/3346 and 3186).
    """
    mlx.synchronize()
    mlx.clear_cache()


def give_back() -> None:
    """Return freed memory to the system, on the lane."""
    clear_cache()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc's malloc.h, or None in other C libraries."""
    if sys.platform == "linux":
        return getattr(ctypes.CDLL(None), name, None)
    return None


def cgroup_limits(groups: Path, membership: Path) -> list[int]:
    """Return the memory limits, in bytes, of a process's control group and its parents.

    https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html.
    """
    limits = [_number(file) for file in _limit_files(groups, membership)]
    return [limit for limit in limits if limit is not None]


def _limit_files(groups: Path, membership: Path) -> Iterator[Path]:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
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
    except (OSError, ValueError):  # the file is missing or contains "max": no limit
        return None


def multiply() -> None:
    evaluate(mx.ones((64, 64)) @ mx.ones((64, 64)))


def gflops(size: int = 512, times: int = 9) -> float:
    """Return the highest speed of several float32 products, in 10⁹ operations per second."""
    matrix = mx.ones((size, size))
    mx.eval(matrix @ matrix)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        mx.eval(matrix @ matrix)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9
