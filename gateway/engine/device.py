"""Device, dtype and memory limits: chosen once, on the thread that will use mlx.

The package has loaded OpenBLAS before mlx is imported.
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
    """Where the maths runs."""

    CPU = "cpu"
    METAL = "metal"
    CUDA = "cuda"


def choose_device(requested: str) -> Device:
    """Return the device for `auto`, `cpu` or `gpu`. Raises ValueError if it is not there."""
    # https://ml-explore.github.io/mlx/build/html/python/metal.html: on a build without the
    # back end the modules are there and is_available() is false.
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
    """Choose the dtype to compute in.

    On the CPU half precision runs 10 to 50 times slower than float32, so float32 is taken unless
    another dtype is requested. A GPU keeps the checkpoint's dtype.
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
    """Set the default device and the memory limits. Once, on the thread that will use mlx.

    The thread matters: mlx keeps its default device and streams per thread.
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
    """mlx's memory limits, in bytes; None leaves mlx's own default."""

    cache: int | None
    wired: int | None


def memory_limits(
    device: Device, info: Mapping[str, object], cache: int | None, wired: int | None
) -> Limits:
    """Choose limits from the settings; `info` is mlx's device_info of a GPU, empty for a CPU."""
    recommended = info.get("max_recommended_working_set_size")
    if device is not Device.METAL or not isinstance(recommended, int):
        return Limits(cache, None)
    # https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.set_wired_limit.html
    # By default nothing is wired: concurrent streams over a churning prompt cache, which is the
    # load here, panicked macOS's kernel within two minutes with wired memory, and not in four
    # hours without (https://github.com/ml-explore/mlx/issues/3186, mlx-lm's 1666). More than
    # recommended is an error.
    if wired is not None:
        wired = min(wired, recommended)
    # MLX itself gives buffers back while others are in flight, which was seen to panic too (mlx
    # #3346), as soon as more are kept than this, or all memory is used. So the limit is the part
    # that models' budget leaves by default, and `give_back` empties the cache long before.
    if cache is None:
        cache = recommended // 4
    return Limits(cache, wired)


# The number of buffers if `iogpu.rsrc_limit` is silent: mlx/backend/metal/device_info.cpp. Kept for
# reuse or alive, every buffer counts; beyond it MLX raises "Resource limit (499000) exceeded" (mlx
# #3849).
METAL_BUFFERS: Final = 499_000
KEPT_SHARE: Final = 0.5  # share of the buffers for prefixes; the others are weights, rows, passes
# Seconds of one evaluation. macOS ends a command buffer after about five seconds, or sooner to draw
# the screen (exo #1620, omlx #1387, mlx #3267); Apple documents no number.
PASS_S: Final = 1.0


@dataclass(slots=True)
class KeptBuffers:
    """How many arrays are kept of prompts, of all models together, and the most that may be."""

    limit: float = math.inf
    count: int = 0


@dataclass(frozen=True, slots=True)
class DeviceBounds:
    """A device's bounds; None where it has none."""

    buffer_bytes: int | None = None  # bytes of the largest buffer
    # A pass that took longer is followed by one that is evaluated in parts.
    pass_s: float | None = None
    kept: KeptBuffers = field(default_factory=KeptBuffers)


def read_bounds(device: Device, info: Mapping[str, object]) -> DeviceBounds:
    """Return the bounds of a device; `info` is mlx's device_info of it. Only Metal states any."""
    if device is not Device.METAL:
        return DeviceBounds()
    buffers, largest = info.get("resource_limit"), info.get("max_buffer_length")
    if not isinstance(buffers, int):
        buffers = METAL_BUFFERS
    if not isinstance(largest, int):
        largest = None
    return DeviceBounds(largest, PASS_S, KeptBuffers(KEPT_SHARE * buffers))


def device_info(device: Device) -> Mapping[str, str | int]:
    """Return mlx's facts about a GPU; none about a CPU."""
    if device is Device.CPU:
        return {}
    return mx.device_info()


@contextmanager
def keep_file_limits() -> Iterator[None]:
    """While entered, the limit of open files is only ever raised, as far as it may be.

    mlx_lm/utils.py sets it to 2048 where it is imported, however high a supervisor has set it, and
    raises ValueError where the hard limit is below 4096.
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
    """Return mlx's facts about a device, without any that identify this one specimen."""
    info = mx.device_info(mx.Device(mx.cpu if device is Device.CPU else mx.gpu, 0))
    return {name: info[name] for name in _KNOWN_BY if name in info}


def leave() -> None:
    """Release this thread's streams, as its last act. Otherwise about half of all exits abort."""
    mx.clear_streams()


def cpu_threads() -> int:
    """Count the cores that OpenBLAS uses, or those that this process may use."""
    if OPENBLAS is not None:
        return max(1, int(OPENBLAS.openblas_get_num_threads()))
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_own = threading.local()


def cpu_streams(count: int) -> list[mx.Stream]:
    """Return `count` CPU streams of this thread, made once; each is a thread of mlx."""
    made: list[mx.Stream] = _own.__dict__.setdefault("streams", [])
    while len(made) < count:
        made.append(mx.new_stream(mx.Device(mx.cpu, 0)))
    return made[:count]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Keep OpenBLAS to one thread per call, while several streams call it side by side."""
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
    """Count the bytes that models may use, before anything is allocated.

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
    """Count the bytes of live arrays. Safe on any thread."""
    return mx.get_active_memory()


def cached_bytes() -> int:
    """Count the bytes that were freed and are kept for reuse. Safe on any thread."""
    return mx.get_cache_memory()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MMAP_ABOVE, _TRIM_ABOVE = 32 << 20, 512 << 20


def prepare_malloc() -> None:
    """Tune glibc's malloc, which holds mlx's buffers on a CPU. Call it before any thread starts.

    Freed buffers are kept: by default each of a few MB is mapped anew and its pages are faulted in
    one by one, and GELU over 6 MB took 18 ms instead of 4. All threads share one arena, since
    memory freed in one thread's arena is of no use to the others: with an arena each, the mixed
    load of tests/provoked/test_soak.py held 358 MB instead of 312, and answered as many requests.
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
    """Begin to compute arrays, or trees of them, without waiting for them. On the lane only."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def is_late() -> bool:
    """Return True if this thread's device may report an error after the wait for its arrays.

    A GPU may. A command buffer of Metal that fails before the last one of an evaluation leaves
    zeros, `mx.eval` returns, and the error comes at the stream's next use: mlx #3979, and pull
    requests 4134 and 4174.
    """
    return mx.default_device() != mx.cpu


def confirm() -> None:
    """Wait for all that was launched, if the device is late, and raise its error. On the lane only.

    Nothing of a pass is delivered or kept before. It waits for work launched later too.
    """
    if is_late():
        mx.synchronize()


def evaluate(*arrays: object) -> None:
    """Compute arrays, or trees of them, and wait; raise the device's error. On the lane only."""
    mx.eval(*arrays)
    confirm()


class FreedBuffers(Protocol):
    """MLX's functions for freed buffers: the module itself, or a test's record of calls."""

    def synchronize(self) -> None:
        """Wait until nothing is in flight."""

    def clear_cache(self) -> None:
        """Return every freed buffer to the system."""


def clear_cache(mlx: FreedBuffers = mx) -> None:
    """Return freed buffers to the system, once nothing is in flight. On the lane only.

    This is the only place that does: a buffer returned to Metal while others are in flight can
    panic the kernel (https://github.com/ml-explore/mlx/issues/3346 and 3186).
    """
    mlx.synchronize()
    mlx.clear_cache()


def give_back() -> None:
    """Return freed memory to the system. On the lane only.

    Kept memory saves page faults, but a process that never returns any stays as large as at its
    worst moment. On a CPU it took 4 to 14 ms under a load of embeddings; once, after prompts of
    5,000 tokens, 58, and 752 MB became 449.
    """
    clear_cache()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of malloc.h that glibc has and other C libraries, such as musl, lack."""
    if sys.platform == "linux":
        return getattr(ctypes.CDLL(None), name, None)
    return None


def cgroup_limits(groups: Path, membership: Path) -> list[int]:
    """Read the limits, in bytes, of a process's control group and of its parents.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max) and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.limit_in_bytes).
    """
    limits = [_number(file) for file in _limit_files(groups, membership)]
    return [limit for limit in limits if limit is not None]


def _limit_files(groups: Path, membership: Path) -> Iterator[Path]:
    """Yield every file that may hold a limit. Inside a container a group's path is often /."""
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
    except (OSError, ValueError):  # no such group here, or "max"
        return None


def multiply() -> None:
    """Multiply two small matrices on this thread's default device."""
    evaluate(mx.ones((64, 64)) @ mx.ones((64, 64)))


def gflops(size: int = 512, times: int = 9) -> float:
    """Return how fast square float32 matrices are multiplied, at best, in 10⁹ operations a second.

    At best, since other work on the machine can only slow it.
    """
    matrix = mx.ones((size, size))
    mx.eval(matrix @ matrix)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        mx.eval(matrix @ matrix)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9
